"""Progress lines on standard output and metrics.jsonl, as docs/contracts.md has them.

Losing standard output (a closed pipe, a terminal that went away) must not end a training run: from then on lines are
dropped, and metrics.jsonl goes on.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainer.stages import Stages
from trainer.stopwatch import SHARES

SCHEMA = 1


class Output:
    """Lines to standard output, or nowhere once that is broken."""

    def __init__(self) -> None:
        self.broken = False

    def line(self, text: str) -> None:
        if self.broken:
            return
        try:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        except (OSError, ValueError):
            self.broken = True
            # What is still buffered would fail once more at the interpreter's end, and change the exit code.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.close(nowhere)

    def fields(self, **pairs: object) -> None:
        """`dflash key=value ...`; None is left out. Blanks become underscores, in a Path %20 (it stays that path)."""
        shown = (f"{k}={_word(v)}" for k, v in pairs.items() if v is not None)
        self.line("dflash " + " ".join(shown))

    def stage(self, stage: str, k: int, n: int, what: str) -> None:
        self.fields(stage=stage, k=k, n=n, what=what)

    def event(self, event: str, **pairs: object) -> None:
        self.fields(event=event, **pairs)


def _word(value: object) -> str:
    """A value without blanks; of a path whoever reads it can make the path again (docs/contracts.md)."""
    if isinstance(value, Path):
        plain = (c.isprintable() and not c.isspace() and c != "%" for c in str(value))
        return "".join(c if ok else quote(os.fsencode(c)) for c, ok in zip(str(value), plain, strict=True))
    return "_".join(str(value).split()) or "-"


@dataclass
class Totals:
    """Sums over an interval, from the drafters' messages."""

    numerator: float = 0.0
    denominator: float = 0.0
    correct: float = 0.0
    positions: float = 0.0
    prefix_sum: float = 0.0
    prefix_count: float = 0.0
    block_tokens: int = 0
    context_tokens: int = 0
    samples: int = 0
    grad_norm: float = 0.0
    batches: int = 0
    empty: int = 0


#: What a drafter's message says of a batch; `samples` and `batches` are the launcher's own to know.
_SUMMED = tuple(f.name for f in fields(Totals) if f.name not in ("samples", "batches"))


@dataclass(frozen=True)
class WorkerTimes:
    """Seconds of one worker's present life, cumulative."""

    name: str
    life: int
    seconds: Mapping[str, float]


