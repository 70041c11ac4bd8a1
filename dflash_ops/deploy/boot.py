"""Run a module of the resident on a machine where nothing is installed yet.

The rule here: the argument list is one line of ASCII and never changes (pct drops arguments with newlines, and a
non-UTF-8 locale spoils every other byte); code, request and payload travel on standard input, which is byte-clean. The
zipapp is held in an anonymous memory file (where there is none, in a temporary one): asking leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dflash_ops.client import answer
from dflash_ops.errors import CommandFailed
from dflash_ops.hosts.base import Completed, Conversation, Host

#: The argument of `python3 -c`: reads a length, then that much code, and runs it.
LOADER = "import sys;i=sys.stdin.buffer;exec(i.read(int(i.readline())))"

#: What the loader runs. It must compile on any Python 3, so that an old one gets a sentence and not a SyntaxError.
BOOT = """\
import sys
def error(code, **said):
    import json
    print(json.dumps({"schema": 1, "error": said}))
    sys.exit(code)
if sys.version_info < (3, 10):
    error(3, type="PreflightError",
        what="python3 there is %d.%d, the resident needs 3.10 or newer" % sys.version_info[:2],
        where=sys.executable, next="install Python 3.10 or newer, and name it as `python` of the host")
import os
if whole:  # it may be there; where it is not, it comes behind the request, and the request once more behind it
    try:
        there = os.stat(at).st_size == whole
    except OSError:
        there = False
    if not there:
        print('{"schema":1,"lacking_resident":true}', flush=True)
        i.readline()
        at, size = "", whole
if at:
    sys.path[:0] = [at[:-3] + sys.implementation.cache_tag + ".zip", at]
else:
    pack = i.read(size)
    if len(pack) != size:
        error(1, type="TransferError", what="the stream ended early", where="standard input", next="try again")
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
    del pack
    sys.path.insert(0, place)
sys.dont_write_bytecode = True
__import__(module)
sys.exit(sys.modules[module].main([]))
"""

PIECE = 1 << 18

#: Lines before the answer that are not ours (a shell there that greets everybody) and are passed over.
NOISE_LINES = 1000


def call(
    host: Host,
    python: str,
    pack: bytes,
    module: str,
    request: Mapping[str, Any],
    *,
    deadline: float,
    payload: Iterable[bytes] = (),
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

    def stdin() -> Iterator[bytes]:
        yield from joined(opening(b"" if at else pack, module, request, at))
        yield from joined(payload)

    argv = (python, "-I", "-S", "-c", LOADER)
    done = host.run(argv, deadline=deadline, stdin=stdin())
    return answer(done, host.name, python, f"run {module}")


class Talk:
    """A module of the resident that is asked, and may be told more on the same input (see `talk`)."""

    def __init__(self, conversation: Conversation, tried: str, host: str, python: str) -> None:
        self._conversation, self._tried, self._host, self._python = conversation, tried, host, python

    def ask(self, pieces: Iterable[bytes], *, deadline: float) -> dict[str, Any]:
        """Say `pieces`; the answer to them.

        Raises:
            HostError: the way to the machine. DflashError: what the other side said. CommandFailed: it ended.
        """
        line = self._conversation.ask(joined(pieces), deadline=deadline)
        for _ in range(NOISE_LINES):
            if not line or line.startswith(b"{"):
                break
            line = self._conversation.ask((), deadline=deadline)
        done = Completed((), 0, line, b"") if line else self._conversation.end()
        return answer(done, self._host, self._python, self._tried)

    def end(self) -> None:
        """Nothing more is to be said: it ends.

        Raises:
            HostError: the way to the machine.
        """
        self._conversation.end()


@contextlib.contextmanager
def talk(
    host: Host,
    python: str,
    pack: bytes,
    module: str,
    request: Mapping[str, Any],
    *,
    at: str,
    asking: float,
    deadline: float,
) -> Iterator[tuple[Talk, dict[str, Any]]]:
    """As `call`, but the module stays to be told more: (it, its answer to `request`). Leaving the block ends it.

    `at`: where the zipapp lies on that machine if it was installed; where it does not, it is sent. `asking`: seconds
    for the first answer; `deadline`: for all of it.

    Raises:
        As `call`.
    """
    argv = (python, "-I", "-S", "-c", LOADER)
    with host.converse(argv, deadline=deadline) as conversation:
        one = Talk(conversation, f"run {module}", host.name, python)
        said = one.ask(opening(b"", module, request, at, whole=len(pack)), deadline=asking)
        if said.get("lacking_resident"):
            said = one.ask(behind(pack, request), deadline=asking)
        yield one, said


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


def opening(pack: bytes, module: str, request: Mapping[str, Any], at: str = "", *, whole: int = 0) -> Iterator[bytes]:
    """What comes first on standard input: code, zipapp, request.

    `whole`: look whether a zipapp of that size is `at`, and ask for it if not.
    """
    code = f"size, whole, at, module = {len(pack)}, {whole}, {at!a}, {module!a}\n{BOOT}".encode()
    yield b"%d\n" % len(code) + code
    yield from behind(pack, request)


def behind(pack: bytes, request: Mapping[str, Any]) -> Iterator[bytes]:
    """The zipapp and the request."""
    for start in range(0, len(pack), PIECE):
        yield pack[start : start + PIECE]
    yield json.dumps(request).encode() + b"\n"
