"""How a demo ended: a table for people, and one JSON object on the last line for everything else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table

from dflash_ops.view.text import fixed, ktok

#: Tokens that a verification must give on held-out prompts, on average; below it something is broken.
LEAST_TAU = 3.0


@dataclass(frozen=True)
class Training:
    """The finished attempt's numbers; None where it did not say."""

    steps: int | None
    loss: float | None
    block_tok_s: float | None
    ctx_tok_s: float | None


@dataclass(frozen=True)
class Outcome:
    """All that the last lines say. `evaluation` is the answer of `trainer evaluate --json`, None if it never ran."""

    training: Training
    evaluation: Mapping[str, Any] | None
    export: str | None
    seconds: float
    state: str

    @property
    def tau(self) -> float | None:
        return None if self.evaluation is None else float(self.evaluation["tau"])

    @property
    def lossless(self) -> bool | None:
        return None if self.evaluation is None else bool(self.evaluation["lossless"])

    def faults(self) -> list[str]:
        """Why this demo is no success; empty if it is one."""
        if self.tau is None:
            return [f"the training is {self.state}"]
        found = []
        if self.tau < LEAST_TAU:
            found.append(f"tau on held-out prompts is {self.tau:.2f}, below {LEAST_TAU:g}")
        if not self.lossless:
            found.append("speculative decoding changed the target's text")
        return found

    def last_line(self) -> str:
        return json.dumps(
            {
                "schema": 1,
                "kind": "demo",
                "ok": not self.faults(),
                "tau": None if self.tau is None else round(self.tau, 4),
                "lossless": self.lossless,
                "steps": self.training.steps,
                "export": self.export,
                "seconds": round(self.seconds, 1),
                "state": self.state,
            },
            allow_nan=False,
        )


def training_numbers(metrics: Iterable[bytes]) -> Training:
    """From the lines of metrics.jsonl: the last step and loss, the medians of both rates.

    A median, because the first record holds the workers' start and the last one a checkpoint.
    """
    steps: int | None = None
    loss: float | None = None
    rates: dict[str, list[float]] = {"block_tok_s": [], "ctx_tok_s": []}
    for line in metrics:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the torn last line of a killed run
        if not isinstance(record, dict):
            continue
        steps = record.get("step", steps)
        loss = record.get("loss", loss)
        for name, values in rates.items():
            if isinstance(record.get(name), (int, float)):
                values.append(record[name])
    block, ctx = (median(v) if v else None for v in rates.values())
    return Training(steps, loss, block, ctx)


def table(outcome: Outcome) -> Table:
    """The demo's result on a screen."""
    grid = Table(title="dflash-ops demo", title_justify="left", show_header=False)
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    t, e = outcome.training, outcome.evaluation
    rows = [
        ("steps", "–" if t.steps is None else str(t.steps)),
        ("block tokens", f"{ktok(t.block_tok_s)} Ktok/s trained"),
        ("context tokens", f"{ktok(t.ctx_tok_s)} Ktok/s read by the targets"),
        ("loss", fixed(t.loss, 3)),
    ]
    if e is not None:
        plain, fast = e["plain_forwards"], e["speculative_forwards"]
        rows += [
            ("tau", f"{fixed(outcome.tau, 2)} tokens a verification, on {e['prompts']} held-out prompts"),
            ("lossless", "yes: the target's own text, token for token" if outcome.lossless else "NO"),
            ("speed-up", f"{fixed(e['speedup_forwards'], 2)}x: {fast} target forwards instead of {plain}"),
        ]
    rows += [("export", outcome.export or "none"), ("took", minutes(outcome.seconds))]
    for name, value in rows:
        grid.add_row(name, value)
    return grid


def minutes(seconds: float) -> str:
    """`45 s`, `4 min 05 s`."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"
