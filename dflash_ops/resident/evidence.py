"""`evidence`: all texts of one attempt in one answer: logs, error.json, exit.json, the pane, nvidia-smi.

The rule here: no text holds up the others. What cannot be read, does not answer in time or is not there is a part of
the answer that says so; only where there is no attempt at all is the answer an error.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from dflash_ops.contracts import Layout, Snapshot
from dflash_ops.contracts.evidence import Evidence, Part, encode
from dflash_ops.errors import ContractError, DflashError, StateError, UsageError
from dflash_ops.resident import attempts, machine
from dflash_ops.resident.attempts import Attempt
from dflash_ops.resident.files import load, write_all
from dflash_ops.resident.tmux import LOOK, Tmux, TmuxSilent, clean_environment

MIB = 1 << 20
#: Bytes of a worker's own log, of all of them together, of one error.json and of the pane.
WORKER = 4 * MIB
WORKERS = 32 * MIB
REPORT = MIB
PANE = 4 * MIB
PANE_LINES = 10_000
#: Seconds: a driver in trouble hangs for good, and so does a stopped tmux server.
GPU_S = 10.0
PANE_S = 8.0
#: Seconds and bytes for finding out which line of its file a cut text begins with.
COUNT_S = 3.0
COUNT_BLOCK = 4 * MIB


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="evidence")
    parser.add_argument("--root", required=True, type=Path)
    parser.add_argument("--attempt", type=int, default=None, help="default: the newest")
    parser.add_argument("--mib", type=float, default=16.0, help="how much of the log's end")
    parser.add_argument("--no-gpu", action="store_true", help="do not ask nvidia-smi")
    options = parser.parse_args(args)
    clean_environment()  # a caller's TMUX_TMPDIR would hide the pane
    found = gather(
        Layout(options.root.absolute()), options.attempt, log_bytes=int(options.mib * MIB), gpu=not options.no_gpu
    )
    for piece in encode(found):
        write_all(1, piece)
    return 0


def gather(layout: Layout, wanted: int | None = None, *, log_bytes: int = 16 * MIB, gpu: bool = True) -> Evidence:
    """Everything that is known of an attempt (None: the newest).

    Raises:
        UsageError: nothing was ever started, or no such attempt.
    """
    found = attempts.numbers(layout)
    if not found:
        raise UsageError("nothing was ever started", str(layout.attempts), "start it: dflash-ops deploy")
    if wanted is not None and wanted not in found:
        known = ", ".join(map(str, found[-20:]))
        raise UsageError(f"there is no attempt {wanted}", str(layout.attempts), f"use one of {known}")
    number = found[-1] if wanted is None else wanted
    attempt = attempts.read(layout, number)
    alive = attempt.launcher_alive or attempt.wrapper_alive
    parts = [
        _file("log", "log", attempt.layout.log, log_bytes),
        *_reports(attempt),
        *_worker_logs(attempt),
        _exit(attempt, alive),
        _pane(layout, attempt, newest=number == found[-1]),
    ]
    if gpu:
        parts.append(_gpu())
    return Evidence(
        number,
        alive,
        time.time(),
        tuple(parts),
        started=attempt.start.t if attempt.start else _mtime(attempt.layout.job),
        ended=attempt.exit.t if attempt.exit else None if alive else _mtime(attempt.layout.log),
        progressed=_progressed(layout, number),
        launcher=attempt.start.launcher.pid if attempt.start and attempt.launcher_alive else None,
        release=attempt.start.release if attempt.start else attempt.spec.release if attempt.spec else None,
    )


def _file(name: str, kind: str, path: Path, limit: int) -> Part:
    """The last `limit` bytes of a file, beginning with a whole line where it was cut."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(0, size - limit)
            file.seek(begin)
            data = file.read(limit)
            if begin == 0:
                return Part(name, kind, data, total=size)
            rest = data.find(b"\n") + 1
            data, begin = data[rest:], begin + rest
            first = _line_at(file.fileno(), begin)
    except FileNotFoundError:
        return Part(name, kind, status="missing", note="no such file")
    except OSError as error:
        return Part(name, kind, status="missing", note=error.strerror or str(error))
    at = f"from its line {first} on" if first is not None else "lines counted from there"
    note = f"the last {len(data) / MIB:.1f} of {size / MIB:.1f} MiB, {at}"
    return Part(name, kind, data, note=note, total=size, first_line=first)


def _line_at(fd: int, offset: int) -> int | None:
    """1-based number of the line that begins at `offset`; None where counting would take too long."""
    end = time.monotonic() + COUNT_S
    at, lines = 0, 1
    while at < offset:
        block = os.pread(fd, min(COUNT_BLOCK, offset - at), at)
        if not block or time.monotonic() > end:
            return None
        lines += block.count(b"\n")
        at += len(block)
    return lines


