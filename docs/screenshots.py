"""Screenshots of the README: real commands in a real tmux, what stands on the screen then as SVG.

    python docs/screenshots.py            about five minutes: it runs the whole demo (make screenshots)

Writes docs/images/{demo,watch,rebalance,triage}.svg. Read them before they are committed: they show this machine's name
and numbers.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/triage"))

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from test_history_case import LOG  # the run that this tool was born from

REPO = Path(__file__).resolve().parents[1]
IMAGES = REPO / "docs/images"


class Terminal:
    """A tmux server of its own."""

    def __init__(self, home: Path) -> None:
        self.socket = f"dflash-shots-{secrets.token_hex(4)}"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.env = {**os.environ, "PATH": path, "HOME": str(home), "COLORTERM": "truecolor"}

    def __call__(self, *words: str) -> str:
        argv = ["tmux", "-L", self.socket, "-f", "/dev/null", *words]
        return subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=30).stdout

    def open(self, name: str, width: int, height: int, command: str) -> None:
        """A shell in which this was typed."""
        size = ["-x", str(width), "-y", str(height)]
        self("new-session", "-d", *size, "-s", name, "-c", str(REPO), "env PS1='$ ' bash --norc --noprofile -i")
        self("send-keys", "-t", name, "-l", command)
        self("send-keys", "-t", name, "Enter")

    def text(self, name: str) -> str:
        return self("capture-pane", "-p", "-t", name)

    def wait(self, name: str, seen: Callable[[str], bool], seconds: float) -> None:
        """
        Raises:
            TimeoutError: with the screen as it stands.
        """
        end = time.monotonic() + seconds
        while not seen(self.text(name)):
            if time.monotonic() > end:
                raise TimeoutError(f"{name}: not within {seconds:g} s\n{self.text(name)}")
            time.sleep(0.3)

    def shoot(self, name: str, title: str) -> None:
        """The screen as SVG, without the empty lines below."""
        raw = self("capture-pane", "-p", "-e", "-t", name).rstrip()
        width = int(self("display-message", "-p", "-t", name, "#{pane_width}"))
        console = Console(record=True, width=width, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
        console.print(Text.from_ansi(raw), soft_wrap=True)
        IMAGES.mkdir(exist_ok=True)
        file = IMAGES / f"{name}.svg"
        # rich's own form fetches a font from elsewhere; the reader's own will do.
        form = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
        form = form.replace("Fira Code", "monospace")
        console.save_svg(str(file), title=title, theme=MONOKAI, code_format=form, unique_id=f"dflash-{name}")
        print(f"{file.relative_to(REPO)}: {len(raw.splitlines())} lines", flush=True)


def prompt(text: str) -> bool:
    """The command has ended: the shell waits again."""
    return text.rstrip().endswith("\n$") and text.count("\n$") >= 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/srv/demo"), help="of the demo; must not exist, and goes")
    demo: Path = parser.parse_args().folder
    if demo.exists():
        parser.error(f"{demo} exists: name another --folder")
    with tempfile.TemporaryDirectory(prefix="dflash-shots-", ignore_cleanup_errors=True) as folder:
        home = Path(folder) / "home"
        home.mkdir()
        terminal = Terminal(home)
        there = str(demo / "inventory.toml")
        plan = f"dflash-ops rebalance demo --plan --devices cpu,cpu,cpu,cpu -i {there}"
        try:
            (home / "crash.log").write_text(LOG, "utf-8")
            terminal.open("triage", 100, 48, "cd; clear; dflash-ops triage crash.log")
            terminal.wait("triage", prompt, 60)
            terminal.shoot("triage", "dflash-ops triage crash.log")
            terminal.open("demo", 100, 48, f"clear; dflash-ops demo --root {demo}")
            terminal.wait("demo", lambda text: bool(re.search(r"step +(?:2[5-9]|3)\d+/", text)), 600)
            terminal.open("watch", 110, 34, f"dflash-ops status demo --watch -i {there}")
            terminal.wait("watch", lambda text: "stepping" in text and "workers" in text, 60)
            time.sleep(8)
            terminal.shoot("watch", "dflash-ops status demo --watch")
            terminal.open("rebalance", 110, 30, f"clear; {plan}")
            terminal.wait("rebalance", prompt, 60)
            terminal.shoot("rebalance", "dflash-ops rebalance demo --plan")
            terminal.wait("demo", lambda text: '"kind": "demo"' in text, 600)
            time.sleep(1)
            terminal.shoot("demo", "make demo")
        finally:
            command = [sys.executable, "-m", "dflash_ops.cli.main", "stop", "demo", "-i", there]
            subprocess.run(command, env=terminal.env, capture_output=True, timeout=120)
            terminal("kill-server")
            shutil.rmtree(demo, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
