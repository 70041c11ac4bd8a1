"""`snapshot` and `follow`: the job's state, from the loop if that is fresh, else looked up anew."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dflash_ops.contracts import LIVE_STATES, Layout, ResidentInfo, Snapshot, dumps
from dflash_ops.contracts.snapshot import FRESH_S
from dflash_ops.errors import DflashError
from dflash_ops.resident import daemon
from dflash_ops.resident.course import Kept
from dflash_ops.resident.files import load
from dflash_ops.resident.repairs import wanted
from dflash_ops.resident.tmux import clean_environment
from dflash_ops.resident.watch import Watcher

POLL = 0.2
#: Seconds after which a `follow` says again that somebody watches: the loop then asks for the cards more often.
WATCHED = 5.0


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="snapshot")
    parser.add_argument("--root", required=True, type=Path)
    layout = Layout(parser.parse_args(args).root.absolute())
    clean_environment()
    _print(take(layout))
    return 0


def take(layout: Layout, watcher: Watcher | None = None) -> Snapshot:
    """The job now. With the loop down it is looked up here, said in `warnings`, and the loop started if it is needed.

    Raises:
        OSError: the run folder cannot be read.
    """
    fresh = daemon.fresh_snapshot(layout)
    if fresh is not None:
        return fresh
    watcher = watcher or Watcher(layout, daemon.last_snapshot(layout))
    record = daemon.running(layout)
    if record is not None:
        snapshot = _look(watcher, ResidentInfo(True, record.pid, record.start, record.version))
        last = daemon.last_snapshot(layout)
        late = time.time() - max(record.t, last.t if last is not None else 0.0)
        if late > 2 * FRESH_S:
            text = f"the resident's loop has written nothing for {late:.0f} s; see run/resident.log"
            return replace(snapshot, warnings=(*snapshot.warnings, text))
        return snapshot
    snapshot = _look(watcher, ResidentInfo(False))
    if snapshot.state not in LIVE_STATES and not wanted(layout, snapshot, watcher.attempt):
        return snapshot
    revived = daemon.ensure(layout)
    text = "the resident's loop was down" + (" and was started again" if revived else "; see run/resident.log")
    return replace(snapshot, warnings=(*snapshot.warnings, text))


def _look(watcher: Watcher, resident: ResidentInfo) -> Snapshot:
    return replace(watcher.look(resident), gpus_note="nvidia-smi is asked only while the resident's loop runs")


def follow_main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="follow")
    parser.add_argument("--root", required=True, type=Path)
    parser.add_argument("--forever", action="store_true", help="go on after the job has ended")
    options = parser.parse_args(args)
    layout = Layout(options.root.absolute())
    clean_environment()
    watcher: Watcher | None = None
    curves = _Curves(layout)
    printed = said = float("-inf")
    last: tuple[object, ...] | None = None
    stamp: object = None
    while True:
        if time.monotonic() - said >= WATCHED:
            said = time.monotonic()
            with suppress(OSError):  # a full or read-only disk: then it is asked less often
                layout.watched.touch()
        due = time.monotonic() - printed >= 1.0
        now = _stamp(layout.snapshot)
        if due or now != stamp:
            stamp = now
            if daemon.fresh_snapshot(layout) is None:
                watcher = watcher or Watcher(layout, daemon.last_snapshot(layout))
            snapshot = take(layout, watcher)
            key = (snapshot.attempt, snapshot.seq, snapshot.state, snapshot.detail)
            if due or key != last:
                _print(replace(snapshot, curves=curves.news(snapshot.attempt, watcher)), now=time.time())
                printed, last = time.monotonic(), key
            if snapshot.state not in LIVE_STATES and not options.forever:
                return 0
        time.sleep(POLL)


class _Curves:
    """The curves of the attempt that is shown, each time that they changed."""

    def __init__(self, layout: Layout) -> None:
        self._path = layout.curves
        self._stamp: object = None
        self._kept: Kept | None = None
        self._said: object = None

    def news(self, attempt: int | None, watcher: Watcher | None) -> dict[str, tuple[float, ...]]:
        """All of them where they are others than were given last; else nothing.

        As the loop wrote them, or as this process sees them itself where it had to look.
        """
        stamp = _stamp(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            with suppress(OSError, DflashError):  # damaged: the next writing mends it
                self._kept = load(Kept, self._path)
        found = self._kept.curves if self._kept is not None and self._kept.attempt == attempt else {}
        own = watcher.course if watcher is not None else None
        if own is not None and own[0] == attempt and (self._kept is None or own[1].until > self._kept.until):
            found = own[1].curves()
        if found == self._said:
            return {}
        self._said = found
        return found


def _stamp(path: Path) -> object:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns


def _print(snapshot: Snapshot, now: float | None = None) -> None:
    """`now`: the clock when it was said, for who must know how old it is."""
    text = dumps(snapshot)
    sys.stdout.write((text if now is None else f'{text[:-1]},"now":{now!r}}}') + "\n")
    sys.stdout.flush()
