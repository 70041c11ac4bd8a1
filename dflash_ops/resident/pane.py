"""A pane of somebody else's tmux session: what it shows, what runs in it, and a pipe for what comes."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dflash_ops.contracts import Layout, Process, ProgressPattern
from dflash_ops.resident import proc
from dflash_ops.resident.files import read_tail, write_atomic
from dflash_ops.resident.tmux import Tmux, TmuxSilent
from dflash_ops.supervise.dialects import Said, read

#: Bytes of the pane's log that one look reads.
TAIL = 1 << 18

#: What runs in a pane at whose prompt nothing runs.
SHELLS = frozenset({"bash", "sh", "dash", "zsh", "fish", "ash", "ksh", "tcsh", "csh", "login", "su", "sudo", "tmux"})

ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
#: Blanks between, since a client without UTF-8 gets `_` for a tab; `x` in front of what may be empty.
FORM = "#{pane_id} x#{pane_pid} x#{pane_dead} x#{pane_dead_status} x#{pane_pipe} x#{pane_active} #{@dflash_root}"


@dataclass(frozen=True)
class PaneSeen:
    id: str
    pid: int
    dead: bool
    status: int | None
    piped: bool
    active: bool
    owner: str


def panes_of(tmux: Tmux, session: str) -> list[PaneSeen] | None:
    """Panes of the session; None: there is none.

    Raises:
        TmuxSilent: nothing is known.
    """
    said = tmux.run("list-panes", "-s", "-t", f"={session}:", "-F", FORM)
    if said.rc != 0:
        if said.gone:
            return None
        raise TmuxSilent(f"tmux -L {tmux.socket} list-panes: {said.err or f'exit code {said.rc}'}")
    panes = []
    for line in said.out:
        id, *words = line.split(" ", 6)
        owner = words.pop() if len(words) > 5 else ""
        pid, dead, status, piped, active = (word[1:] for word in words)
        code = int(status) if status.isdigit() else None
        panes.append(PaneSeen(id, int(pid or 0), dead == "1", code, piped == "1", active == "1", owner))
    return panes


def capture(tmux: Tmux, pane: str) -> list[str]:
    """What the pane shows and has shown, joined over wraps."""
    said = tmux.run("capture-pane", "-p", "-J", "-S", "-", "-t", pane)
    return [line.rstrip() for line in said.out] if said.rc == 0 else []


def choose(tmux: Tmux, panes: list[PaneSeen], pattern: str) -> tuple[PaneSeen, Said]:
    """The pane in which a trainer runs: one with steps, else with a program in the foreground, else the active one."""
    best: tuple[tuple[bool, bool, bool], PaneSeen, Said] | None = None
    for pane in panes:
        said = read(capture(tmux, pane.id), time.time(), pattern_of(pattern))
        steps = said.progress is not None and said.progress.step is not None
        rank = (steps, foreground(pane.pid)[0] is not None, pane.active)
        if best is None or rank > best[0]:
            best = (rank, pane, said)
    assert best is not None
    return best[1], best[2]


def pattern_of(text: str) -> ProgressPattern | None:
    return ProgressPattern(text) if text else None


def foreground(pid: int) -> tuple[Process | None, str]:
    """The program in the foreground of the terminal of `pid` (a pane's first process), and its command line.

    The pane's own process counts where it is no shell (`tmux new-session -d 'python train.py'`).
    """
    group = _terminal_group(pid)
    for candidate in dict.fromkeys((group, pid)):
        one = proc.stat(candidate) if candidate else None
        if one is not None and not one.dead and one.comm.lstrip("-") not in SHELLS:
            return one.process, _command(candidate)
    # a shell that runs a script: its foreground group is its own, and the trainer is below it
    stats = proc.every()
    below = [s for s in stats if group and s.ppid == group and not s.dead and s.comm.lstrip("-") not in SHELLS]
    if below and group != pid:
        oldest = min(below, key=lambda s: s.start)
        return oldest.process, _command(oldest.pid)
    return None, ""


def _terminal_group(pid: int) -> int:
    """tpgid: field 8 of /proc/<pid>/stat."""
    with suppress(OSError, ValueError, IndexError):
        return max(0, int(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[5]))
    return 0


def _command(pid: int) -> str:
    """Its command line, cut; arguments are shown by everybody's `ps` as well."""
    with suppress(OSError):
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
        return raw.replace(b"\0", b" ").decode("utf-8", "replace").strip()[:200]
    return ""


def pipe(tmux: Tmux, pane: PaneSeen, layout: Layout) -> bool:
    """tmux writes what comes into pane.log, and what was there before goes into before.log.

    False: somebody else has a pipe on it, and it stays theirs.
    """
    log = layout.run / "pane.log"
    piped = False
    if not pane.piped and not pane.dead:
        # a shell's quotes, and tmux's own formats (#) and time formats (%) written out
        quoted = "'" + str(log).replace("'", "'\\''") + "'"
        command = f"exec cat >> {quoted}".replace("#", "##").replace("%", "%%")
        log.unlink(missing_ok=True)
        log.touch(mode=0o600)
        piped = tmux.run("pipe-pane", "-o", "-t", pane.id, command).rc == 0
    # The pipe first, so that no line is lost between the two; what both have is taken out of the older one.
    lines = capture(tmux, pane.id)
    came = ANSI.sub("", read_tail(log, TAIL)[0].decode("utf-8", "replace")).replace("\r", "")
    before = without_overlap(lines, came)
    write_atomic(layout.run / "before.log", before.encode("utf-8", "replace"))
    return piped


def without_overlap(lines: list[str], came: str) -> str:
    """What a pane shows (`lines`), without what the pipe has written since (`came`, which may begin inside a line)."""
    while lines and not lines[-1]:
        lines = lines[:-1]
    first, *rest = came.split("\n")
    after = [line.rstrip() for line in rest[:-1]][:3]
    for at in range(len(lines) - 1, -1, -1):
        if first.strip() and lines[at].endswith(first.rstrip()) and lines[at + 1 : at + 1 + len(after)] == after:
            cut = lines[at][: len(lines[at]) - len(first.rstrip())]
            return "".join(line + "\n" for line in lines[:at]) + cut
    return "".join(line + "\n" for line in lines)
