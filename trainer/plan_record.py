"""plan.jsonl: what was trained, written as it happens, and its replay (`audit`).

An acknowledgement counts from the next commit on whose checkpoint a later attempt resumed; what came after it was
rolled back with the weights. So the replay walks the attempts in order, and cuts the list of acknowledgements back at
every `begin`, and at every `rollback` (a drafter died) to the commit that it names. A checkpoint holds what its commit
held, however late it was written. Torn lines (kill -9, power) are skipped: what they said was not committed.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.plan import PlannedBatch

PLAN_FILE = "plan.jsonl"
#: No room now, maybe later.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def to_ranges(ids: Iterable[int]) -> list[list[int]]:
    """Ascending ids as [first, last] pairs: a file without bad lines is one pair."""
    out: list[list[int]] = []
    for i in ids:
        if out and i == out[-1][1] + 1:
            out[-1][1] = i
        else:
            out.append([i, i])
    return out


def from_ranges(ranges: Sequence[Sequence[int]]) -> Iterator[int]:
    for first, last in ranges:
        yield from range(first, last + 1)


class PlanRecord:
    """Appends to an attempt's plan.jsonl; a checkpoint's line is on disk before `checkpoint` returns."""

    def __init__(self, attempt: Path) -> None:
        self._path = attempt / PLAN_FILE
        self._file = self._path.open("ab", buffering=0)
        self._waiting = b""  # what a full disk did not take

    def begin(self, *, seed: int, step: int, epoch: int, batch: int, accepted: Iterable[int]) -> None:
        """An attempt starts at a checkpoint's step (0: from nothing), with these samples."""
        self._write(
            k="begin",
            attempt_t=round(time.time(), 3),
            seed=seed,
            from_step=step,
            epoch=epoch,
            from_batch=batch,
            accepted=to_ranges(accepted),
        )
        self._sync()

    def ack(self, batch: PlannedBatch, drafter: str) -> None:
        self._write(
            k="ack",
            epoch=batch.epoch,
            batch=batch.index,
            n=batch.number,
            samples=list(batch.sample_ids),
            drafter=drafter,
        )

    def commit(self, step: int, upto: int) -> None:
        """All acknowledgements so far are in everybody's weights, which stand for the run's batches below `upto`."""
        self._write(k="commit", step=step, upto=upto, checkpoint=None)

    def generation(self, *, token: str, number: int, node: int, nodes: Sequence[int], step: int, batches: int) -> None:
        """Nodes train together from here on, from that step; what any of them trained beyond it counts no more."""
        self._write(k="generation", token=token, number=number, node=node, nodes=list(nodes), step=step, upto=batches)
        self._sync()

    def checkpoint(self, step: int, path: Path) -> None:
        """What the commit of this step held is in that checkpoint, which gets its name now."""
        self._write(k="checkpoint", step=step, path=str(path))
        self._sync()

    def rollback(self, step: int, cause: str) -> None:
        """Drafters start again from the commit of this step (or where the attempt began): later ones do not count."""
        self._write(k="rollback", step=step, cause=cause)

    def epoch(self, epoch: int) -> None:
        """This epoch is done and committed."""
        self._write(k="epoch", epoch=epoch)

    def close(self) -> None:
        """Closed once, whatever happens.

        Raises:
            OSError: the last lines are lost.
        """
        if self._file.closed:
            return
        try:
            self._sync()
        finally:
            self._file.close()

    def _write(self, **entry: object) -> None:
        # Not buffered: a killed process loses nothing; a power cut may, but only what no checkpoint holds.
        self._waiting += json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        try:
            self._drain()
        except OSError as error:
            if error.errno not in FULL:
                raise
            # A checkpoint that does not fit fills the disk until it is given up: the lines wait in their order.

    def _drain(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) or 0 :]

    def _sync(self) -> None:
        """
        Raises:
            OSError: there is no room, or the disk fails.
        """
        try:
            self._drain()
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(self._path)) from error
        os.fsync(self._file.fileno())


@dataclass(frozen=True)
class EpochAudit:
    """One epoch by the record.

    Attributes:
        samples: accepted ones. trained: different ones trained at least once. missing, repeated: ids, at most 20 each.
        missing_count, repeated_count: all of them. complete: the record says that the epoch is over.
        ok: every sample once; in the last, unfinished epoch: none twice.
    """

    epoch: int
    samples: int
    trained: int
    missing: tuple[int, ...]
    missing_count: int
    repeated: tuple[int, ...]
    repeated_count: int
    complete: bool
    ok: bool


@dataclass
class Audit:
    """The replay's result. `provisional`: batches trained after the last commit with a checkpoint."""

    attempts: int = 0
    torn_lines: int = 0
    rolled_back: int = 0
    provisional: int = 0
    problems: list[str] = field(default_factory=list)
    epochs: list[EpochAudit] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems and all(epoch.ok for epoch in self.epochs)


