"""Run a module of the resident on a machine where nothing is installed yet.

The rule here: the argument list is one line of ASCII and never changes (pct drops arguments with newlines, and a
non-UTF-8 locale spoils every other byte); code, request and payload travel on standard input, which is byte-clean. The
zipapp is held in an anonymous memory file (where there is none, in a temporary one): asking leaves nothing behind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dflash_ops.client import answer
from dflash_ops.errors import CommandFailed
from dflash_ops.hosts.base import Completed, Host

#: The argument of `python3 -c`: reads a length, then that much code, and runs it.
LOADER = "import sys;i=sys.stdin.buffer;exec(i.read(int(i.readline())))"

#: What the loader runs. It must compile on any Python 3, so that an old one gets a sentence and not a SyntaxError.
BOOT = """\
import importlib, json, os, sys
if sys.version_info < (3, 10):
    print(json.dumps({"schema": 1, "error": {"type": "PreflightError",
        "what": "python3 there is %d.%d, the resident needs 3.10 or newer" % sys.version_info[:2],
        "where": sys.executable, "next": "install Python 3.10 or newer, and name it as `python` of the host"}}))
    sys.exit(3)
head = json.loads(i.readline())
pack = i.read(head["zip"])
if head.get("at"):
    sys.path.insert(0, head["at"])
elif len(pack) != head["zip"]:
    print(json.dumps({"schema": 1, "error": {"type": "TransferError", "what": "the stream ended early",
        "where": "standard input", "next": "try again"}}))
    sys.exit(1)
else:
    try:
        fd = os.memfd_create("dflash-resident")
        place = "/proc/self/fd/%d" % fd
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(pack)
    except (AttributeError, OSError):
        import tempfile
        kept = tempfile.NamedTemporaryFile(prefix="dflash-resident-")
        kept.write(pack)
        kept.flush()
        place = kept.name
    sys.path.insert(0, place)
del pack
sys.dont_write_bytecode = True
sys.exit(importlib.import_module(head["module"]).main([]))
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
    at: str = "",
) -> dict[str, Any]:
    """Run `module` (one of the resident's zipapp `pack`, with a `main()`) there and return its JSON answer.

    `request` arrives as one line of JSON on its standard input, `payload` behind it. `at`: where the same zipapp lies
    on that machine; it is not sent then.

    Raises:
        HostError: the way to the machine.
        DflashError: what the other side said, as the class that it named.
        CommandFailed: no python there, or no answer.
    """

    def counted() -> Iterator[bytes]:
        sent = 0
        for piece in payload:
            yield piece
            sent += len(piece)
            if on_bytes is not None:
                on_bytes(sent)

    def stdin() -> Iterator[bytes]:
        yield from joined(opening(b"" if at else pack, module, request, at))
        yield from joined(counted())

    argv = (python, "-I", "-S", "-c", LOADER)
    done = host.run(argv, deadline=deadline, stdin=stdin())
    return answer(done, host.name, python, f"run {module}")


def follow(
    host: Host, python: str, pack: bytes, module: str, request: Mapping[str, Any], *, idle: float, at: str = ""
) -> Iterator[dict[str, Any]]:
    """As `call`, for work that takes long: the JSON objects that it says, as they come; the last one is the answer.

    Raises:
        HostError: the way to the machine, or nothing was said for `idle` seconds.
        DflashError: what the other side said.
    """
    argv = (python, "-I", "-S", "-c", LOADER)
    stdin = b"".join(opening(b"" if at else pack, module, request, at))
    last = b""
    try:
        for line in host.stream(argv, idle=idle, stdin=stdin):
            if last:
                yield dict(json.loads(last))
            last = line
    except CommandFailed as failed:
        answer(Completed(argv, failed.rc, last, failed.stderr.encode()), host.name, python, f"run {module}")
        raise
    yield answer(Completed(argv, 0, last, b""), host.name, python, f"run {module}")


def joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of at least `PIECE`, but for the last: each piece costs a packet or more on the way."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= PIECE:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def opening(pack: bytes, module: str, request: Mapping[str, Any], at: str = "") -> Iterator[bytes]:
    """What comes first on standard input: code, zipapp, request."""
    code = BOOT.encode()
    head = json.dumps({"zip": len(pack), "at": at, "module": module}).encode()
    yield b"%d\n" % len(code) + code + head + b"\n"
    for start in range(0, len(pack), PIECE):
        yield pack[start : start + PIECE]
    yield json.dumps(request).encode() + b"\n"
