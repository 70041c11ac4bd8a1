"""`FakeHost`: a host with canned answers, for your own tests (of playbooks, of scripts around dflash-ops) and ours.

    host = FakeHost("gpu")
    host.answer("tmux", "-V", stdout="tmux 3.3a\\n")
    host.answer("nvidia-smi", ..., rc=127)             # ... = whatever follows
    host.answer("uptime", error=HostUnreachable("no route", "host gpu"))
    host.files["/srv/job/log"] = b"step 1\\n"

    assert host.run(["tmux", "-V"], deadline=5).text == "tmux 3.3a\\n"
    assert host.calls[0].argv == ("tmux", "-V")

A command without an answer is an AssertionError that shows it: a fake never invents a result. Of several answers
that fit, the one given last is used; one given with `times` is used up, and then the one before it counts again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType

from dflash_ops.errors import CommandFailed, DflashError
from dflash_ops.hosts.base import Completed, Conversation
from dflash_ops.hosts.words import show

#: A word that must be equal, a test of one word, or `...` for any words to the end.
Word = str | Callable[[str], bool] | EllipsisType


@dataclass(frozen=True)
class Call:
    """One command as the fake got it."""

    argv: tuple[str, ...]
    stdin: bytes | None
    env: Mapping[str, str] | None
    cwd: str | None
    deadline: float


@dataclass
class _Answer:
    words: tuple[Word, ...]
    rc: int
    stdout: bytes
    stderr: bytes
    error: DflashError | None
    times: int | None

    def fits(self, argv: Sequence[str]) -> bool:
        if self.times == 0:
            return False
        for index, word in enumerate(self.words):
            if isinstance(word, EllipsisType):
                return True
            if index >= len(argv) or not (word(argv[index]) if callable(word) else word == argv[index]):
                return False
        return len(argv) == len(self.words)


class FakeHost:
    """A `Host` that says what it was told to say. `calls` lists what it was asked, `files` is what `fetch` reads."""

    def __init__(self, name: str = "fake") -> None:
        self.name = name
        self.files: dict[str, bytes] = {}
        self.calls: list[Call] = []
        self.closed = 0
        self._answers: list[_Answer] = []

    def answer(
        self,
        *words: Word,
        rc: int = 0,
        stdout: str | bytes = b"",
        stderr: str | bytes = b"",
        error: DflashError | None = None,
        times: int | None = None,
    ) -> FakeHost:
        """What a command of these words gives: a result, or `error` raised; at most `times` times if that is given."""
        self._answers.append(_Answer(words, rc, _bytes(stdout), _bytes(stderr), error, times))
        return self

    def run(
        self,
        argv: Sequence[str],
        *,
        deadline: float,
        stdin: bytes | Iterable[bytes] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Completed:
        got = stdin if stdin is None or isinstance(stdin, bytes) else b"".join(stdin)
        self.calls.append(Call(tuple(argv), got, env, cwd, deadline))
        answer = self._find(argv)
        return Completed(tuple(argv), answer.rc, answer.stdout, answer.stderr)

    @contextlib.contextmanager
    def converse(self, argv: Sequence[str], *, deadline: float) -> Iterator[Conversation]:
        """What it was told to say, a line for each `ask` (no empty ones); `calls` has all that was said to it."""
        yield _Conversation(self, tuple(argv), deadline)

    def stream(self, argv: Sequence[str], *, idle: float, stdin: bytes | None = None) -> Iterator[bytes]:
        self.calls.append(Call(tuple(argv), stdin, None, None, idle))
        answer = self._find(argv)
        yield from answer.stdout.splitlines()
        if answer.rc != 0:
            text = answer.stderr.decode("utf-8", "replace")
            raise CommandFailed(
                f"exit code {answer.rc} from: {show(argv)}", f"host {self.name}", rc=answer.rc, stderr=text
            )

    def fetch(self, path: str, *, deadline: float, limit: int) -> bytes:
        if path not in self.files:
            raise CommandFailed(f"{path} cannot be read: No such file or directory", f"host {self.name}", rc=1)
        return self.files[path][-limit:] if limit else b""

    def terminal(self, argv: Sequence[str]) -> int:
        return self.run(argv, deadline=0.0).rc

    def close(self) -> None:
        self.closed += 1

    def _find(self, argv: Sequence[str]) -> _Answer:
        for answer in reversed(self._answers):
            if answer.fits(argv):
                if answer.times is not None:
                    answer.times -= 1
                if answer.error is not None:
                    raise answer.error
                return answer
        raise AssertionError(f"FakeHost {self.name} has no answer for: {show(argv)}")


class _Conversation:
    def __init__(self, host: FakeHost, argv: tuple[str, ...], deadline: float) -> None:
        self._answer = host._find(argv)
        self._calls, self._call = host.calls, Call(argv, b"", None, None, deadline)
        self._index = len(host.calls)
        self._lines = self._answer.stdout.splitlines()
        host.calls.append(self._call)

    def ask(self, pieces: Iterable[bytes], *, deadline: float) -> bytes:
        self._call = self._calls[self._index] = replace(self._call, stdin=(self._call.stdin or b"") + b"".join(pieces))
        while self._lines:
            if line := self._lines.pop(0):
                return line
        return b""

    def end(self) -> Completed:
        left = b"".join(line + b"\n" for line in self._lines)
        return Completed(self._call.argv, self._answer.rc, left, self._answer.stderr)


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
