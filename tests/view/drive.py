"""The watch in a real tmux at three sizes at one time: looked at and pressed keys on for SECONDS.

    python tests/view/drive.py 60

What it sees: what stands on each screen (capture-pane), and every byte that the watch wrote (pipe-pane), played to a
terminal that counts cells (tests/view/vt.py).
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vt import Screen

REPO = Path(__file__).resolve().parents[2]
SIZES = ((80, 24), (120, 40), (200, 60))
#: The real one, for the jobs: `python3` may be a script that takes a while.
PYTHON = os.path.realpath(sys.executable)

TRAINER = """\
import math, os, sys, time
for step in range(1, 100000):
    time.sleep(0.25)
    tau = 3 + math.sin(step)
    print(f"it {step}/100000 loss {2 + 4 / step ** 0.5:.3f} tau {tau:.2f} rate {9000 + step}", flush=True)
    if os.path.exists(os.environ["HERE"] + "/crash"):
        raise RuntimeError("asked to crash")
"""
PROGRESS = r"it (?P<step>\d+)/(?P<total>\d+) loss (?P<loss>\S+) tau (?P<tau>\S+) rate (?P<rate>\S+)"


@dataclass
class Pane:
    """One watch in a session of its own.

    Attributes:
        blank: how often nothing stood there after the first screen. looked: how often it was looked at.
        faults: words of an error are expected there.
    """

    tmux: Tmux
    name: str
    width: int
    height: int
    raw: Path
    blank: int = 0
    looked: int = 0
    faults: bool = False
    begun: float = field(default_factory=time.monotonic)

    def shows(self) -> str:
        text = self.tmux("capture-pane", "-p", "-t", f"={self.name}:").stdout
        self.looked += 1
        self.blank += not text.strip()
        assert self.faults or not re.search("Traceback|[a-z]Error|error:|unexpected", text), text
        return text

    def child(self) -> int:
        """The watch's own process."""
        shell = self.tmux("list-panes", "-t", f"={self.name}:", "-F", "#{pane_pid}").stdout.strip()
        return int(Path(f"/proc/{shell}/task/{shell}/children").read_text().split()[0])

    def press(self, *keys: str) -> None:
        self.tmux("send-keys", "-t", f"={self.name}:", *keys)

    def resize(self, width: int, height: int) -> None:
        self.tmux("resize-window", "-t", f"={self.name}:", "-x", str(width), "-y", str(height))

    def played(self) -> Screen:
        """All that was written while the size was the first one, on a terminal that counts."""
        screen = Screen(self.width, self.height)
        text = self.raw.read_bytes().decode("utf-8", "ignore")
        screen.feed(text[text.index("\x1b[?1049h") :])
        return screen


@dataclass
class Tmux:
    """A tmux server of its own."""

    socket: str = field(default_factory=lambda: f"dflash-test-{secrets.token_hex(4)}")

    def __call__(self, *args: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("TMUX", "NO_COLOR"))}
        argv = ["tmux", "-L", self.socket, "-f", os.devnull, *args]
        return subprocess.run(argv, capture_output=True, text=True, env={**env, "LC_ALL": "C.UTF-8"}, timeout=20)

    def watch(self, folder: Path, name: str, width: int, height: int, *args: str, env: str = "") -> Pane:
        """`status --watch` in a new session; what it was before and its exit code stand there after its end."""
        go, raw = folder / f"{name}.go", folder / f"{name}.raw"
        cli = shlex.join([sys.executable, "-m", "dflash_ops.cli.main", "status", "--watch", *args])
        script = (
            f"export PYTHONPATH={REPO} LC_ALL=C.UTF-8 TERM=screen-256color {env}; unset NO_COLOR; trap : INT\n"
            f"while [ ! -e {go} ]; do sleep 0.02; done; t=$(stty -g)\n{cli}\nc=$?\n"
            '[ "$t" = "$(stty -g)" ] && echo "as before, code $c" || echo "changed, code $c"; exec cat\n'
        )
        (folder / f"{name}.sh").write_text(script)
        self("new-session", "-d", "-x", str(width), "-y", str(height), "-s", name, f"sh {folder}/{name}.sh")
        raw.touch()
        self("pipe-pane", "-t", f"={name}:", f"exec cat > {raw}")
        go.touch()
        return Pane(self, name, width, height, raw)


def inventory(folder: Path, socket: str, names: Sequence[str], **more: str) -> Path:
    """Jobs of a small foreign trainer on this machine."""
    from dflash_ops.deploy.toml import dump_toml

    source = folder / "src"
    source.mkdir(exist_ok=True)
    (source / "train.py").write_text(TRAINER)
    jobs = {
        name: {
            "host": f"host-{name}", "root": str(folder / name), "session": name, "socket": socket,
            "source": str(source), "command": [PYTHON, "{release}/train.py"], "progress": PROGRESS,
            "env": {"HERE": "{root}"}, "grace_s": 5,
            "policy": {"mode": "observe"}, **more,
        }
        for name in names
    }  # fmt: skip
    path = folder / "inventory.toml"
    # A host each, so that they are deployed side by side.
    hosts = {f"host-{name}": {"kind": "local", "python": PYTHON} for name in names}
    path.write_text(dump_toml({"schema": 1, "hosts": hosts, "jobs": jobs}))
    return path