@dataclass
class Meter:
    """Adds up what drafters report, and turns it into one record an interval.

    Args:
        output: for lines. metrics: metrics.jsonl, appended to. sinks: called with each entry, too.
    """

    output: Output
    metrics: Path
    totals: Totals = field(default_factory=Totals)
    sinks: list[Callable[[Mapping[str, Any]], None]] = field(default_factory=list)
    #: What this launcher's own workers took for each batch in the interval.
    stages: Stages = field(default_factory=Stages)

    def __post_init__(self) -> None:
        self._since = time.monotonic()
        self._before: dict[tuple[str, int], dict[str, float]] = {}
        self._logged: int | None = None
        self._torn = False
        self._told = 0
        #: What this launcher's own drafters have done since it began, by the names of `Totals`.
        self.sums: dict[str, float] = {}

    def start(self, step: int, times: Callable[[], Iterable[WorkerTimes]]) -> bool:
        """The next batch is about to be trained; True for the first one: loading is no part of the pace.

        Args:
            step: optimiser steps done. times: asked for the workers' times so far, which belong to no interval.
        """
        if self._logged is not None:
            return False
        self._before = {(w.name, w.life): dict(w.seconds) for w in times()}
        self._since, self._logged = time.monotonic(), step
        self.stages.clear()
        return True

    def roll_back(self, step: int, times: Callable[[], Iterable[WorkerTimes]]) -> None:
        """What was trained since step `step` counts no more, and the interval begins anew."""
        if self._logged is None:
            return
        self.totals, self._logged = Totals(), None
        self.start(step, times)

    def add(self, stats: Mapping[str, float], samples: int) -> None:
        """One trained batch."""
        for name, value in {**{k: stats[k] for k in _SUMMED}, "samples": samples, "batches": 1}.items():
            before = getattr(self.totals, name)
            setattr(self.totals, name, before + type(before)(value))
            self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def add_others(self, gained: Mapping[str, float]) -> None:
        """What other nodes have done in this interval."""
        for name, value in gained.items():
            before = getattr(self.totals, name)
            setattr(self.totals, name, type(before)(before + max(0.0, value)))

    def due(self, step: int, every: int) -> bool:
        return self._logged is not None and step - self._logged >= every

    def record(
        self,
        *,
        step: int,
        total: int,
        epoch: float,
        lr: float,
        ring: tuple[int, int],
        samples: int,
        workers: Iterable[WorkerTimes],
    ) -> None:
        """Prints a progress line and appends its object to metrics.jsonl; nothing if nothing was trained since.

        Args:
            step, total: optimiser steps of a drafter. epoch: passes over the data. lr: of the last batch.
            ring: ready slots and slots. samples: trained since the run began. workers: their times so far.
        """
        t, now = self.totals, time.monotonic()
        if t.batches == 0 and samples == self._told:
            return
        self._told = samples
        wall = max(1e-9, now - self._since)
        steps = step - (self._logged or 0)
        workers = list(workers)
        entry: dict[str, Any] = {
            "schema": SCHEMA,
            "t": round(time.time(), 3),
            "step": step,
            "total": total,
            "epoch": round(epoch, 6),
            "loss": t.numerator / t.denominator if t.denominator else None,
            "acc": t.correct / t.positions if t.positions else None,
            "tau": t.prefix_sum / t.prefix_count + 1 if t.prefix_count else None,
            "block_tok_s": t.block_tokens / wall,
            "ctx_tok_s": t.context_tokens / wall,
            "ring_ready": ring[0],
            "ring_slots": ring[1],
            "lr": lr,
            "grad_norm": t.grad_norm / max(1, t.batches),
            "eta_s": (total - step) * wall / steps if steps else None,
            "life": max((w.life for w in workers), default=0),
            "samples": samples,
            "empty": t.empty,
            "workers": {w.name: {**self._shares(w, wall), "life": w.life} for w in workers},
            "stages": {
                "seconds": round(wall, 6),
                "batches": t.batches,
                "block_tokens": t.block_tokens,
                "ctx_tokens": t.context_tokens,
                **self.stages.take(),
            },
        }
        self._append(json.dumps(entry) + "\n")
        self._line(entry)
        for sink in self.sinks:
            sink(entry)
        self.totals, self._since, self._logged = Totals(), now, step

    def _append(self, line: str) -> None:
        """A full disk (a checkpoint that does not fit) costs lines of metrics, and not the run."""
        try:
            with self.metrics.open("a", encoding="utf-8") as opened:
                opened.write(("\n" if self._torn else "") + line)
            self._torn = False
        except OSError as error:
            if not self._torn:
                self.output.line(f"note: {self.metrics.name} cannot be written now, lines of it are lost: {error}")
            self._torn = True

    def _shares(self, worker: WorkerTimes, wall: float) -> dict[str, float]:
        """Shares of the interval, together 1. What belongs to no life (dead, or not started) is a wait too."""
        before = self._before.get((worker.name, worker.life), {})
        self._before[(worker.name, worker.life)] = dict(worker.seconds)
        # A worker's own account may correct what was only presumed of it before: nothing is less than nothing.
        gained = {name: max(0.0, worker.seconds.get(name, 0.0) - before.get(name, 0.0)) for name in SHARES}
        total = sum(gained.values())
        gained["wait"] += max(0.0, wall - total)
        shares = {name: round(spent / max(wall, total), 4) for name, spent in gained.items()}
        largest = max(SHARES, key=lambda name: shares[name])
        shares[largest] = round(shares[largest] + 1.0 - sum(shares.values()), 4)  # what rounding took
        return shares

    def _line(self, entry: Mapping[str, Any]) -> None:
        def shown(value: float | None, form: str) -> str | None:
            return None if value is None or not math.isfinite(value) else format(value, form)

        self.output.fields(
            step=f"{entry['step']}/{entry['total']}",
            epoch=shown(entry["epoch"], ".3f"),
            loss=shown(entry["loss"], ".4f"),
            acc=shown(entry["acc"], ".4f"),
            tau=shown(entry["tau"], ".2f"),
            block_tok_s=shown(entry["block_tok_s"], ".0f"),
            ctx_tok_s=shown(entry["ctx_tok_s"], ".0f"),
            ring=f"{entry['ring_ready']}/{entry['ring_slots']}",
            lr=shown(entry["lr"], ".4e"),
            eta_s=shown(entry["eta_s"], ".0f"),
            life=entry["life"],
            shares=",".join(f"{name}:{_percents(w)}" for name, w in entry["workers"].items()) or None,
        )


def _percents(shares: Mapping[str, float]) -> str:
    """wait/compute/copy/sync in whole percent, together 100."""
    whole = {name: math.floor(100 * shares[name] + 1e-6) for name in SHARES}
    rest = sorted(SHARES, key=lambda name: whole[name] - 100 * shares[name])
    for name in rest[: 100 - sum(whole.values())]:
        whole[name] += 1
    return "/".join(str(whole[name]) for name in SHARES)