def audit(folder: Path) -> Audit:
    """Replays attempts 1..n under a folder (or a single attempt's folder).

    Raises:
        ConfigError: there is no plan.jsonl.
    """
    files = attempt_files(folder)
    result = Audit(attempts=len(files))
    return replay([(p.parent.name, read_lines(p, result)) for p in files], result)


def attempt_files(folder: Path) -> list[Path]:
    """The plan.jsonl of attempts 1..n under a folder (or of a single attempt's folder).

    Raises:
        ConfigError: there is none.
    """
    if (folder / PLAN_FILE).is_file():
        return [folder / PLAN_FILE]
    found = [p for p in folder.glob(f"*/{PLAN_FILE}") if p.parent.name.isascii() and p.parent.name.isdigit()]
    if not found:
        raise ConfigError(f"no {PLAN_FILE} in it or in its numbered folders", str(folder), "give run/attempts")
    return sorted(found, key=lambda p: int(p.parent.name))


def read_lines(path: Path, result: Audit) -> list[dict[str, Any]]:
    """Whole records of one file; anything else is counted as torn."""
    entries = []
    for line in path.read_bytes().split(b"\n"):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict) or "k" not in entry:
                raise ValueError("no record")
            entries.append(entry)
        except ValueError:
            result.torn_lines += 1
    return entries


def replay(attempts: Sequence[tuple[str, Sequence[dict[str, Any]]]], result: Audit) -> Audit:
    """Pure: walks the records of all attempts and judges each epoch."""
    kept: list[tuple[int, Sequence[int]]] = []
    over: list[int] = []
    saved: dict[int, tuple[int, int]] = {}  # step of a checkpoint -> how many of kept, and of over, it holds
    commits: dict[int, tuple[int, int]] = {}  # the same of every commit of this attempt
    accepted: list[int] = []
    last_saved = 0
    for name, entries in attempts:
        for entry in entries:
            kind = entry["k"]
            if kind == "begin":
                step = int(entry["from_step"])
                if step == 0:
                    back = (0, 0)
                elif step in saved:
                    back = saved[step]
                else:
                    result.problems.append(f"attempt {name} resumed from step {step}, which no earlier attempt saved")
                    back = (len(kept), len(over))
                result.rolled_back += len(kept) - back[0]
                del kept[back[0] :], over[back[1] :]
                saved = {s: at for s, at in saved.items() if s <= step and at[0] <= back[0]}
                last_saved = len(kept)
                commits = {step: back}
                accepted = list(from_ranges(entry.get("accepted", [])))
            elif kind == "ack":
                kept.append((int(entry["epoch"]), entry["samples"]))
            elif kind == "epoch":
                over.append(int(entry["epoch"]))
            elif kind == "rollback":
                step = int(entry["step"])
                if step not in commits:
                    result.problems.append(f"attempt {name} rolled back to step {step}, which it never committed")
                    continue
                back = commits[step]
                result.rolled_back += len(kept) - back[0]
                del kept[back[0] :], over[back[1] :]
                commits = {s: at for s, at in commits.items() if s <= step}
            elif kind in ("commit", "checkpoint"):
                step = int(entry["step"])
                if kind == "commit":
                    commits[step] = (len(kept), len(over))
                # Until checkpoints were written beside the training, a commit's own line named its checkpoint.
                if kind == "checkpoint" or entry.get("checkpoint"):
                    if step not in commits:
                        result.problems.append(f"attempt {name} saved step {step}, which it never committed")
                        continue
                    saved[step] = commits[step]
                    last_saved = commits[step][0]
    result.provisional = len(kept) - last_saved
    result.epochs = list(judge(kept, set(over), accepted))
    return result


def judge(kept: Sequence[tuple[int, Sequence[int]]], over: set[int], accepted: Sequence[int]) -> Iterator[EpochAudit]:
    """Each epoch that anything was trained of, by (epoch, samples) of every batch that counts."""
    counts: dict[int, Counter[int]] = {}
    for epoch, samples in kept:
        counts.setdefault(epoch, Counter()).update(samples)
    for epoch in sorted(counts):
        count = counts[epoch]
        missing = [i for i in accepted if i not in count]
        repeated = [i for i, times in sorted(count.items()) if times > 1]
        # A round may reach into the next epoch, so an epoch is over only when the record says so or two later begin.
        complete = epoch in over or any(later > epoch + 1 for later in counts)
        yield EpochAudit(
            epoch=epoch,
            samples=len(accepted),
            trained=len(count),
            missing=tuple(missing[:20]),
            missing_count=len(missing),
            repeated=tuple(repeated[:20]),
            repeated_count=len(repeated),
            complete=complete,
            ok=not repeated and (not missing or not complete),
        )
