"""The watch as it ships, against real jobs in a real tmux: three sizes at one time, its terminal however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import drive
import pytest

CLI = [sys.executable, "-m", "dflash_ops.cli.main"]
ENV = {**os.environ, "PYTHONPATH": str(drive.REPO)}


@pytest.fixture
def tmux() -> Iterator[drive.Tmux]:
    made = drive.Tmux()
    yield made
    made("kill-server")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An inventory of two jobs that run."""
    server, folder = drive.Tmux(), tmp_path_factory.mktemp("jobs")
    path = drive.inventory(folder, server.socket, ("one", "two"))
    try:
        done = subprocess.run(
            [*CLI, "deploy", "--all", "-i", str(path), "--watch-window", "0"],
            env=ENV,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        yield path
    finally:
        drive.end(folder, server)


def test_three_sizes_at_one_time(tmp_path: Path, jobs: Path, tmux: drive.Tmux) -> None:
    """Keys, sizes, no error, no blank screen, little written (`python tests/view/drive.py 60` for longer)."""
    for one in drive.drive(tmp_path, tmux, jobs, 8.0):
        assert one.blank == 0, one
        assert one.redraws <= 2 * one.seconds + 2, one  # 1: Enter, 1: a tick at each end
        assert one.redraws >= 2, one
        # Half more than what changed at most (benchmarks/watch.py); and far less than whole screens.
        assert one.written <= 1.5 * one.changed, one
        assert one.written <= 0.3 * one.redraws * one.cells, one


def test_the_terminal_is_given_back_however_it_ends(tmp_path: Path, tmux: drive.Tmux) -> None:
    """q, Ctrl-C, TERM, and a fault of ours in the middle; nothing was deployed, which is no error."""
    path = drive.inventory(tmp_path, "dflash-test-none", ("one",))

    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "def late():\n"
        "    time.sleep(3)\n"
        "    import dflash_ops.cli.watch as m\n"
        "    m.frame = None\n"
        "if 'status' in sys.argv: threading.Thread(target=late, daemon=True).start()\n"
    )
    names = ("keys", "interrupt", "term")
    keys, interrupt, term = (tmux.watch(tmp_path, name, 80, 24, "-i", str(path)) for name in names)
    broken = tmux.watch(tmp_path, "broken", 80, 24, "-i", str(path), env=f"PYTHONPATH={tmp_path}:{drive.REPO}")
    broken.faults = True
    drive.until([keys, interrupt, term], "unknown", "dflash-ops deploy one", "q quit")
    keys.press("q")
    interrupt.press("C-c")
    os.kill(term.child(), signal.SIGTERM)
    drive.until([keys], "as before, code 0", "one  unknown")
    drive.until([interrupt], "as before, code 130", "interrupted")
    drive.until([term], "as before, code 143")
    drive.until([broken], "as before, code 1", "unexpected TypeError")
    for pane in (keys, interrupt, term, broken):
        raw = pane.raw.read_bytes()
        for on, off in ((b"\x1b[?1049h", b"\x1b[?1049l"), (b"\x1b[?25l", b"\x1b[?25h"), (b"\x1b[?7l", b"\x1b[?7h")):
            assert raw.rindex(off) > raw.rindex(on), pane.name


def test_ctrl_z_gives_the_terminal_back_and_fg_takes_it_again(tmp_path: Path, tmux: drive.Tmux) -> None:
    path = drive.inventory(tmp_path, "dflash-test-none", ("one",))
    tmux("new-session", "-d", "-x", "80", "-y", "24", "-s", "z", "env PS1=ready: bash --norc --noprofile -i")
    pane = drive.Pane(tmux, "z", 80, 24, tmp_path / "z.raw")
    drive.until([pane], "ready:")
    words = " ".join([f"PYTHONPATH={drive.REPO}", *CLI, "status", "--watch", "-i", str(path)])
    pane.press(f"stty -g > {tmp_path}/a; {words}", "Enter")
    drive.until([pane], "unknown", "q quit")
    pane.press("C-z")
    drive.until([pane], "Stopped")
    pane.press(f"stty -g > {tmp_path}/b; echo stopped", "Enter")
    drive.until([pane], "stopped\nready:")
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    pane.press("fg", "Enter")
    drive.until([pane], "unknown", "q quit", without="Stopped")
    pane.press("q")
    drive.until([pane], "one  unknown")


def test_a_job_that_crashes_under_the_watch(tmp_path: Path, jobs: Path, tmux: drive.Tmux) -> None:
    """The end and what to type, while the screen stays; triage names what the job said."""
    pane = tmux.watch(tmp_path, "crash", 100, 30, "one", "-i", str(jobs))
    drive.until([pane], "one  ● stepping", "loss")
    pane.faults = True
    (jobs.parent / "one/crash").touch()
    drive.until([pane], "✖ crashed", "exit code 1", "dflash-ops triage --job one", "q quit")
    pane.press("t")
    drive.until([pane], "one: triage", "asked to crash")
    pane.press("q", "q")
    drive.until([pane], "as before, code 0", "one  crashed")


def test_a_link_that_falls_silent_is_said_and_comes_back(tmp_path: Path, jobs: Path, tmux: drive.Tmux) -> None:
    """What the other side runs for us stands still: nothing is heard, and nothing looks healthy meanwhile."""
    pane = tmux.watch(tmp_path, "silent", 80, 24, "two", "-i", str(jobs))
    drive.until([pane], "two  ● stepping", "live")
    (stream,) = _streams(jobs.parent / "two")
    pane.faults = True
    os.kill(stream, signal.SIGSTOP)
    drive.until([pane], "seen ")
    drive.until([pane], "LINK LOST", "? unreachable", "before it was stepping", "link lost")
    drive.until([pane], "two  ● stepping", "live", without="LINK LOST")  # by itself, with another stream
    tmux("kill-session", "-t", "=silent")  # the terminal is closed
    until = time.monotonic() + 20
    while _streams(jobs.parent / "two"):
        assert time.monotonic() < until, "the watch outlived its terminal"
        time.sleep(0.1)


def _streams(root: Path) -> list[int]:
    """Processes that the watch runs beside a job."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if b"follow" in words and str(root).encode() in words:
                    found.append(int(entry.name))
    return found


@pytest.mark.parametrize("command", [["status", "--watch", "--all"], ["logs", "two", "-f", "-n", "100000"]])
def test_a_reader_that_leaves_ends_it_without_a_word(jobs: Path, command: list[str]) -> None:
    words = " ".join([*CLI, *command, "-i", str(jobs)])
    done = subprocess.run(
        ["bash", "-c", f"{words} | head -n 1; exit ${{PIPESTATUS[0]}}"],
        env=ENV, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 1)
