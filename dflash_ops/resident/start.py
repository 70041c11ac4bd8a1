"""`start`: one new attempt, or a refusal that leaves nothing behind.

Order of things: refuse (lives? session taken?), number, files, journal, session, handshake. Up to the journal a failure
removes the attempt's folder again; from the journal on it is recorded as `start_failed` with an exit.json.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflash_ops.contracts import ExitRecord, JobSpec, Layout, dumps, from_dict
from dflash_ops.errors import ContractError, DflashError, JobBusy, StartError
from dflash_ops.resident import attempts, daemon, itself, journal, proc, spec
from dflash_ops.resident.answer import say
from dflash_ops.resident.attempts import Attempt
from dflash_ops.resident.files import run_lock, write_atomic
from dflash_ops.resident.tmux import Pane, Tmux, TmuxSilent, clean_environment

#: Seconds in which the wrapper must say that the trainer runs.
HANDSHAKE = 20.0


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="start", description="JobSpec as JSON on standard input")
    parser.add_argument("--root", required=True, type=Path)
    root = parser.parse_args(args).root.absolute()
    try:
        job = from_dict(JobSpec, json.loads(sys.stdin.buffer.read()), "job.json")
    except ValueError as error:
        raise ContractError(f"standard input is no JSON: {error}", "job.json", "send a JobSpec") from None
    clean_environment()
    say(start(root, job))
    return 0


def start(root: Path, job: JobSpec) -> dict[str, Any]:
    """Start the job's next attempt and wait until its trainer runs.

    Raises:
        UsageError: the job cannot be meant.
        JobBusy: it runs already, or its session name is taken.
        StartError: the trainer did not come up; nothing of it is left.
    """
    spec.check(job, root)
    layout = Layout(root)
    try:
        layout.attempts.mkdir(parents=True, exist_ok=True)
        with run_lock(layout.lock, "start"):
            return _start(layout, job)
    except OSError as error:
        raise StartError(
            f"cannot write the run folder: {error.strerror or error}",
            str(error.filename or layout.run),
            "make room on that disk, or make it writable",
        ) from error


def _start(layout: Layout, job: JobSpec) -> dict[str, Any]:
    before = attempts.last(layout)
    if before is not None:
        _refuse_if_alive(before, job)
    tmux = Tmux(job.socket)
    _free_session(tmux, job, layout, before)
    if before is not None:
        daemon.settle(layout, before)
    events, _ = journal.read(layout.journal)
    number = attempts.next_number(layout, events)
    at = layout.attempt(number)
    at.path.mkdir()
    try:
        cache = _cache(at.path, before)
        command = spec.command(job, layout, number, cache)
        for name, text in job.files.items():
            write_atomic(at.path / name, text.encode())
        public = dumps(spec.public(job)).encode() + b"\n"
        write_atomic(at.job, public)
        journal.append(
            layout.journal,
            "attempt_started",
            actor=job.actor,
            attempt=number,
            data={
                "release": job.release,
                "argv": list(command.argv),
                "env": sorted(job.env),
                "overrides": job.overrides,
                "reason": job.reason,
                "decision": job.decision,
            },
        )
    except (OSError, DflashError):
        shutil.rmtree(at.path, ignore_errors=True)
        raise
    try:
        write_atomic(layout.job, public)
        watched = daemon.ensure(layout)
        pane, said = _launch(layout, tmux, job, number, command, cache)
    except (OSError, DflashError) as error:
        _undo(layout, tmux, job, number, error)
        raise
    daemon.poke(layout, lambda snapshot: snapshot.attempt == number)
    return {
        "schema": 1,
        "attempt": number,
        "launcher": said["launcher"],
        "wrapper": said["wrapper"],
        "session": {"name": job.session, "socket": job.socket, "alive": True, "pane": pane.id if pane else None},
        "warnings": [] if watched else ["the resident's loop would not start; see run/resident.log"],
    }


def _refuse_if_alive(before: Attempt, job: JobSpec) -> None:
    stop_it = "stop it first, or deploy with --replace"
    if before.damaged and before.start is None and before.layout.start.exists():
        raise JobBusy(
            f"whether attempt {before.number} still runs is not known: its start.json is damaged",
            str(before.layout.start),
            "see with `ps` that it is gone, then remove that file",
        )
    if before.start is None:
        return
    if before.launcher_alive:
        who = f"attempt {before.number}, launcher pid {before.start.launcher.pid}"
        raise JobBusy(f"job {job.job} runs already: {who}", str(before.layout.path), stop_it)
    # The wrapper is only writing down the end; it needs two seconds at most.
    end = time.monotonic() + 5.0
    while proc.alive(before.start.wrapper):
        if time.monotonic() > end:
            who = f"wrapper pid {before.start.wrapper.pid} of attempt {before.number}"
            raise JobBusy(f"{who} still writes down how it ended", str(before.layout.path), "is its disk full?")
        time.sleep(0.05)
    if not before.rebooted and (left := proc.family(before.start.launcher)):
        pids = ", ".join(str(p.pid) for p in sorted(left, key=lambda p: p.pid))
        raise JobBusy(f"processes of attempt {before.number} still live: {pids}", str(before.layout.path), stop_it)


def _free_session(tmux: Tmux, job: JobSpec, layout: Layout, before: Attempt | None) -> None:
    """Make the session's name free, if what has it is our own ended attempt."""
    where = f"tmux -L {job.socket}, session {job.session}"
    try:
        panes = tmux.panes(job.session)
        if panes is None:
            return
        if not any(p.owner == str(layout.root) for p in panes):
            raise JobBusy(
                f"the session name {job.session!r} is taken by something else",
                where,
                f"end it (`tmux -L {job.socket} attach -t {job.session}`), or give the job another session name",
            )
        tmux.end(job.session, before.start.wrapper.pid if before is not None and before.start is not None else 0)
        if tmux.panes(job.session) is not None:
            raise JobBusy("the ended attempt's session cannot be closed", where, "close it by hand")
    except TmuxSilent as error:
        raise StartError(str(error), where, "see whether the tmux server is stopped (state T in `ps`)") from None