def until(panes: Sequence[Pane], *words: str, seconds: float = 60.0, without: str = "\0") -> None:
    """Look at all panes until each shows all the words."""
    end = time.monotonic() + seconds
    left = list(panes)
    while left:
        texts = [(pane, pane.shows()) for pane in left]
        left = [pane for pane, text in texts if without in text or not all(word in text for word in words)]
        assert time.monotonic() < end, f"{left[0].name} never showed {words}:\n{texts[-1][1]}" if left else ""
        time.sleep(0.1)


def quiet(panes: Sequence[Pane], seconds: float) -> None:
    """Only look, ten times a second; nothing is pressed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for pane in panes:
            pane.shows()
        time.sleep(0.1)


def both(panes: Sequence[Pane], act: Callable[[Pane], None]) -> None:
    for pane in panes:
        act(pane)


def keys(panes: Sequence[Pane]) -> None:
    """Every key once, and what it is to show."""

    def press(*names: str) -> None:
        both(panes, lambda pane: pane.press(*names))

    press("j")
    until(panes, "> two")
    press("Enter")
    until(panes, "two  ● stepping", "loss", "Esc all")
    press("l")
    until(panes, "two: log", "/100000 loss", "Esc back")
    press("q")
    until(panes, "two  ● stepping")
    press("t")
    until(panes, "two: triage", "healthy")
    press("Escape")
    until(panes, "two  ● stepping", "q quit")
    press("p")
    until(panes, "PAUSED")
    press("p")
    until(panes, "live", without="PAUSED")
    press("?")
    until(panes, "Keys", "triage: the cause")
    press("Escape")
    until(panes, "two  ● stepping", "Esc all")
    press("Escape")
    until(panes, "2 jobs")
    press("Up")
    until(panes, "> one")


@dataclass
class Counted:
    """Of the time in which nothing was pressed and the size stayed."""

    size: str
    seconds: float
    redraws: int
    written: int
    changed: int
    cells: int
    looked: int
    blank: int

    def __str__(self) -> str:
        whole = self.redraws * self.cells
        return (
            f"{self.size:>7}: {self.redraws} redraws in {self.seconds:.1f} s, {self.written} cells written, "
            f"{self.changed} of them changed (whole screens: {whole}); looked {self.looked} times, blank {self.blank}"
        )


def counted(pane: Pane, seconds: float) -> Counted:
    """What was written so far, without the first screen."""
    screen = pane.played()
    redraws = screen.redraws[1:]
    assert screen.redraws[0].cleared and not any(r.cleared for r in redraws), "cleared between two redraws"
    assert not any(r.blank_after for r in screen.redraws)
    return Counted(
        f"{pane.width}x{pane.height}", seconds, len(redraws), sum(r.written for r in redraws),
        sum(r.changed for r in redraws), pane.width * pane.height, pane.looked, pane.blank,
    )  # fmt: skip


def drive(folder: Path, tmux: Tmux, path: Path, seconds: float) -> list[Counted]:
    """Half of the time only looked at, then keys, then other sizes, then the end."""
    panes = [tmux.watch(folder, f"w{w}x{h}", w, h, "--all", "-i", str(path)) for w, h in SIZES]
    until_seen = time.monotonic() + 30
    while not all("2 jobs" in tmux("capture-pane", "-p", "-t", f"={p.name}:").stdout for p in panes):
        assert time.monotonic() < until_seen, panes[0].shows()
        time.sleep(0.1)
    began = time.monotonic()
    quiet(panes, seconds * 0.25)
    both(panes, lambda pane: pane.press("Enter"))
    until(panes, "one  ● stepping", "Esc all")
    quiet(panes, seconds * 0.25)
    found = [counted(pane, time.monotonic() - pane.begun) for pane in panes]
    both(panes, lambda pane: pane.press("Escape"))
    until(panes, "2 jobs")
    while True:
        keys(panes)
        both(panes, lambda pane: pane.press("Enter"))
        for change in (-30, -50, 40, 0):
            both(panes, lambda pane, c=change: pane.resize(max(40, pane.width + c), max(10, pane.height + c // 4)))  # type: ignore[misc]
            until(panes, "stepping")
        both(panes, lambda pane: pane.press("Escape"))
        until(panes, "2 jobs")
        if time.monotonic() - began > seconds:
            break
    for pane, one in zip(panes, found, strict=True):
        one.looked, one.blank = pane.looked, pane.blank
    both(panes, lambda pane: pane.press("q"))
    until(panes, "as before, code 0", "one  stepping", "two  stepping")
    return found


def end(folder: Path, jobs: Tmux) -> None:
    """The jobs of `inventory`, and all that watches them."""
    from ending import end_supervisors, kill_recorded

    roots = [p.parent for p in folder.glob("*/resident")]
    for root in roots:
        end_supervisors(root)
    jobs("kill-server")
    for root in roots:
        kill_recorded(root)


def main(seconds: float) -> None:
    sys.path.insert(0, str(REPO))
    sys.path.insert(0, str(REPO / "tests"))
    with tempfile.TemporaryDirectory(prefix="dflash-drive-", ignore_cleanup_errors=True) as name:
        folder, tmux, jobs = Path(name), Tmux(), Tmux()
        path = inventory(folder, jobs.socket, ("one", "two"))
        argv = [sys.executable, "-m", "dflash_ops.cli.main", "deploy", "--all", "-i", str(path), "--watch-window", "0"]
        try:
            subprocess.run(argv, check=True, env={**os.environ, "PYTHONPATH": str(REPO)}, capture_output=True)
            for one in drive(folder, tmux, path, seconds):
                print(one)
        finally:
            tmux("kill-server")
            end(folder, jobs)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0)
