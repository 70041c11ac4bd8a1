"""What node 0 decides from the nodes' reports: who trains together, and from which state on."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from trainer.addresses import interface_of, local_address
from trainer.errors import ConfigError
from trainer.meeting import (
    DONE,
    FAILED,
    FRESH,
    HELD,
    READY,
    RUNNING,
    SAVED,
    Decision,
    Held,
    Report,
    Waiting,
    agreed_stop,
    broken,
    decide,
)

FACTS = {"train.lr": 6e-4, "data": "sha256 of it"}


def node(rank: int, **changes: Any) -> Report:
    return replace(Report(rank, f"life{rank}", facts=FACTS), **changes)


def state(step: int, mark: str = "g") -> Held:
    return Held(step, step * 4, mark)


def meet(*reports: Report, previous: Decision | None = None, **options: Any) -> Decision | Waiting:
    alive = options.pop("alive", [r.rank for r in reports])
    options = {"nodes": len(reports), "on_loss": "wait", "token": "t", **options}
    return decide({r.rank: r for r in reports}, alive, previous or Decision(), **options)


def generation(*reports: Report, **options: Any) -> Decision:
    made = meet(*reports, **options)
    assert isinstance(made, Decision), made
    assert not made.error, made
    return made


def running(made: Decision, *reports: Report, **changes: Any) -> list[Report]:
    return [replace(r, phase=RUNNING, generation=made.generation, held=(), **changes) for r in reports]


def test_forms_survive_json() -> None:
    made = generation(node(0, saved=(state(3),), base={"number": 1}), node(1, saved=(state(3),)))
    assert Decision.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    newer = {**made.to_dict(), "later": 1, "members": [{**m, "later": 1} for m in made.to_dict()["members"]]}
    assert Decision.from_dict(json.loads(json.dumps(newer))) == made
    report = node(1, held=(state(1),), totals={"samples": 3.0}, stop_at=4)
    assert Report.from_dict(json.loads(json.dumps({**report.to_dict(), "later": 1}))) == report
    for bad in ({}, {"rank": 1, "life": "x", "held": [{"step": 1}]}, {"rank": 1, "life": "x", "held": 3}):
        with pytest.raises(ValueError, match="no report"):
            Report.from_dict(bad)
    for bad in ({"generation": 1}, {**newer, "members": [3]}, {**newer, "start": "x"}):
        with pytest.raises(ValueError, match="no decision"):
            Decision.from_dict(bad)


def test_drafters_are_numbered_through_all_nodes() -> None:
    made = generation(node(0, drafters=2), node(1, drafters=1), node(2, drafters=3))
    assert [(m.rank, m.drafters, m.first) for m in made.members] == [(0, 2, 0), (1, 1, 2), (2, 3, 3)]
    assert (made.generation, made.world, made.origin, made.source) == (1, 6, FRESH, 0)


def test_the_first_meeting_waits_for_all() -> None:
    assert meet(node(0), nodes=3) == Waiting((1, 2))
    assert meet(node(0), nodes=2, on_loss="go_on") == Waiting((1,))


def test_a_node_that_does_not_fit_is_named_with_key_and_values() -> None:
    made = meet(node(0), node(1, facts={**FACTS, "train.lr": 1e-3}))
    assert isinstance(made, Decision)
    assert made.code == 2
    assert made.error == "node 1 does not fit: train.lr is 0.0006 on node 0, 0.001 on node 1"
    made = meet(node(0, address="127.0.1.1"), node(1, address="192.0.2.12"))
    assert isinstance(made, Decision)
    assert "as 127.0.1.1, node 1 comes from 192.0.2.12" in made.error


def test_fresh_launchers_start_from_the_newest_checkpoint_that_all_have() -> None:
    made = generation(node(0, saved=(state(3), state(6))), node(1, saved=(state(3), state(6), state(9))))
    assert (made.origin, made.start) == (SAVED, state(6))
    # Node 1 was away when node 0 went on alone: it gets what it lacks.
    alone = replace(state(9), nodes=(0,))
    made = generation(node(0, saved=(state(6), alone), base={"number": 2}), node(1, saved=(state(6), state(8, "left"))))
    assert (made.origin, made.start, made.source, made.base) == (SAVED, alone, 0, {"number": 2})
    both = replace(state(9), nodes=(0, 1))
    assert generation(node(0, saved=(state(6), both)), node(1, saved=(state(6),))).start == state(6)
    for other, said in (
        ((), "no checkpoint is on every node: node 1 lacks step 6 (node 0 has step 3, 6, node 1 has none)"),
        ((state(5),), "no checkpoint is on every node: node 1 lacks step 6 (node 0 has step 3, 6, node 1 has step 5)"),
        ((state(6, "x"),), "step 6 is not the same checkpoint on all nodes: the hashes of its weights differ"),
    ):
        failed = meet(node(0, saved=(state(3), state(6))), node(1, saved=other))
        assert isinstance(failed, Decision)
        assert (failed.code, failed.error) == (5, said)


def test_who_has_run_starts_from_the_newest_average_that_all_of_them_hold() -> None:
    first = generation(node(0), node(1), node(2))
    zero = node(0, generation=1, held=(state(6), state(9)), base={"number": 7})
    one = node(1, generation=1, held=(state(3), state(6)), saved=(state(3, "sha"),))
    back = node(2, life="anew", saved=(state(3, "sha"),))
    made = generation(zero, one, back, previous=first)
    assert (made.generation, made.origin, made.start, made.source) == (2, HELD, state(6), 0)
    assert made.base == {"number": 7}
    # One that was cut off holds the same step of a history that was left.
    stale = node(2, generation=1, held=(state(6), state(9)))
    two = [replace(r, generation=2) for r in (zero, one)]
    made = generation(*two, stale, previous=made)
    assert (made.start, made.source) == (state(6), 0)
    # Node 0 itself was started anew: it gets the weights from the others.
    made = generation(node(0, life="anew"), *(replace(r, generation=3) for r in (one, node(2, held=(state(6),)))))
    assert (made.generation, made.origin, made.start, made.source) == (4, HELD, state(6), 1)


def test_a_lost_node_is_waited_for_or_not() -> None:
    reports = node(0), node(1), node(2)
    first = generation(*reports)
    held = [replace(r, phase=READY, generation=1, held=(state(3),)) for r in reports]
    gone = replace(held[1], phase=RUNNING, held=())
    # Its last report is still fresh: it may be about to meet.
    assert meet(held[0], gone, held[2], previous=first, on_loss="go_on") == Waiting((1,), ())
    silent = {"alive": [0, 2], "previous": first}
    assert meet(held[0], gone, held[2], **silent) == Waiting((1,), (1,))
    made = generation(held[0], gone, held[2], on_loss="go_on", **silent)
    assert [(m.rank, m.first) for m in made.members] == [(0, 0), (2, 1)]
    assert (made.start, made.source, made.stop_at) == (state(3), None, None)
    stopped = generation(held[0], gone, replace(held[2], stop=True), **silent)
    assert stopped.stop_at == 12
    ended = meet(held[0], replace(gone, phase=FAILED, code=4, why="the loss is nan"), held[2], previous=first)
    assert isinstance(ended, Decision)
    assert (ended.code, ended.error) == (4, "node 1 ended: the loss is nan")
    # A stranger's facts end nobody's run that goes on, or waits.
    waits = meet(held[0], node(1, life="anew", facts={}), held[2], previous=first)
    assert waits == Waiting(
        (1,),
        (1,),
        {"anew": "data is 'sha256 of it' on node 0, None on node 1; train.lr is 0.0006 on node 0, None on node 1"},
    )
    odd = node(1, life="anew", facts={})
    made = generation(held[0], odd, held[2], previous=made, on_loss="go_on")
    assert [m.rank for m in made.members] == [0, 2]
    assert "train.lr is 0.0006 on node 0, None on node 1" in made.refused["anew"]


def test_a_generation_ends_with_any_of_its_members() -> None:
    pair = node(0), node(1)
    made = generation(*pair)
    zero, one = running(made, *pair)

    def ended(other: Report, alive: tuple[int, ...] = (0, 1)) -> tuple[int, str] | None:
        return broken(made, {0: zero, 1: other}, alive)

    assert ended(one) is None
    assert ended(pair[1]) is None  # it has not read the decision yet
    assert ended(one, alive=(0,)) == (1, "silent")
    assert ended(replace(one, phase=DONE), alive=(0,)) is None
    assert ended(replace(one, life="anew")) == (1, "its launcher was started anew")
    assert ended(replace(one, phase=READY, why="drafter0 was killed by SIGKILL")) == (
        1,
        "drafter0 was killed by SIGKILL",
    )
    assert ended(replace(one, phase=FAILED, why="no room")) == (1, "no room")


def test_all_stop_where_the_last_of_them_can() -> None:
    pair = node(0), node(1)
    made = generation(*pair)
    zero, one = running(made, *pair)
    assert agreed_stop(made, {0: zero, 1: replace(one, stop_at=3)}) is None
    assert agreed_stop(made, {0: replace(zero, stop_at=8), 1: replace(one, stop_at=3)}) == 8


def test_the_way_to_the_endpoint_names_the_interface() -> None:
    assert local_address("127.0.0.1", 29400) == "127.0.0.1"
    assert interface_of("127.0.0.1") == interface_of("::1") == "lo"
    with pytest.raises(ConfigError, match="no interface here has the address"):
        interface_of("192.0.2.77")
    with pytest.raises(ConfigError, match="cannot be resolved"):
        local_address("no-such-host.invalid", 29400)
