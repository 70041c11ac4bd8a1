"""`enable`: have this machine start the resident again when it boots; `boot`: what it then calls.

The rules here: only entries of our own are written and removed (a unit whose name is ours, a crontab line that ends in
our mark), everything else of a crontab stays byte for byte; what was written is read back; and `boot` itself starts
nothing but the loop: whether the trainer starts again is decided there, by the same rules as after any crash.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

from dflash_ops.contracts import Layout
from dflash_ops.errors import DflashError, UsageError
from dflash_ops.resident import daemon, itself, journal, machine
from dflash_ops.resident.answer import say
from dflash_ops.resident.files import run_lock, write_atomic

UNITS = Path("/etc/systemd/system")
#: There only where systemd is this machine's init.
SYSTEMD = Path("/run/systemd/system")
WAYS = ("systemd", "cron")
_S = 30.0


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="enable")
    parser.add_argument("--root", required=True, type=Path)
    parser.add_argument("--way", choices=("auto", *WAYS), default="auto")
    parser.add_argument("--off", action="store_true", help="take it back")
    parser.add_argument("--actor", default="operator")
    options = parser.parse_args(args)
    layout = Layout(options.root.absolute())
    layout.run.mkdir(parents=True, exist_ok=True)
    with run_lock(layout.lock, "enable"):
        say(disable(layout, options.actor) if options.off else enable(layout, options.way, options.actor))
    return 0


def boot_main(args: list[str]) -> int:
    """Called by the machine at boot."""
    parser = argparse.ArgumentParser(prog="boot")
    parser.add_argument("--root", required=True, type=Path)
    layout = Layout(parser.parse_args(args).root.absolute())
    if not layout.run.is_dir():
        raise UsageError("no job was ever deployed here", str(layout.root), "take it away: dflash-ops enable --off")
    watched = daemon.ensure(layout)
    say({"schema": 1, "watched": watched})
    return 0 if watched else 1


def enable(layout: Layout, way: str = "auto", actor: str = "operator") -> dict[str, Any]:
    """Write the entry; fine if it is there already.

    Returns:
        `{schema, enabled, way, where, command, warnings}`.

    Raises:
        UsageError: neither way is there, or the root's path cannot stand in such an entry.
        DflashError: systemctl or crontab refused.
    """
    if any(c in str(layout.root) for c in "\n\r\0"):
        raise UsageError("a path with a line break cannot stand in a unit or a crontab", str(layout.root), "rename it")
    chosen = way if way != "auto" else _possible(layout)
    argv = _boot(layout)
    warnings: list[str] = []
    where = _systemd(layout, argv) if chosen == "systemd" else _cron(layout, argv, warnings)
    journal.append(layout.journal, "enabled", actor=actor, data={"way": chosen, "where": where})
    return {
        "schema": 1,
        "enabled": True,
        "way": chosen,
        "where": where,
        "command": shlex.join(argv),
        "warnings": warnings,
    }


def disable(layout: Layout, actor: str = "operator") -> dict[str, Any]:
    """Take every entry of this root away; fine if there is none."""
    gone = []
    unit = UNITS / _unit(layout)
    if unit.exists():
        if SYSTEMD.is_dir():
            _run(["systemctl", "disable", unit.name])
        unit.unlink()
        if SYSTEMD.is_dir():
            _run(["systemctl", "daemon-reload"])
        gone.append(str(unit))
    if shutil.which("crontab") is not None:
        lines = _crontab()
        kept = [line for line in lines if not line.endswith(_mark(layout))]
        if kept != lines:
            _write_crontab(kept)
            gone.append("crontab")
    if gone:
        journal.append(layout.journal, "disabled", actor=actor, data={"where": gone})
    return {"schema": 1, "enabled": False, "way": None, "where": ", ".join(gone), "command": "", "warnings": []}


def _boot(layout: Layout) -> list[str]:
    """The call at boot, by the name that always is the newest resident."""
    return itself.newest(layout.root, "boot", "--root", str(layout.root))


def _possible(layout: Layout) -> str:
    if SYSTEMD.is_dir() and shutil.which("systemctl") is not None and os.access(UNITS, os.W_OK):
        return "systemd"
    if shutil.which("crontab") is not None:
        return "cron"
    raise UsageError(
        "this machine has neither systemd (as root) nor crontab to start something at boot",
        str(layout.root),
        f"install cron there, or have its init call: {shlex.join(_boot(layout))}",
    )


def _unit(layout: Layout) -> str:
    return f"dflash-ops-{hashlib.sha256(str(layout.root).encode()).hexdigest()[:12]}.service"


def _systemd(layout: Layout, argv: list[str]) -> str:
    words = " ".join(map(_quoted, argv))
    # The loop, tmux and the trainer stay in this unit's group: only KillMode=process leaves them alone when it ends.
    text = (
        f"[Unit]\nDescription=dflash-ops: watch over {str(layout.root).replace('%', '%%')}\nAfter=network.target\n\n"
        f"[Service]\nType=oneshot\nRemainAfterExit=yes\nKillMode=process\nExecStart={words}\n\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )
    path = UNITS / _unit(layout)
    write_atomic(path, text.encode())
    _run(["systemctl", "daemon-reload"])
    _run(["systemctl", "enable", path.name])
    return str(path)


def _quoted(word: str) -> str:
    """One word of ExecStart, taken literally."""
    for special, written in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(special, written)
    return f'"{word}"'


def _mark(layout: Layout) -> str:
    return f"# dflash-ops {layout.root}"


def _cron(layout: Layout, argv: list[str], warnings: list[str]) -> str:
    # cron ends a command at an unescaped %
    line = f"@reboot {shlex.join(argv).replace('%', chr(92) + '%')} >/dev/null 2>&1 {_mark(layout)}"
    lines = _crontab()
    kept = [one for one in lines if not one.endswith(_mark(layout))]
    if [*kept, line] != lines:
        _write_crontab([*kept, line])
    if line not in _crontab():
        raise DflashError(
            "the crontab does not hold what was written into it", "crontab -l", "see what that says there"
        )
    if not any(_name(p) in ("cron", "crond") for p in Path("/proc").iterdir() if p.name.isdigit()):
        warnings.append("no cron runs on this machine: the entry is there, but nothing would call it at boot")
    return "crontab"


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _crontab() -> list[str]:
    said = machine.ask(["crontab", "-l"], seconds=_S)
    if said.rc == 0:
        return said.out.splitlines()
    if "no crontab" in said.err:
        return []
    raise DflashError(
        f"crontab -l failed: {said.err.strip() or said.rc}", "crontab", "see whether this user may have one"
    )


def _write_crontab(lines: list[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    try:
        done = subprocess.run(["crontab", "-"], input=text.encode(), capture_output=True, timeout=_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DflashError(f"crontab cannot be written: {error}", "crontab", "nothing was changed") from None
    if done.returncode != 0:
        raise DflashError(
            f"crontab refused: {done.stderr.decode('utf-8', 'replace').strip()}", "crontab", "nothing was changed"
        )


def _run(argv: list[str]) -> None:
    said = machine.ask(argv, seconds=_S)
    if said.rc != 0:
        raise DflashError(
            f"`{shlex.join(argv)}` failed: {said.err.strip() or said.rc}", "systemd", "see `journalctl -xe` there"
        )
