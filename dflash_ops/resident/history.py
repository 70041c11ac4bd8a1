"""`history`: the course of attempts for a report: their records, thinned metrics, journal. One exec, bounded memory.

The rule here: a file is read in pieces and never kept; of one that is larger than a report is worth evenly spaced parts
are read, and that is told.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dflash_ops.contracts import Layout, ProgressPattern, to_dict
from dflash_ops.errors import ContractError, UsageError
from dflash_ops.resident import attempts, journal
from dflash_ops.resident.attempts import Attempt
from dflash_ops.resident.records import listed
from dflash_ops.resident.scan import LINE, read_line
from dflash_ops.resident.thin import Thin

BLOCK = 1 << 20
#: Bytes of one file that are read; a larger one in so many parts.
MOST = 1 << 30
PARTS = 256
#: Attempts of one report, the newest.
ATTEMPTS = 50
#: Bytes of run.toml that are told.
CONFIG = 1 << 16


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="history")
    parser.add_argument("--root", required=True, type=Path)
    parser.add_argument("--attempt", type=int, default=None, help="default: the newest")
    parser.add_argument("--all", action="store_true", help=f"all attempts, the newest {ATTEMPTS}")
    parser.add_argument("--points", type=int, default=400, help="of an attempt's curves; fewer where there are many")
    options = parser.parse_args(args)
    layout = Layout(options.root.absolute())
    there = attempts.numbers(layout)
    if not there:
        raise UsageError(
            "nothing was ever started: there is nothing to report",
            str(layout.attempts),
            "start it with: dflash-ops deploy",
        )
    if options.attempt is not None and options.attempt not in there:
        known = ", ".join(map(str, there[-20:]))
        raise UsageError(f"there is no attempt {options.attempt}", str(layout.attempts), f"use one of {known}")
    wanted = there[-ATTEMPTS:] if options.all else [there[-1] if options.attempt is None else options.attempt]
    points = min(max(options.points, 10), 5000)
    points = max(10, min(points, 4 * points // len(wanted)))  # of many attempts each is drawn small
    events, torn = journal.read(layout.journal)
    read = [attempts.read(layout, number) for number in wanted]
    head = {
        "schema": 1,
        "kind": "history",
        "now": time.time(),
        "attempts_there": len(there),
        "events": to_dict(events),
        "torn_lines": torn,
        "job": _job(read[-1]),
    }
    # One line an attempt: a report of many is long, and nobody keeps all of it twice.
    sys.stdout.write(json.dumps(head, ensure_ascii=True, separators=(",", ":")) + "\n")
    for one in read:
        told = {**listed(one), "course": course(one, points)}
        sys.stdout.write(json.dumps(told, ensure_ascii=True, separators=(",", ":")) + "\n")
    sys.stdout.write(json.dumps({"end": True, "attempts": len(read)}) + "\n")
    return 0


def _job(attempt: Attempt) -> dict[str, Any] | None:
    """What of job.json a report may hold: no value of a variable, and no word of a command, which may be secrets."""
    spec = attempt.spec
    if spec is None:
        return None
    return {
        "job": spec.job,
        "program": spec.argv[0] if spec.argv else "",
        "words": len(spec.argv),
        "foreign": bool(spec.progress),
        "env": sorted(spec.env),
        "checkpoints": spec.checkpoints,
        "nnodes": spec.nnodes,
        "node_rank": spec.node_rank,
        "mode": spec.policy.mode,
        "run_toml": spec.files.get("run.toml", "")[:CONFIG],
    }


def course(attempt: Attempt, points: int) -> dict[str, Any]:
    """The attempt's curves: `source` is `metrics`, `log` (a foreign trainer's lines: no times) or empty."""
    thin, source, fault, share = Thin(points), "", "", 1.0
    try:
        if attempt.layout.metrics.exists():
            source, share = "metrics", _metrics(attempt.layout.metrics, thin)
        elif attempt.spec is not None and attempt.layout.log.exists():
            source, share = "log", _log(attempt.layout.log, attempt.spec.progress, thin)
    except (OSError, ContractError) as error:
        fault = str(error)
    return {
        "source": source if thin.lines else "",
        "fault": fault,
        "read": round(share, 4),
        "lines": thin.lines,
        "bad_lines": thin.bad_lines,
        "not_finite": {key: {"count": count, "step": step} for key, (count, step) in thin.not_finite.items()},
        "lives": thin.lives,
        "lives_count": thin.lives_count,
        "gaps": thin.gaps,
        "gaps_count": thin.gaps_count,
        "last": thin.last(),
        "points": thin.points(),
    }


def _metrics(path: Path, thin: Thin) -> float:
    def take(raw: bytes) -> None:
        if not raw.strip():
            return
        try:
            record = json.loads(raw)
        except (ValueError, RecursionError):
            thin.bad_lines += 1
            return
        if isinstance(record, dict):
            thin.add(record)
        else:
            thin.bad_lines += 1

    return _lines(path, thin, take)


def _log(path: Path, pattern: str, thin: Thin) -> float:
    reader = ProgressPattern(pattern) if pattern else None

    def take(raw: bytes) -> None:
        if reader is None and b"dflash " not in raw:
            return
        line = read_line(raw, reader)
        if line is not None and line.kind == "step":
            known = {k: v for k, v in to_dict(line.progress(0.0)).items() if v is not None and k != "t"}
            for key in ("loss", "tau"):
                if key in line.fields and key not in known:
                    known[key] = None
            thin.add(known)

    return _lines(path, thin, take)


def _lines(path: Path, thin: Thin, take: Callable[[bytes], None]) -> float:
    """`take` of each line; the share of the file that was read."""
    size = path.stat().st_size
    for blocks in _parts(path, size):
        rest = b""
        for block in blocks:
            pieces = (rest + block.replace(b"\r", b"\n")).split(b"\n")
            rest = pieces.pop()[-LINE:]  # a line without an end must not fill the memory
            for raw in pieces:
                take(raw)
        told, thin.bad_lines = thin.bad_lines, 0
        take(rest)
        thin.bad_lines = told  # a line that is cut (being written, or by the part's end) is no bad one
        thin.skip()
    return 1.0 if size <= MOST else MOST / size


def _parts(path: Path, size: int) -> Iterator[Iterator[bytes]]:
    """The file, or PARTS evenly spaced pieces of it, each beginning at a line."""
    with path.open("rb") as file:
        if size <= MOST:
            yield _blocks(file, 0, size)
            return
        length = MOST // PARTS
        for part in range(PARTS):
            begin = part * (size - length) // (PARTS - 1)
            file.seek(begin)
            if part:
                begin += len(file.readline(BLOCK))
            yield _blocks(file, begin, begin + length)


def _blocks(file: Any, begin: int, end: int) -> Iterator[bytes]:
    file.seek(begin)
    while begin < end and (block := file.read(min(BLOCK, end - begin))):
        begin += len(block)
        yield block
