"""What a command is wrapped in on the other side, so that its end is told, bounded, and never mistaken.

The rule here: what another program (ssh's shell, pct) sees is one line of printable ASCII, the same for every call.
Words that are anything else, the environment and the folder travel on standard input, in front of the command's own;
so values of variables stand in no process list. The wrapper says `TOKEN begin` and `TOKEN end RC` on standard error:
without these lines an exit code is somebody else's (pct's, a killed container's), never the command's.

Needed there: a POSIX sh, and timeout(1), which ends the command with all of its process group.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dflash_ops.errors import UsageError

#: Seconds between TERM and KILL once the deadline has passed or the connection is gone.
KILL_S = 2

#: Longest words, together, that travel as arguments: the kernel takes 128 KiB for one, sshd 256 KiB for a command.
ARGV_BYTES = 60_000

# $1 token, $2 what follows: r = start in /, with a whole PATH (pct hands the caller's folder on, where it exists, and
# has a short PATH of its own); p = words and more come as a line on standard input; l = the rest of standard input is a
# lifeline (its end means that nobody listens any more, and timeout, our parent, is told to end the group); n = standard
# input is empty. `trap :` lets this shell outlive a TERM to its group, so that timeout waits on and gets to its KILL;
# `(exec ...)` never takes a builtin or function for the command. `read` takes single bytes, so that what follows the
# line is left for the command.
_BOOT = """
trap : TERM; t=$1 m=$2 w=; shift 2;
e() { printf '%s end %s\\n' "$t" "$1" >&2; exit "$1"; };
printf '%s begin\\n' "$t" >&2;
case $m in *r*) cd /; export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin;; esac;
case $m in *p*) IFS= read -r p || e 125; eval "$(printf %b "$p")" || e 125;; esac;
case $m in
*l*) exec 3<&0 </dev/null; (read -r x <&3; kill -TERM $PPID) 2>/dev/null & w=$!; exec 3<&-;;
*n*) exec </dev/null;;
esac;
(exec "$@"); r=$?;
[ -z "$w" ] || kill $w 2>/dev/null;
e $r
"""
BOOT = " ".join(_BOOT.split())

#: For a terminal: there is no standard input to spare, so that the words come as one argument.
WORDS = 'eval "$(printf %b "$1")"; exec "$@"'

_PLAIN = re.compile(r"[ -~]*", re.ASCII)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SAFE = frozenset(range(0x20, 0x7F)) - {ord("\\")}


class Held(bytes):
    """Standard input that stays open behind these bytes until the command ends: a lifeline.

    Only for a host that says `holds_stdin`; any other takes it for plain bytes and closes the input behind them.
    """


@dataclass(frozen=True)
class Wrapped:
    """A command ready to be sent: `argv` for the other side, `lead` to be written before the command's own input."""

    argv: tuple[str, ...]
    token: str
    lead: bytes

    @property
    def marks(self) -> Marks:
        return Marks(self.token)


def wrap(
    argv: Sequence[str],
    *,
    limit: float,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    lifeline: bool = False,
    empty: bool = False,
    top: bool = False,
) -> Wrapped:
    """`argv` in its wrapper.

    Args:
        limit: seconds after which the other side ends it; 0 = never (a stream, which has its lifeline).
        lifeline: the end of standard input ends the command. empty: the command's standard input is empty.
        top: without `cwd` it starts in /, and with a whole PATH.

    Raises:
        UsageError: a NUL character, an empty command, or a variable whose name no shell can export.
    """
    check(argv, env, cwd)
    token = f"dflash-{secrets.token_hex(8)}"
    packed = bool(env) or cwd is not None or not is_plain(argv)
    mode = "-" + ("r" if top else "") + ("p" if packed else "") + ("l" if lifeline else "n" if empty else "")
    lead = ascii_line(program(argv, env, cwd)) + b"\n" if packed else b""
    outer = ("timeout", "-k", str(KILL_S), f"{limit:.3f}".rstrip("0").rstrip("."), "sh", "-c", BOOT, "sh", token, mode)
    return Wrapped((*outer, *(() if packed else argv)), token, lead)


