"""A tmux session that we did not start: looked at, never touched (docs/adopt.md).

The rules here: nothing of it is ended, resized, renamed or typed into; a pipe that somebody else has put on the pane
stays theirs; all that is written lies under our own root.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from dflash_ops.contracts import (
    Layout,
    Limits,
    Process,
    SessionInfo,
    Snapshot,
    StageInfo,
    State,
    dumps,
    from_dict,
)
from dflash_ops.errors import JobBusy, StateError, UsageError
from dflash_ops.resident import proc
from dflash_ops.resident.answer import say
from dflash_ops.resident.files import load, read_tail, write_atomic
from dflash_ops.resident.pane import ANSI, TAIL, PaneSeen, capture, choose, foreground, panes_of, pattern_of, pipe
from dflash_ops.resident.tmux import Tmux, TmuxSilent, clean_environment
from dflash_ops.supervise.adopted import Sight, judge, warnings
from dflash_ops.supervise.dialects import read


@dataclass(frozen=True)
class Adoption:
    """run/adopted.json: what is watched. `piped` = the pane's pipe is ours."""

    SCHEMA: ClassVar[int] = 1

    job: str
    session: str
    socket: str
    pane: str
    t: float
    trainer: Process | None = None
    command: str = ""
    progress: str = ""
    limits: Limits = field(default_factory=Limits)
    boot_id: str = ""
    piped: bool = False
    schema: int = 1


@dataclass(frozen=True)
class Last:
    """run/adopted.last.json: since when it has been as it is."""

    SCHEMA: ClassVar[int] = 1

    state: State
    since: float
    trainer: Process | None = None
    step: int | None = None
    step_t: float | None = None
    step_s: float | None = None
    output: int = 0
    output_t: float | None = None
    stop_t: float | None = None
    schema: int = 1


def main(args: list[str]) -> int:
    """`adopt`, through deploy/boot.py: a request on standard input."""
    from dflash_ops.resident import receive

    clean_environment()
    raw = sys.stdin.buffer.readline()
    return receive.say(lambda: adopt(json.loads(raw)))