def _reports(attempt: Attempt) -> Iterator[Part]:
    """error.json of every worker and life."""
    folder = attempt.layout.errors
    names, fault = _names(folder)
    there = [n for n in names if (folder / n / "error.json").exists()]
    if fault or not there:
        yield Part("error.json", "error_json", status="missing" if fault else "none", note=fault or "none was written")
    for name in there:
        part = _file(f"errors/{name}/error.json", "error_json", folder / name / "error.json", REPORT)
        if part.status == "ok" and not _is_object(part.data):
            # What stands in it may still name the cause: it is read as any other text is.
            part = Part(part.name, "log", part.data, note="damaged: no JSON object", total=part.total)
        yield part


def _worker_logs(attempt: Attempt) -> Iterator[Part]:
    folder = attempt.layout.logs
    names, fault = _names(folder)
    logs = [n for n in names if n.endswith(".log")]
    if fault or not logs:
        yield Part("worker logs", "log", status="missing" if fault else "none", note=fault or "none was written")
    left = WORKERS
    for name in logs:
        part = _file(f"logs/{name}", "log", folder / name, min(WORKER, max(left, 1 << 16)))
        left -= len(part.data)
        yield part


def _names(folder: Path) -> tuple[list[str], str]:
    """Names in a folder, and why they cannot be told; no folder is no fault."""
    try:
        return sorted(entry.name for entry in folder.iterdir()), ""
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        return [], error.strerror or str(error)


def _exit(attempt: Attempt, alive: bool) -> Part:
    part = _file("exit.json", "exit_json", attempt.layout.exit, REPORT)
    if part.status == "ok" and not _is_object(part.data):
        return Part("exit.json", "exit_json", status="missing", note="damaged: no JSON object")
    if part.note == "no such file":
        if alive:
            return Part("exit.json", "exit_json", status="none", note="the attempt still runs")
        note = "nobody lived to write it: wrapper and trainer ended together"
        return Part("exit.json", "exit_json", status="missing", note=note)
    return part


def _is_object(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False


def _pane(layout: Layout, attempt: Attempt, *, newest: bool) -> Part:
    """What the attempt's pane shows and has shown; of an older attempt it is another one's by now."""

    def no(note: str, status: str = "missing") -> Part:
        return Part("pane", "pane", status=status, note=note)

    if not newest:
        return no("it shows a later attempt", "none")
    if attempt.spec is None:
        return no("job.json, which names its session, cannot be read")
    session, tmux = attempt.spec.session, Tmux(attempt.spec.socket)
    try:
        panes = tmux.panes(session, LOOK)
        if panes is None:
            return no(f"there is no tmux session {session}")
        ours = [p for p in panes if p.owner == str(layout.root)]
        if not ours:
            return no(f"the tmux session {session} belongs to somebody else")
        wrapper = attempt.start.wrapper.pid if attempt.start is not None else None
        pane = next((p for p in ours if p.process == wrapper), ours[0])
        said = tmux.run("capture-pane", "-p", "-J", "-S", f"-{PANE_LINES}", "-t", pane.id, seconds=PANE_S)
    except TmuxSilent as error:
        return no(str(error))
    except DflashError as error:
        return no(error.what)
    if said.rc != 0:
        return no(f"tmux refused: {said.err or f'exit code {said.rc}'}")
    text = "\n".join(said.out).rstrip() + "\n"
    return Part("pane", "pane", text.encode("utf-8", "replace")[-PANE:])


def _gpu() -> Part:
    def no(note: str) -> Part:
        return Part("nvidia-smi", "facts", status="missing", note=note)

    program = shutil.which("nvidia-smi")
    if program is None:
        return no("it is not installed there")
    said = machine.ask([program], seconds=GPU_S)
    if said.error is not None:
        return no(f"it cannot be run: {said.error.strerror}")
    if said.rc is None:
        return no(f"no answer within {GPU_S:g} s: the driver hangs")
    text = said.out + said.err
    if said.rc != 0:
        # What it says then is the driver's own fault, and triage knows these words.
        return Part("nvidia-smi", "log", text.encode(), note=f"it failed with {said.rc}")
    return Part("nvidia-smi", "facts", text.encode())


def _progressed(layout: Layout, number: int) -> float | None:
    """When this attempt last made progress, as the loop wrote it down."""
    try:
        snapshot = load(Snapshot, layout.snapshot)
    except (StateError, ContractError, OSError):
        return None  # it only narrows what the kernel's log is asked for
    if snapshot is None or snapshot.attempt != number or snapshot.progress is None:
        return None
    return snapshot.progress.t


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