def for_terminal(argv: Sequence[str]) -> tuple[str, ...]:
    """`argv` as words of printable ASCII, for a command that has a terminal as its standard input."""
    check(argv, None, None)
    if is_plain(argv):
        return tuple(argv)
    return ("sh", "-c", WORDS, "sh", ascii_line(program(argv, None, None)).decode("ascii"))


def check(argv: Sequence[str], env: Mapping[str, str] | None, cwd: str | None) -> None:
    words = [*argv, *(env or {}), *(env or {}).values(), cwd or ""]
    if not argv or any("\0" in word for word in words):
        raise UsageError("a command is empty or holds a NUL character", repr(list(argv))[:200], "take it out")
    for name in env or {}:
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} is no name of a variable", "env", "use letters, digits and _")


def is_plain(argv: Iterable[str]) -> bool:
    """Whether these words may stand in a command line that other programs look at."""
    words = list(argv)
    return all(_PLAIN.fullmatch(w) for w in words) and sum(len(w) + 1 for w in words) <= ARGV_BYTES


def program(argv: Sequence[str], env: Mapping[str, str] | None, cwd: str | None) -> bytes:
    """Shell text that sets variables, folder and positional parameters."""
    parts: list[bytes] = []
    if env:
        parts.append(b"export " + b" ".join(k.encode() + b"=" + quote(v) for k, v in env.items()))
    if cwd is not None:
        folder = cwd if cwd.startswith("/") else f"./{cwd}"
        message = quote(f"cannot enter {cwd}\n")
        parts.append(b"CDPATH= cd " + quote(folder) + b" || { printf %s " + message + b" >&2; e 126; }")
    parts.append(b"set -- " + b" ".join(map(quote, argv)))
    return b"; ".join(parts)


def quote(word: str) -> bytes:
    """One word for a shell. Bytes of file names that are no UTF-8 (surrogates) stay what they are."""
    return b"'" + word.encode("utf-8", "surrogateescape").replace(b"'", b"'\\''") + b"'"


def ascii_line(text: bytes) -> bytes:
    """`text` for `printf %b`: what is not printable ASCII, and the backslash, as \\0ooo."""
    return b"".join(bytes((c,)) if c in _SAFE else b"\\0%03o" % c for c in text)


def feed(lead: bytes, stdin: bytes | Iterable[bytes] | None) -> bytes | Iterator[bytes]:
    """The wrapper's line and then the command's own input."""
    if stdin is None or isinstance(stdin, bytes):
        return lead + (stdin or b"")
    return _chain(lead, stdin)


def _chain(lead: bytes, stdin: Iterable[bytes]) -> Iterator[bytes]:
    try:
        if lead:
            yield lead
        yield from stdin
    finally:
        close = getattr(stdin, "close", None)
        if close is not None:
            close()


@dataclass(frozen=True)
class Marks:
    """Reads the wrapper's lines out of standard error."""

    token: str

    def read(self, stderr: bytes) -> tuple[bool, int | None, bytes]:
        """(whether the command began, its exit code or None, what it said itself).

        What stands before the first mark was said on the way there (locale noise, pct); if the command never began,
        that is returned as it is.
        """
        first = f"{self.token} begin\n".encode()
        noise, begun, rest = stderr.partition(first)
        if not begun:
            return False, None, noise
        found = re.search(re.escape(self.token).encode() + rb" end (\d+)(?:\n|$)", rest)
        if found is None:
            return True, None, rest
        return True, int(found[1]), rest[: found.start()]

    def read_end(self, stderr: bytes) -> tuple[bool, int | None, bytes]:
        """As `read`, where only the end of standard error was kept: with the last mark in sight it did begin."""
        first = f"{self.token} begin\n".encode()
        stderr = stderr if stderr.endswith(b"\n") else stderr + b"\n"
        if first not in stderr and f"{self.token} end ".encode() in stderr:
            stderr = first + stderr
        return self.read(stderr)
