"""Run a module of the resident on a machine where nothing is installed yet.

The rule here: the argument list is one line of ASCII and never changes (pct drops arguments with newlines, and a
non-UTF-8 locale spoils every other byte); code, request and payload travel on standard input, which is byte-clean. The
zipapp is held in an anonymous memory file, so that asking leaves nothing behind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from dflash_ops.errors import BY_NAME, CommandFailed, ContractError, DflashError
from dflash_ops.hosts.base import Completed, Host

#: The argument of `python3 -c`: reads a length, then that much code, and runs it.
LOADER = "import sys;i=sys.stdin.buffer;exec(i.read(int(i.readline())))"

#: What the loader runs. It must compile on any Python 3, so that an old one gets a sentence and not a SyntaxError.
BOOT = """\
import json, os, runpy, sys
if sys.version_info < (3, 10):
    print(json.dumps({"schema": 1, "error": {"type": "PreflightError",
        "what": "python3 there is %d.%d, the resident needs 3.10 or newer" % sys.version_info[:2],
        "where": sys.executable, "next": "install Python 3.10 or newer, and name it as `python` of the host"}}))
    sys.exit(3)
head = json.loads(i.readline())
pack = i.read(head["zip"])
if len(pack) != head["zip"]:
    print(json.dumps({"schema": 1, "error": {"type": "TransferError", "what": "the stream ended early",
        "where": "standard input", "next": "try again"}}))
    sys.exit(1)
fd = os.memfd_create("dflash-resident")
with os.fdopen(os.dup(fd), "wb") as file:
    file.write(pack)
del pack
sys.path.insert(0, "/proc/self/fd/%d" % fd)
sys.argv = [head["module"]]
sys.dont_write_bytecode = True
runpy.run_module(head["module"], run_name="__main__")
"""

PIECE = 1 << 18

#: Called with the bytes of the payload that have left.
OnBytes = Callable[[int], None]


def call(
    host: Host,
    python: str,
    pack: bytes,
    module: str,
    request: Mapping[str, Any],
    *,
    deadline: float,
    payload: Iterable[bytes] = (),
    on_bytes: OnBytes | None = None,
) -> dict[str, Any]:
    """Run `module` (a `__main__` of the resident's zipapp `pack`) there and return its JSON answer.

    `request` arrives as one line of JSON on its standard input, `payload` behind it.

    Raises:
        HostError: the way to the machine.
        DflashError: what the other side said, as the class that it named.
        CommandFailed: no python there, or no answer.
    """
    argv = (python, "-c", LOADER)

    def stdin() -> Iterator[bytes]:
        code = BOOT.encode()
        head = json.dumps({"zip": len(pack), "module": module}).encode()
        yield b"%d\n" % len(code) + code + head + b"\n"
        for at in range(0, len(pack), PIECE):
            yield pack[at : at + PIECE]
        yield json.dumps(request).encode() + b"\n"
        sent = 0
        for piece in payload:
            yield piece
            sent += len(piece)
            if on_bytes is not None:
                on_bytes(sent)

    done = host.run(argv, deadline=deadline, stdin=stdin())
    return answer(done, host.name, python, f"run {module}")


def answer(done: Completed, host: str, python: str, tried: str) -> dict[str, Any]:
    """The JSON object on the last line of standard output; an error in it is raised as the class it names.

    Raises:
        DflashError: as said by the other side; CommandFailed where it said nothing that can be understood.
    """
    last = done.text.strip().rpartition("\n")[2]
    try:
        said = json.loads(last) if last else None
    except ValueError:
        said = None
    if isinstance(said, dict) and isinstance(said.get("error"), dict):
        raise rebuilt(said["error"], host)
    if done.rc == 0 and isinstance(said, dict):
        return cast("dict[str, Any]", said)
    if done.rc == 127:
        raise CommandFailed(
            f"could not {tried}: there is no {python} on {host}",
            host,
            "install python3 there, or name it as `python` of the host in the inventory",
            rc=127,
            stderr=done.error_text,
        )
    if done.rc == 0:
        raise ContractError(f"could not {tried}: the answer is no JSON object: {last[:200]!r}", host, "deploy again")
    tail = done.error_text.strip()[-2000:] or done.text.strip()[-500:]
    raise CommandFailed(
        f"could not {tried}: exit code {done.rc}" + (f"\n{tail}" if tail else ""),
        host,
        "read the lines above; `dflash-ops doctor` checks the machine",
        rc=done.rc,
        stderr=done.error_text,
    )


def rebuilt(error: Mapping[str, Any], host: str) -> DflashError:
    """An error said as JSON, as the exception it was there."""
    what = str(error.get("what", "an error without text"))
    where = str(error.get("where", ""))
    cls = BY_NAME.get(str(error.get("type", "")), CommandFailed)
    return cls(what, f"{host}: {where}" if where else host, str(error.get("next", "")))
