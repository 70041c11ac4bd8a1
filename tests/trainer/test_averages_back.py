"""Of several nodes one may need the average before the last one: which averages can be gone back to, and when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from trainer.averages import AverageMemory, Averages
from trainer.optimizer import Masters
from trainer.state_layout import StateLayout


class Net(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.constant_(nn.Linear(3, 2, bias=False).weight.detach(), value))


@pytest.fixture
def averages(tmp_path: Path) -> Iterator[Averages]:
    made = Averages(StateLayout({"weight": (2, 3)}), str(tmp_path))
    yield made
    made.close()


def masters(value: float) -> Masters:
    return Masters(Net(value), 0.0, fused=False)


def commit(averages: Averages, step: int) -> None:
    memory = AverageMemory(averages.descriptor, averages.layout, 0, pin=False)
    sums = memory.write(averages.begin(wipe=False), masters(float(step)))
    averages.keep(step, 4 * step, [sums[str(i)] for i in range(len(sums))])


def steps(averages: Averages) -> list[int]:
    return [kept.step for kept in averages.valid()]


def value(averages: Averages) -> float:
    assert averages.current is not None
    taken = masters(0.0)
    AverageMemory(averages.descriptor, averages.layout, 0, pin=False).read(averages.current.buffer, taken)
    return float(taken.parameters["weight"].detach().mean())


def test_the_average_before_the_last_one_stays_until_the_next_one_is_written(averages: Averages) -> None:
    assert steps(averages) == []
    commit(averages, 1)
    assert steps(averages) == [1]
    commit(averages, 2)
    assert steps(averages) == [2, 1]
    buffer = averages.begin(wipe=False)  # asked for, but others may still be at step 1: their drafters have not met yet
    assert steps(averages) == [2, 1]
    AverageMemory(averages.descriptor, averages.layout, 0, pin=False).write(buffer, masters(3.0))
    assert steps(averages) == [2]  # half of it may be overwritten
    averages.begin()
    assert steps(averages) == [2]


def test_going_back_makes_an_older_average_the_last_one(averages: Averages) -> None:
    commit(averages, 1)
    commit(averages, 2)
    averages.go_back(1)
    assert steps(averages) == [1]
    assert value(averages) == 1.0
    commit(averages, 2)
    assert steps(averages) == [2, 1]
    averages.go_back(2)
    assert steps(averages) == [2, 1]
    averages.go_back(7)  # others hold it, this node does not
    assert steps(averages) == []
    assert averages.current is None
    commit(averages, 8)
    assert (steps(averages), value(averages)) == ([8], 8.0)