def parser_of(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--root", required=True, type=Path)
    return parser


def snapshot_main(args: list[str]) -> int:
    root = parser_of("adopted-snapshot").parse_args(args).root.absolute()
    clean_environment()
    sys.stdout.write(dumps(look(Layout(root))) + "\n")
    return 0


def stop_main(args: list[str]) -> int:
    parser = parser_of("adopted-stop")
    parser.add_argument("--grace", type=float, default=60.0)
    parser.add_argument("--reason", default="")
    parser.add_argument("--actor", default="operator")
    options = parser.parse_args(args)
    clean_environment()
    say(stop(Layout(options.root.absolute()), options.grace))
    return 0


def adopt(request: dict[str, Any]) -> dict[str, Any]:
    """`{root | null, job, session, socket, progress, limits, look}`; with `look` nothing is written.

    Returns:
        `{schema, root, home, pane, command, pid, state, detail, dialect, piped}`.

    Raises:
        UsageError: no such session. JobBusy: it is a job's own session.
    """
    home = os.path.expanduser("~")  # noqa: PTH111  # Path.home() raises where there is none
    root = Path(str(request.get("root") or f"{home}/.dflash-ops/adopted/{request['job']}"))
    layout = Layout(root)
    tmux = Tmux(str(request["socket"]))
    session = str(request["session"])
    try:
        panes = panes_of(tmux, session)
    except TmuxSilent as error:
        raise StateError(str(error), tmux.socket, "see whether the tmux server is stopped (state T in `ps`)") from None
    if panes is None:
        raise UsageError(
            f"there is no tmux session {session!r} on socket {tmux.socket}",
            f"tmux -L {tmux.socket}",
            f"see what is there: tmux -L {tmux.socket} ls; another user's or another socket's: --socket NAME",
        )
    if owner := next((p.owner for p in panes if p.owner), ""):
        raise JobBusy(f"session {session} is a job's own", owner, "dflash-ops status shows it")
    pattern = str(request.get("progress") or "")
    pane, said = choose(tmux, panes, pattern)
    trainer, command = foreground(pane.pid)
    before = _adoption(layout)
    ours = before is not None and before.pane == pane.id and before.piped and pane.piped
    piped = ours
    if not request.get("look"):
        layout.run.mkdir(parents=True, exist_ok=True)
        if not ours:
            piped = pipe(tmux, pane, layout)
        made = Adoption(
            job=str(request["job"]),
            session=session,
            socket=tmux.socket,
            pane=pane.id,
            t=time.time(),
            trainer=trainer,
            command=command,
            progress=pattern,
            limits=from_dict(Limits, request.get("limits") or {}, "limits"),
            boot_id=proc.boot_id(),
            piped=piped,
        )
        write_atomic(layout.run / "adopted.json", dumps(made).encode() + b"\n")
    return {
        "schema": 1,
        "root": str(root),
        "home": home,
        "pane": pane.id,
        "command": command,
        "pid": trainer.pid if trainer else None,
        "dialect": said.dialect,
        "step": said.progress.step if said.progress else None,
        "piped": piped,
        "foreign_pipe": pane.piped and not ours,
    }


def _adoption(layout: Layout) -> Adoption | None:
    return load(Adoption, layout.run / "adopted.json")


def look(layout: Layout) -> Snapshot:
    """The session now.

    Raises:
        StateError: it was never adopted here, or its record is damaged.
    """
    adoption = _adoption(layout)
    if adoption is None:
        raise StateError("no session was adopted here", str(layout.run / "adopted.json"), "dflash-ops adopt HOST ...")
    last: Last | None = None
    with suppress(StateError):
        last = load(Last, layout.run / "adopted.last.json")
    now = time.time()
    tmux = Tmux(adoption.socket)
    panes: list[PaneSeen] | None
    try:
        panes, answered = panes_of(tmux, adoption.session), True
    except TmuxSilent:
        panes, answered = None, False
    pane = next((p for p in panes or () if p.id == adoption.pane), None)
    trainer = _trainer(adoption, last, pane)
    lines = capture(tmux, pane.id) if pane is not None else []
    raw, output_t = _log(layout)
    if not lines:
        lines = raw.decode("utf-8", "replace").splitlines()
    said = read((ANSI.sub("", line) for line in lines), output_t or now, pattern_of(adoption.progress))
    size = hash_of(lines)
    if not adoption.piped:  # the text itself tells when it last changed
        output_t = now if last is None or last.output != size else last.output_t
    boot = bool(adoption.boot_id) and adoption.boot_id != proc.boot_id()
    sight = Sight(
        said=said,
        now=now,
        alive=None if trainer is None else not boot and proc.alive(trainer),
        session=(panes is not None) if answered else None,
        pane_dead=pane.dead if pane is not None else False,
        pane_status=pane.status if pane is not None and pane.dead else None,
        output_t=output_t,
        started=_started(trainer),
        stop_requested=last is not None and last.stop_t is not None and last.trainer == trainer,
    )
    state, detail = judge(sight, adoption.limits)
    since = last.since if last is not None and last.state is state and last.trainer == trainer else now
    remembered = _remember(layout, last, sight, state, since, trainer, size)
    told = [*warnings(sight)]
    if not adoption.piped:
        told.append("the pane has another pipe: only what it still shows is seen")
    if panes is not None and pane is None:
        told.append("the pane is gone; adopt the session again to watch another one")
    return Snapshot(
        job=adoption.job,
        t=now,
        state=state,
        since=since,
        detail=detail,
        stage=StageInfo("stepping" if state is State.STEPPING else "loading", what=said.loading)
        if sight.alive
        else None,
        started=sight.started,
        progress=said.progress,
        rates={"step_s": remembered.step_s},
        session=SessionInfo(adoption.session, adoption.socket, bool(panes)),
        warnings=tuple(told),
    )


def hash_of(lines: list[str]) -> int:
    """A number that changes with the text."""
    import zlib

    return zlib.crc32("\n".join(lines).encode("utf-8", "replace"))


def _trainer(adoption: Adoption, last: Last | None, pane: PaneSeen | None) -> Process | None:
    """The process that is meant: what runs in the foreground now, else the one that was seen last."""
    if pane is not None and not pane.dead:
        found, _ = foreground(pane.pid)
        if found is not None:
            return found
    return last.trainer if last is not None and last.trainer is not None else adoption.trainer


def _log(layout: Layout) -> tuple[bytes, float | None]:
    """The end of what the pipe wrote, and when it last did."""
    path = layout.run / "pane.log"
    try:
        t = path.stat().st_mtime
    except OSError:
        return b"", None
    raw, begin = read_tail(path, TAIL)
    if begin == 0:
        before, _ = read_tail(layout.run / "before.log", TAIL)
        raw = before + raw
    return raw, t


def _started(trainer: Process | None) -> float | None:
    if trainer is None:
        return None
    with suppress(OSError, ValueError):
        for line in Path("/proc/stat").read_text("ascii").splitlines():
            if line.startswith("btime "):
                return int(line.split()[1]) + trainer.start / os.sysconf("SC_CLK_TCK")
    return None


def _remember(
    layout: Layout, last: Last | None, sight: Sight, state: State, since: float, trainer: Process | None, output: int
) -> Last:
    """Write down what the next look needs; a disk too full for it only costs the next one some knowledge."""
    step = sight.said.progress.step if sight.said.progress is not None else None
    same = last is not None and last.trainer == trainer
    step_t, step_s = (last.step_t, last.step_s) if last is not None and same else (None, None)
    if step is not None and (last is None or not same or step != last.step):
        if last is not None and same and last.step is not None and last.step_t is not None and step > last.step:
            step_s = (sight.now - last.step_t) / (step - last.step)
        step_t = sight.now
    stop_t = last.stop_t if last is not None and same else None
    new = Last(state, since, trainer, step, step_t, step_s, output, sight.output_t, stop_t)
    if new != last:
        with suppress(OSError):
            write_atomic(layout.run / "adopted.last.json", dumps(new).encode() + b"\n", sync=False)
    return new


def stop(layout: Layout, grace_s: float) -> dict[str, Any]:
    """TERM to the trainer (pid and start time), and wait. Never KILL: it is not ours to end by force."""
    before = look(layout)
    last = load(Last, layout.run / "adopted.last.json")
    trainer = last.trainer if last is not None else None
    already = trainer is None or not proc.alive(trainer)
    if trainer is not None and not already and last is not None:
        write_atomic(layout.run / "adopted.last.json", dumps(replace(last, stop_t=time.time())).encode() + b"\n")
        proc.send(trainer, signal.SIGTERM)
        end = time.monotonic() + grace_s
        while proc.alive(trainer) and time.monotonic() < end:
            time.sleep(0.1)
    alive = trainer is not None and proc.alive(trainer)
    after = look(layout)
    detail = after.detail
    if alive and trainer is not None:
        detail = f"TERM was sent to pid {trainer.pid}, which still lives after {grace_s:g} s; it is not ended by force"
    return {
        "schema": 1,
        "attempt": None,
        "state": after.state.value if not already else before.state.value,
        "already": already,
        "escalated": False,
        "detail": detail,
        "exit": None,
        "checkpoint": None,
        "warnings": list(after.warnings),
    }


def logs_main(args: list[str]) -> int:
    parser = parser_of("adopted-logs")
    parser.add_argument("--lines", type=int, default=100)
    parser.add_argument("--follow", action="store_true")
    options = parser.parse_args(args)
    layout = Layout(options.root.absolute())
    clean_environment()
    if _adoption(layout) is None:
        raise StateError("no session was adopted here", str(layout.run), "dflash-ops adopt HOST ...")
    out = sys.stdout.buffer
    path = layout.run / "pane.log"
    parts = [read_tail(p, 1 << 24)[0] for p in (layout.run / "before.log", path)]
    at = path.stat().st_size if path.exists() else 0
    whole = b"".join(parts).split(b"\n")
    whole = whole[:-1] if whole and not whole[-1] else whole
    shown = whole if options.lines < 0 else whole[len(whole) - min(options.lines, len(whole)) :]
    out.write(b"".join(line + b"\n" for line in shown))
    out.flush()
    while options.follow:
        time.sleep(0.2)
        size = path.stat().st_size if path.exists() else 0
        if size > at:
            with path.open("rb") as file:
                file.seek(at)
                data = file.read(1 << 20)
            at += len(data)
            out.write(data)
            out.flush()
        elif look(layout).state not in (State.LOADING, State.STEPPING, State.HUNG):
            return 0  # nothing runs there that could write more
        else:
            time.sleep(0.8)
    return 0
