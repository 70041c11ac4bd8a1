r"""`switch`: from one start of a job to another in one deed that nobody's absence can cut in half.

    call ----> worker (a session of its own): lease -> journal -> stop -> start ----> run/switch.json
       \-- reads run/switch.json and says what it says, until the end

The rules here: who called may go away at any moment (Ctrl-C, a lost link): the worker goes on to its end, and what came
of it stands in run/switch.json. The supervisor does nothing meanwhile, since the lease is the worker's. A start that
fails starts what ran before. So the job is what it was, or what it was to become; only a killed worker or machine
leaves it stopped, and then the file says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_ops.contracts import Event, JobSpec, Layout, State, TrainerExit, from_dict
from dflash_ops.errors import BY_NAME, CommandFailed, ContractError, DflashError, JobBusy, StartError
from dflash_ops.resident import attempts, itself, journal, lease, proc, receive, start, stop
from dflash_ops.resident.aside import folder_of, move_some
from dflash_ops.resident.files import read_json, run_lock, write_atomic
from dflash_ops.resident.pace import SWITCH, switch_record
from dflash_ops.resident.tmux import clean_environment
from dflash_ops.supervise.ledger import by_supervisor

#: Seconds that stop and start may take together, beyond the grace time.
MORE_S = 300.0

#: Seconds between two renewals of the lease while the trainer saves.
RENEW_S = 20.0

#: Seconds for which the lease is waited for: a pass of the supervisor that only looks is over soon.
LEASE_S = 10.0


def main(args: list[str]) -> int:
    """The request on standard input (one line, or all of it); through deploy/boot.py without arguments."""
    parser = argparse.ArgumentParser(prog="switch", description="JSON on standard input")
    parser.add_argument("--root", type=Path, default=None)
    parser.add_argument("--work", action="store_true", help="be the worker (called by itself)")
    options = parser.parse_args(args)
    clean_environment()
    try:
        request = json.loads(sys.stdin.buffer.readline())
    except ValueError as error:
        raise ContractError(f"standard input is no JSON: {error}", "switch", "send one object") from None
    layout = Layout(Path(options.root or request["root"]).absolute())
    if options.work:
        return _work(layout, request)
    return receive.say(lambda: call(layout, request))


def call(layout: Layout, request: dict[str, Any]) -> dict[str, Any]:
    """`{root, token, use, expect, spec, back, grace_s, actor, reason, event, since}`: have a worker do it.

    `expect` = number of the newest attempt, else nothing is done; `spec` is started in its place, `back` (a JobSpec, or
    null) where that does not start; `event` = data of the journal's `rebalancing`; with `since` checkpoints that came
    since the start of that attempt are set aside.

    Returns:
        `{schema, attempt, stopped, warnings, set_aside}`; lines `{"progress": text}` come before it.

    Raises:
        JobBusy: nothing was done. StartError, ...: as the worker says; with `back` started, the text says so.
    """
    layout.run.mkdir(parents=True, exist_ok=True)
    other = switch_record(layout)
    if other is not None and other["alive"]:
        raise _busy(layout)
    log = layout.run / "resident.log"
    with log.open("ab") as said:
        worker = subprocess.Popen(
            itself.argv("switch", "--root", str(layout.root), "--work"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=said,
            cwd="/",
            start_new_session=True,
        )
    assert worker.stdin is not None
    with worker.stdin as stdin:
        stdin.write(json.dumps(request).encode() + b"\n")
    end = time.monotonic() + float(request["grace_s"]) + MORE_S
    told = ""
    while time.monotonic() < end:
        ended = worker.poll() is not None
        record = _record(layout, request["token"])
        if record.get("phase") and record["phase"] != told and not record.get("answer") and not record.get("error"):
            told = record["phase"]
            print(json.dumps({"progress": told, "stopped": record.get("stopped")}), flush=True)
        if record.get("answer") is not None:
            return dict(record["answer"])
        if record.get("error") is not None:
            raise _rebuilt(record["error"])
        if ended and worker.returncode == JobBusy.exit_code:
            raise _busy(layout)
        if ended:
            raise CommandFailed(
                f"the change of the split ended unfinished ({record.get('phase') or 'before it began'})",
                str(log),
                "see the end of that file; what is true now: dflash-ops status",
                rc=worker.returncode,
            )
        time.sleep(0.05)
    raise CommandFailed(
        f"the change of the split is still at work: {told or 'it did not begin'}",
        str(layout.run / SWITCH),
        "it goes on by itself: dflash-ops status",
    )


def _busy(layout: Layout) -> JobBusy:
    return JobBusy(
        "another change of the split is at work on this job; nothing was changed",
        str(layout.run / SWITCH),
        "wait until it is done (dflash-ops status), then try again",
    )


def _record(layout: Layout, token: str) -> dict[str, Any]:
    said = read_json(layout.run / SWITCH)
    return said if isinstance(said, dict) and said.get("token") == token else {}


def _rebuilt(error: dict[str, Any]) -> DflashError:
    cls = BY_NAME.get(str(error.get("type")), CommandFailed)
    return cls(str(error.get("what")), str(error.get("where") or ""), str(error.get("next") or ""))


class Told:
    """run/switch.json as the worker writes it (docs/contracts.md)."""

    def __init__(self, layout: Layout, request: dict[str, Any]) -> None:
        me, event = proc.me(), request.get("event") or {}
        self._path = layout.run / SWITCH
        self._said = {
            "schema": 1, "token": request["token"], "pid": me.pid, "start": me.start, "attempt": request["expect"],
            "from": event.get("from"), "to": event.get("to"), "phase": "", "stopped": None, "answer": None,
            "error": None,
        }  # fmt: skip

    def write(self, **changes: Any) -> None:
        self._said |= {"t": time.time(), **changes}
        write_atomic(self._path, json.dumps(self._said).encode() + b"\n")


def _work(layout: Layout, request: dict[str, Any]) -> int:
    try:
        with run_lock(layout.run / "switch.lock", "rebalance", 0.0):
            told = Told(layout, request)
            try:
                told.write(phase="asked")
                answer = _held(layout, request, told)
            except DflashError as error:
                told.write(error=error.to_json())
                return error.exit_code
            except OSError as error:
                what = f"the run folder cannot be written: {error.strerror or error}"
                told.write(error=DflashError(what, str(error.filename or layout.run)).to_json())
                return 1
            told.write(phase="done", answer=answer)
    except JobBusy as error:
        return error.exit_code  # run/switch.json is another worker's
    return 0


def _held(layout: Layout, request: dict[str, Any], told: Told) -> dict[str, Any]:
    """All of it under the lease.

    Raises:
        JobBusy: somebody else acts on this job. DflashError: as `_switch`.
    """
    actor = str(request.get("actor") or "operator")
    held = lease.take_within(layout, f"rebalance, {actor}", LEASE_S)
    if held is None:
        holder = lease.holder(layout)
        who = f"{holder.owner} (pid {holder.pid})" if holder is not None else "somebody"
        raise JobBusy(
            f"{who} holds the lease and acts on this job; nothing was changed",
            str(layout.lease),
            "wait until it is done (dflash-ops status), then try again",
        )
    try:
        with _renewed(held):
            return _switch(layout, request, told, held)
    finally:
        held.release()


@contextmanager
def _renewed(held: lease.Lease) -> Iterator[None]:
    """The lease is renewed meanwhile: a trainer may save for longer than it holds."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(RENEW_S):
            with contextlib.suppress(DflashError, OSError):  # who acts asks for it by `check`
                held.renew()

    keeper = threading.Thread(target=renew, daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()


def _switch(layout: Layout, request: dict[str, Any], told: Told, held: lease.Lease) -> dict[str, Any]:
    actor, reason = str(request.get("actor") or "operator"), str(request.get("reason") or "rebalance")
    last = attempts.last(layout)
    if last is None or last.number != int(request["expect"]):
        newest = last.number if last is not None else "none"
        raise JobBusy(
            f"the newest attempt is {newest} by now, not {request['expect']}: nothing was changed",
            str(layout.attempts),
            "somebody else started the job: look (dflash-ops status), then try again",
        )
    spec = from_dict(JobSpec, request["spec"], "job.json")
    back = from_dict(JobSpec, request["back"], "job.json") if request.get("back") else None
    warnings: list[str] = []
    data = dict(request.get("event") or {})
    begun = journal.append(layout.journal, "rebalancing", actor=actor, attempt=last.number, data=data)
    told.write(phase="stopping")
    stopped = stop.stop(layout, float(request["grace_s"]), reason, actor)
    if stopped["state"] == State.FINISHED.value:
        raise StartError(
            f"the job finished before it could be stopped (attempt {last.number}); nothing was started",
            str(layout.root),
            "there is nothing left to train",
        )
    if not stopped["already"] and (stopped["exit"] or {}).get("rc") != TrainerExit.STOPPED:
        how = "it was ended by force" if stopped["escalated"] else f"it ended otherwise: {stopped['detail']}"
        warnings.append(f"it did not save at its stop ({how}): the new start goes on from the checkpoint before")
    aside = _aside(layout, request, reason, actor)
    told.write(phase="starting", stopped=stopped)
    held.check()
    if request.get("use"):
        receive.use(layout.root, str(request["use"]), secrets.token_hex(4))
    _refuse_if_stopped(layout, begun, (actor, reason))
    try:
        started = start.start(layout.root, spec)
    except DflashError as error:
        raise _went_back(layout, error, back) from error
    return {
        "schema": 1,
        "attempt": started["attempt"],
        "stopped": stopped,
        "set_aside": aside,
        "warnings": [*warnings, *stopped["warnings"], *started["warnings"]],
    }


def _refuse_if_stopped(layout: Layout, begun: Event, ours: tuple[str, str]) -> None:
    """While the trainer saves a person may stop the job: then it stays stopped. `ours`: actor and reason of our stop.

    Raises:
        StartError: somebody did.
    """
    asked = [
        (e.actor, str(e.data.get("reason")))
        for e in journal.read(layout.journal)[0]
        if e.seq > begun.seq
        and (e.event, e.attempt) == ("stop_requested", begun.attempt)
        and not by_supervisor(e.actor)
    ]
    if ours in asked:
        asked.remove(ours)
    if asked:
        raise StartError(
            f"{asked[-1][0]} stopped attempt {begun.attempt} while its split was being changed: nothing was started",
            str(layout.root),
            "the job is stopped; dflash-ops deploy --resume starts it again",
        )


def _aside(layout: Layout, request: dict[str, Any], reason: str, actor: str) -> str | None:
    """Checkpoints that came since the start of attempt `since`, set aside, whole."""
    if request.get("since") is None:
        return None
    began, folder = attempts.read(layout, int(request["since"])).start, folder_of(layout)
    if began is None or not folder.is_dir():
        return None
    new = sorted(
        e.name
        for e in os.scandir(folder)
        if e.name.startswith("step-") and e.stat(follow_symlinks=False).st_mtime >= began.t
    )
    moved = move_some(layout, folder, new, reason, actor)["to"]
    return str(moved) if moved else None


def _went_back(layout: Layout, error: DflashError, back: JobSpec | None) -> DflashError:
    """The start failed: what ran before is started again."""
    if back is None:
        error.next = f"the job is stopped; {error.next}"
        return error
    try:
        number = start.start(layout.root, back)["attempt"]
    except DflashError as worse:
        return StartError(
            f"the new split did not start: {error.what}\nand neither did what ran before: {worse.what}",
            error.where,
            "the job is stopped: mend the cause, then deploy with --resume",
        )
    return StartError(
        f"the new split did not start: {error.what}\nWENT BACK: attempt {number} runs as before",
        error.where,
        error.next,
    )
