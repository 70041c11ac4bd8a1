"""`follow` beside a real job: its lines tell what is new, and go on whatever becomes of the loop or the reader."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from resident_lab import SOON, Lab, wait_for
from smi import Smi

from dflash_ops.contracts import Snapshot, State, from_dict
from dflash_ops.resident import daemon, proc

Line = dict[str, Any]


class Follow:
    """`follow --forever`, its lines kept as they come."""

    def __init__(self, lab: Lab) -> None:
        self.process = subprocess.Popen(lab.argv("follow", "--forever"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.all: list[Line] = []

    def _read(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            self._lines.put(raw)

    def until(self, true: Callable[[Line, Snapshot], Any], why: str) -> Snapshot:
        """The next line of which this is true."""
        end = time.monotonic() + SOON
        while time.monotonic() < end:
            try:
                said = json.loads(self._lines.get(timeout=0.5))
            except queue.Empty:
                continue
            self.all.append(said)
            snapshot = from_dict(Snapshot, said)
            if true(said, snapshot):
                return snapshot
        raise AssertionError(f"waited {SOON:g} s for a line: {why}; last: {self.all[-1:]}")

    def young(self, why: str) -> Snapshot:
        """The next line that tells of this very moment."""
        asked = time.time()
        return self.until(lambda _, s: s.t > asked, why)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """First in the PATH of all that is started, since `follow` may be the one that starts the loop."""
    made = Smi(tmp_path / "bin", holders=[("GPU-1", os.getpid(), "60000", "python3")])
    monkeypatch.setenv("PATH", f"{made.folder}:{os.environ['PATH']}")
    return made


@pytest.fixture
def follow(one: Lab, smi: Smi) -> Iterator[Follow]:
    made = Follow(one)
    yield made
    made.close()


def test_one_stream_tells_all_and_outlives_what_befalls_the_loop(one: Lab, follow: Follow, smi: Smi) -> None:
    nothing = follow.until(lambda _, s: True, "a line although nothing was ever started")
    assert (nothing.state, nothing.attempt) == (State.UNKNOWN, None)
    follow.young("and one more")

    one.start()
    told = follow.until(lambda _, s: s.gpus and s.gpus[1].holders, "who holds the cards")
    assert [g.util for g in told.gpus] == [0.97, 0.97]
    assert [(h.worker, h.bytes) for h in told.gpus[1].holders or ()] == [(None, 60000 << 20)]
    assert told.gpus_note == ""
    assert told.disk is not None
    assert told.disk.total > told.disk.free > 0

    follow.until(lambda line, _: line["curves"], "curves")
    follow.until(lambda line, _: not line["curves"], "a line in which they are as they were")
    curved = [line for line in follow.all if line["curves"]]
    assert all(set(line["curves"]) == {"loss"} for line in curved)
    assert all(0 <= line["now"] - line["t"] < 60 for line in follow.all)
    file = json.loads(one.layout.snapshot.read_text())
    assert (file["curves"], len(file["gpus"])) == ({}, 2)
    assert json.loads(one.layout.curves.read_text())["curves"]["loss"][0] <= 5

    smi.does = "hang"
    smi.write()
    asked = len(smi.asked())
    wait_for(lambda: len(smi.asked()) > asked, "nvidia-smi is asked again, and hangs")
    before = daemon.last_snapshot(one.layout)
    follow.young("the loop does not wait for nvidia-smi")
    now = wait_for(lambda: daemon.fresh_snapshot(one.layout), "a fresh snapshot")
    assert before is not None
    assert now.gpus

    record = daemon.running(one.layout)
    assert record is not None
    os.kill(record.pid, signal.SIGSTOP)
    follow.until(lambda _, s: any("has written nothing" in w for w in s.warnings), "a loop that stands still is said")
    assert proc.send(record.process, signal.SIGKILL)
    after = wait_for(lambda: (r := daemon.running(one.layout)) is not None and r.pid != record.pid and r, "a new loop")
    follow.until(lambda _, s: s.resident is not None and s.resident.pid == after.pid, "its snapshots")
    one.layout.snapshot.unlink()
    one.layout.curves.write_text("{")
    follow.young("without the file")

    one.ok("stop", "--grace", "10")
    follow.until(lambda _, s: s.state is State.STOPPED, "the end")
    follow.young("a stream that is to go on does, after the end too")
    assert follow.process.poll() is None


def test_a_reader_that_goes_away_takes_the_stream_with_it(one: Lab) -> None:
    process = subprocess.Popen(one.argv("follow", "--forever"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(SOON) == 141
    assert process.stderr.read() == b""
