"""Seconds of each stage of the pipeline, batch by batch: what a model of other splits of the devices is fed with.

Each is kept as count, sum and sum of squares over an interval, so that intervals can be added up and a variance comes
out. A worker's first batch of each length in each of its lives is left out (it compiles, and fills caches), and so is
the drafters' first averaging in a life (it makes connections). Pure; costs a few additions a batch.
"""

from __future__ import annotations

from typing import Any

Sums = list[float]  # count, sum, sum of squares


class Stages:
    """One interval's sums, by stage; of stages that depend on it also by padded length."""

    def __init__(self) -> None:
        self._lengths: dict[str, dict[str, Sums]] = {}
        self._plain: dict[str, Sums] = {}
        #: (worker, life, length) that have been met; of averagings (drafters' life).
        self._met: set[tuple[str, int, int]] = set()

    def batch(self, worker: str, life: int, length: int, **seconds: float) -> None:
        """A worker has done its part of a batch.

        Args:
            worker, life: who. length: padded, in tokens. seconds: of each stage, by the stage's name.
        """
        if self._first(worker, life, length):
            return
        for stage, spent in seconds.items():
            _add(self._lengths.setdefault(stage, {}).setdefault(str(length), [0, 0.0, 0.0]), spent)

    def averaging(self, life: int, seconds: float) -> None:
        """From the launcher's word to the last drafter's answer."""
        if not self._first("averaging", life, 0):
            _add(self._plain.setdefault("average", [0, 0.0, 0.0]), seconds)

    def saving(self, seconds: float) -> None:
        """One checkpoint was written."""
        _add(self._plain.setdefault("save", [0, 0.0, 0.0]), seconds)

    def clear(self) -> None:
        """The interval begins anew; who has been met stays so."""
        self._lengths, self._plain = {}, {}

    def take(self) -> dict[str, Any]:
        """As metrics.jsonl has it; then clears."""
        taken: dict[str, Any] = {name: _rounded(sums) for name, sums in self._plain.items()}
        for stage, lengths in self._lengths.items():
            taken[stage] = {length: _rounded(sums) for length, sums in lengths.items()}
        self.clear()
        return taken

    def _first(self, worker: str, life: int, length: int) -> bool:
        key = (worker, life, length)
        new = key not in self._met
        self._met.add(key)
        return new


def _add(sums: Sums, seconds: float) -> None:
    sums[0] += 1
    sums[1] += seconds
    sums[2] += seconds * seconds


def _rounded(sums: Sums) -> Sums:
    return [sums[0], *(float(f"{value:.9g}") for value in sums[1:])]
