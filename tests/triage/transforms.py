"""What terminals, launchers and people do to a log before it is read. Each takes and gives text."""

from __future__ import annotations

import re
from collections.abc import Callable

Transform = Callable[[str], str]


def hard_wrap(width: int) -> Transform:
    def wrap(text: str) -> str:
        return "\n".join(
            line[at : at + width] for line in text.split("\n") for at in range(0, max(1, len(line)), width)
        )

    return wrap


def pane(width: int) -> Transform:
    """As a terminal gives it back: wrapped, blanks at the right edge lost."""
    wrap = hard_wrap(width)
    return lambda text: "\n".join(line.rstrip() for line in wrap(text).split("\n"))


def last(lines: int) -> Transform:
    return lambda text: "\n".join(text.rstrip("\n").split("\n")[-lines:]) + "\n"


def coloured(text: str) -> str:
    def paint(n: int, line: str) -> str:
        inner = re.sub(r"\w*Error|\d+(?:\.\d+)?|\"[^\"]*\"", lambda m: f"\x1b[1;3{n % 7 + 1}m{m.group()}\x1b[0m", line)
        return f"\x1b[31m{inner}\x1b[0m" if line else line

    return "\n".join(paint(n, line) for n, line in enumerate(text.split("\n")))


def under_bars(text: str) -> str:
    """A bar that goes on while the error is printed, drawn over with carriage returns."""
    out = []
    for n, line in enumerate(text.split("\n")):
        step = 100 + n // 4
        out.append(
            f"\rtrain:  {step // 10}%|███▏      | {step}/1000 [00:10<01:30,  9.90it/s]\r{line}" if n % 2 else line
        )
    return "\n".join(out)


def among_ranks(text: str) -> str:
    """Other ranks' progress between the lines."""
    lines = []
    for n, line in enumerate(text.split("\n")):
        lines += [line, f"[rank{8 + n % 3}]: step {1000 + n} loss 2.{n % 10}1 lr 1.0e-04"]
    return "\n".join(lines)


def among_steps(text: str) -> str:
    """Steps of a peer that says no rank, between the lines: they go on, and the error still is one."""
    lines = []
    for n, line in enumerate(text.split("\n")):
        lines += [line, f"step {1000 + n}/20000 | loss 2.{n % 10}1 | lr 1.0e-4 | 13.2K tok/s"]
    return "\n".join(lines)


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))


def through_a_logger(text: str) -> str:
    stamp = "2026-11-29 16:24:{:02d}.123 | INFO     | launcher:pipe:88 - "
    return "\n".join(stamp.format(n % 60) + line for n, line in enumerate(text.split("\n")))


def from_docker(text: str) -> str:
    return "\n".join(f"2026-11-29T16:24:{n % 60:02d}.123456789Z {line}" for n, line in enumerate(text.split("\n")))


def tee(text: str) -> str:
    """torchrun's own prefix, where the text has none."""
    return "\n".join(
        line if re.match(r"\[(?:rank|default)", line) else f"[default3]:{line}" for line in text.split("\n")
    )


def crlf(text: str) -> str:
    return text.replace("\n", "\r\n")


#: name -> (transform, share of examples whose kind must still be right)
ALL: dict[str, tuple[Transform, float]] = {
    "as it is": (lambda text: text, 1.0),
    "wrapped at 80": (hard_wrap(80), 0.985),
    "wrapped at 117": (hard_wrap(117), 0.985),
    "a pane of 80": (pane(80), 0.97),
    "last 15 lines": (last(15), 0.99),
    "coloured": (coloured, 1.0),
    "under bars": (under_bars, 0.99),
    "among ranks": (among_ranks, 0.99),
    "among steps": (among_steps, 0.96),
    "indented": (indented, 0.99),
    "through a logger": (through_a_logger, 0.98),
    "from docker": (from_docker, 0.99),
    "teed": (tee, 0.99),
    "crlf": (crlf, 1.0),
}
