"""`logs`: an attempt's log or a worker's, byte for byte."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from dflash_ops.contracts import Layout
from dflash_ops.errors import UsageError, did_you_mean
from dflash_ops.resident import attempts
from dflash_ops.resident.files import write_all

POLL = 0.2
BLOCK = 1 << 16


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="logs")
    parser.add_argument("--root", required=True, type=Path)
    parser.add_argument("--attempt", type=int, default=None, help="default: the newest")
    parser.add_argument("--worker", default=None, help="one worker's own log")
    parser.add_argument("--lines", type=int, default=200, help="how many of the last lines; negative: all")
    parser.add_argument("--follow", action="store_true", help="go on until the attempt has ended")
    parser.add_argument("--marker", action="store_true", help="begin with the attempt's marker line")
    options = parser.parse_args(args)
    layout = Layout(options.root.absolute())
    number = _number(layout, options.attempt)
    path = _path(layout, number, options.worker)
    sys.stdout.flush()
    try:
        file = path.open("rb")
    except FileNotFoundError:
        if not options.follow:
            raise UsageError(f"attempt {number} has no log yet", str(path), "see `status`") from None
        file = _wait_for(layout, number, path)
    with file:
        begin = _last_lines(file.fileno(), options.lines)
        if options.marker and begin > 0:
            write_all(1, _marker(layout, number))
        os.lseek(file.fileno(), begin, os.SEEK_SET)
        while True:
            ended = _ended(layout, number)  # asked before the read: what was written before the end is then read
            while data := os.read(file.fileno(), BLOCK):
                write_all(1, data)
            if not options.follow or ended:
                return 0
            time.sleep(POLL)


def _number(layout: Layout, wanted: int | None) -> int:
    found = attempts.numbers(layout)
    if not found:
        raise UsageError(
            "there is no log: nothing was ever started", str(layout.attempts), "start it with: dflash-ops deploy"
        )
    if wanted is not None and wanted not in found:
        raise UsageError(
            f"there is no attempt {wanted}", str(layout.attempts), f"use one of {', '.join(map(str, found[-20:]))}"
        )
    return found[-1] if wanted is None else wanted


def _path(layout: Layout, number: int, worker: str | None) -> Path:
    at = layout.attempt(number)
    if worker is None:
        return at.log
    try:
        names = sorted(p.name.removesuffix(".log") for p in at.logs.iterdir() if p.name.endswith(".log"))
    except (FileNotFoundError, NotADirectoryError):
        names = []
    if worker not in names:
        known = f"use one of {', '.join(names)}" if names else "this attempt has no logs of single workers"
        near = did_you_mean(worker, names)
        raise UsageError(f"attempt {number} has no worker {worker!r}{near}", str(at.logs), known)
    return at.logs / f"{worker}.log"


def _wait_for(layout: Layout, number: int, path: Path):  # type: ignore[no-untyped-def]
    end = time.monotonic() + 30.0
    while True:
        try:
            return path.open("rb")
        except FileNotFoundError:
            if time.monotonic() > end or _ended(layout, number):
                raise UsageError(f"attempt {number} wrote no log", str(path), "see `status`") from None
        time.sleep(POLL)


def _ended(layout: Layout, number: int) -> bool:
    """Whether nothing more will be written."""
    at = layout.attempt(number)
    if at.exit.exists() or attempts.numbers(layout)[-1] != number:
        return True
    attempt = attempts.read(layout, number)
    return attempt.start is not None and not attempt.wrapper_alive


def _marker(layout: Layout, number: int) -> bytes:
    with layout.attempt(number).log.open("rb") as file:
        line = file.readline(4096)
    return line if line.startswith(b"==== dflash-ops attempt ") else b""


def _last_lines(fd: int, lines: int) -> int:
    """Offset at which the last `lines` lines begin (a last line without its newline counts)."""
    size = os.fstat(fd).st_size
    if lines < 0:
        return 0
    if lines == 0 or size == 0:
        return size
    wanted = lines + (1 if os.pread(fd, 1, size - 1) == b"\n" else 0)
    at = size
    while at > 0:
        begin = max(0, at - BLOCK)
        block = os.pread(fd, at - begin, begin)
        count = block.count(b"\n")
        if count >= wanted:
            where = len(block)
            for _ in range(wanted):
                where = block.rindex(b"\n", 0, where)
            return begin + where + 1
        wanted -= count
        at = begin
    return 0