def _cache(folder: Path, before: Attempt | None) -> Path:
    """Each attempt compiles for itself, unless the last one ended well: a warm cache hides compile-time races."""
    if before is not None and before.ended_well() and before.start is not None and before.start.cache_dir:
        return Path(before.start.cache_dir)
    return folder / "inductor"


def _launch(
    layout: Layout, tmux: Tmux, job: JobSpec, number: int, command: spec.Command, cache: Path
) -> tuple[Pane | None, dict[str, Any]]:
    """Session, wrapper, trainer; what the wrapper said.

    Raises:
        StartError: with the last words of wrapper or pane.
    """
    name = f"dflash-{secrets.token_hex(16)}"
    order = {
        "job": job.job,
        "release": job.release,
        "argv": command.argv,
        "cwd": command.cwd,
        "env": command.env,
        "env_names": sorted(job.env),
        "overrides": job.overrides,
        "reason": job.reason,
        "cache_dir": str(cache),
        "nofile": job.nofile,
    }
    argv = itself.argv("wrap", "--root", str(layout.root), "--attempt", str(number), "--channel", name)
    deadline = time.monotonic() + HANDSHAKE
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        # An abstract name: nothing on the disk, gone with us; who may connect is checked below.
        server.bind("\0" + name)
        server.listen(4)
        try:
            tmux.start(job.session, argv, root=layout.root, cwd=layout.root, history=job.history_limit)
            panes = tmux.panes(job.session)
        except TmuxSilent as error:
            raise StartError(str(error), job.session, "see whether the tmux server is stopped") from None
        pane = panes[0].process if panes else 0
        said = _handshake(server, json.dumps(order).encode() + b"\n", deadline, pane)
    if said is not None and "error" not in said:
        return (panes[0] if panes else None), said
    words = said["error"] if said is not None else _last_words(layout, tmux, job, number)
    raise StartError(
        f"the trainer did not start: {words}", str(layout.attempt(number).log), "correct the job's command"
    )


def _handshake(server: socket.socket, order: bytes, deadline: float, wrapper: int) -> dict[str, Any] | None:
    """Hand over the order, wait for the answer; None: the wrapper (pid) died or said nothing in time."""
    raw = bytearray()
    try:
        while True:
            server.settimeout(0.2)
            try:
                channel, _ = server.accept()
            except TimeoutError:
                process = proc.stat(wrapper)
                if process is None or process.dead or time.monotonic() > deadline:
                    return None
                continue
            credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if struct.unpack("3i", credentials)[1] == os.getuid():
                break
            channel.close()  # the name is visible to every user of the machine; the order is not for them
        with channel:
            channel.settimeout(max(0.1, deadline - time.monotonic()))
            channel.sendall(order)
            while not raw.endswith(b"\n"):
                channel.settimeout(max(0.1, deadline - time.monotonic()))
                piece = channel.recv(1 << 16)
                if not piece:
                    return None
                raw += piece
    except OSError:
        return None
    answer: dict[str, Any] = json.loads(raw)
    return answer


def _last_words(layout: Layout, tmux: Tmux, job: JobSpec, number: int) -> str:
    text = ""
    with suppress(TmuxSilent):
        text = tmux.capture(job.session)
    lines = [line for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-3:]) or "the wrapper ended, or did not answer in time, and said nothing"


def _undo(layout: Layout, tmux: Tmux, job: JobSpec, number: int, error: Exception) -> None:
    """Nothing half-done: no session, no launcher behind a gate, and a record of the failure."""
    with suppress(TmuxSilent, StartError):
        panes = tmux.panes(job.session) or []
        for pane in panes:
            if pane.owner == str(layout.root):
                tmux.end(job.session, pane.process)
                break
    text = error.what if isinstance(error, DflashError) else str(error)
    at = layout.attempt(number)
    failed = attempts.read(layout, number)
    if failed.start is not None:
        for process in (failed.start.launcher, failed.start.wrapper):
            proc.send(process, 9)
    with suppress(OSError):  # the disk may be the reason of the failure
        if not at.exit.exists():
            record = ExitRecord(number, 127, None, time.time(), 0.0, detail=text)
            write_atomic(at.exit, dumps(record).encode() + b"\n")
        journal.append(layout.journal, "start_failed", actor=job.actor, attempt=number, data={"error": text})
    daemon.poke(layout, lambda snapshot: snapshot.exit is not None and snapshot.attempt == number)
