"""The terminal of `status --watch`: another screen, keys as they are pressed, and all as before at the end.

The rule here: however the watch ends (a key, Ctrl-C, TERM, an exception) or stops (Ctrl-Z), the terminal is given back
as it was found. Signals only wake the loop; what they ask for is done there.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any

from dflash_ops.cli.common import is_plain
from dflash_ops.view.watch_draw import ASCII, UNICODE, Pen

#: Another screen, no cursor, no wrapping at the right edge; and back.
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
_LEAVE = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"

#: Seconds that the rest of a key's sequence may take: an Esc that stays alone this long is the Esc key.
ESCAPE_S = 0.05

_SEQUENCES: Mapping[bytes, str] = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down", b"\x1b[5~": "pgup", b"\x1b[6~": "pgdn",
    b"\x1b[H": "home", b"\x1b[F": "end", b"\x1b[1~": "home", b"\x1b[4~": "end", b"\x1bOH": "home", b"\x1bOF": "end",
}  # fmt: skip
_SINGLE: Mapping[str, str] = {
    "\r": "enter", "\n": "enter", "\x1b": "esc", "k": "up", "j": "down", " ": "pgdn", "b": "pgup", "g": "home",
    "G": "end", "h": "?", "\x06": "pgdn", "\x02": "pgup",
}  # fmt: skip


def decode(data: bytes) -> tuple[list[str], bytes]:
    """Keys in what was read, and the begin of a sequence whose rest is still to come."""
    keys: list[str] = []
    while data:
        if data[:1] != b"\x1b":
            char = data[:1].decode("latin-1")
            keys.append(_SINGLE.get(char, char))
            data = data[1:]
            continue
        found = next((s for s in _SEQUENCES if data.startswith(s)), None)
        if found is not None:
            keys.append(_SEQUENCES[found])
            data = data[len(found) :]
        elif data[1:2] in (b"[", b"O"):
            end = next((n for n, c in enumerate(data[2:], 2) if 0x40 <= c <= 0x7E), None)
            if end is None:
                return keys, data[:32]
            data = data[end + 1 :]  # a key that means nothing here
        elif len(data) == 1:
            return keys, data
        else:
            keys.append("esc")
            data = data[1:]
    return keys, b""


def has_screen(environ: Mapping[str, str]) -> bool:
    """Whether standard output is a terminal on which the cursor can be moved."""
    return bool(environ.get("TERM")) and not is_plain(sys.stdout, environ)


def pen(environ: Mapping[str, str], encoding: str | None) -> Pen:
    """ASCII where the terminal is said not to be UTF-8, as tmux tells it: by LC_ALL, LC_CTYPE, LANG."""
    said = environ.get("LC_ALL") or environ.get("LC_CTYPE") or environ.get("LANG") or "UTF-8"
    utf = "utf" in said.lower() and "utf" in (encoding or "").lower().replace("-", "")
    return UNICODE if utf else ASCII


def _ready(sources: Mapping[int, int], seconds: float) -> set[int]:
    """Descriptors of which something can be told, after so many seconds at the latest.

    Not by `select.select`: it knows none above 1023, and a watch of many machines has more.
    """
    poll = select.poll()
    for source, events in sources.items():
        poll.register(source, events)
    return {source for source, _ in poll.poll(max(0.0, seconds) * 1000)}


class Terminal:
    """A context in which the terminal is the watch's.

    Attributes:
        keys: whether standard input is a terminal, so that keys can be read.
        ended: the signal that asked for the end, None while none did.
        resized: the size has changed; the loop clears it.
    """

    def __init__(self) -> None:
        self._in, self._out = sys.stdin.fileno() if sys.stdin is not None else -1, sys.stdout.fileno()
        self.keys = self._in >= 0 and os.isatty(self._in)
        self.ended: int | None = None
        self.resized = False
        self._before: list[Any] | None = None
        self._handlers: dict[int, Any] = {}
        self._stop = False
        self._rest = b""
        self._rest_at = 0.0
        self._wake: tuple[int, int] = (-1, -1)
        self._old_wakeup = -1

    def __enter__(self) -> Terminal:
        sys.stdout.flush()
        self._wake = os.pipe()
        for end in self._wake:
            os.set_blocking(end, False)
        self._old_wakeup = signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        handlers: dict[int, Callable[[int, FrameType | None], None]] = {
            signal.SIGWINCH: self._on_resize,
            signal.SIGTSTP: self._on_stop,
            signal.SIGCONT: self._on_continue,
            signal.SIGTERM: self._on_end,
            signal.SIGHUP: self._on_end,
        }
        for number, handler in handlers.items():
            self._handlers[number] = signal.signal(number, handler)
        try:
            self._take()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def size(self) -> tuple[int, int]:
        """Columns and lines; 80 and 24 where the terminal does not say."""
        try:
            size = os.get_terminal_size(self._out)
        except OSError:
            return 80, 24
        return size.columns or 80, size.lines or 24

    def write(self, text: str) -> None:
        """All of it, at once.

        Raises:
            OSError: the terminal is gone.
        """
        data = text.encode("utf-8", "replace")
        while data:
            try:
                data = data[os.write(self._out, data) :]
            except BlockingIOError:  # another program left it non-blocking
                _ready({self._out: select.POLLOUT}, 1.0)

    def wait(self, seconds: float) -> list[str]:
        """Keys that were pressed, at the latest after so many seconds; a signal ends the wait with none."""
        if self._rest:
            seconds = min(seconds, ESCAPE_S)
        sources = [self._wake[0], *([self._in] if self.keys else [])]
        ready = _ready(dict.fromkeys(sources, select.POLLIN), seconds)
        if self._wake[0] in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake[0], 4096)
        if self._stop:
            self._suspend()
        if self.keys and self._in in ready:
            return self._read()
        if self._rest and time.monotonic() - self._rest_at >= ESCAPE_S * 0.9:
            alone, self._rest = self._rest, b""
            return ["esc"] if alone == b"\x1b" else []
        return []

    def _read(self) -> list[str]:
        try:
            data = os.read(self._in, 4096)
        except OSError:  # the terminal went away
            data = b""
        if not data:
            self.keys = False
            return []
        keys, self._rest = decode(self._rest + data)
        self._rest_at = time.monotonic()
        return keys

    def _take(self) -> None:
        if self.keys:
            before = termios.tcgetattr(self._in)
            tty.setcbreak(self._in, termios.TCSADRAIN)
            self._before = before
        self.write(_ENTER)
        self.resized = True

    def _give(self) -> None:
        # EIO and the like: the terminal is gone, and nothing is left to give back.
        with contextlib.suppress(OSError):
            self.write(_LEAVE)
        if self._before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._in, termios.TCSADRAIN, self._before)
            self._before = None

    def _restore(self) -> None:
        self._give()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
        signal.set_wakeup_fd(self._old_wakeup)
        for end in self._wake:
            os.close(end)

    def _suspend(self) -> None:
        """Ctrl-Z: the terminal is given back, this process stops, and takes it again when it goes on."""
        self._stop = False
        self._give()
        # Not SIGSTOP: where no shell could let it go on, the kernel leaves a TSTP alone.
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._on_stop)
        self._take()

    def _on_resize(self, number: int, frame: FrameType | None) -> None:
        self.resized = True

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop = True

    def _on_continue(self, number: int, frame: FrameType | None) -> None:
        self.resized = True  # stopped by SIGSTOP from outside: somebody else may have written to the screen

    def _on_end(self, number: int, frame: FrameType | None) -> None:
        self.ended = number
