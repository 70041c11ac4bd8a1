"""The first cause across a job's nodes: what a node says of itself before what follows, then the earliest by clocks."""

from __future__ import annotations

from dflash_ops.contracts.diagnosis import Diagnosis
from dflash_ops.triage.across import NodeCase, first


def case(rank: int, kind: str, failed: float | None, **more: object) -> NodeCase:
    confidence = more.pop("confidence", 0.9)
    diagnosis = Diagnosis(kind, confidence=confidence)  # type: ignore[arg-type]
    return NodeCase(rank, f"node {rank} ({'ab'[rank]})", 1, False, diagnosis, failed=failed, **more)  # type: ignore[arg-type]


def test_the_earliest_of_two_that_speak_of_themselves() -> None:
    chosen, why = first([case(0, "disk_full", 100.0, unsure_s=0.1), case(1, "cuda_oom", 90.0, unsure_s=0.1)])
    assert chosen.rank == 1
    assert "node 0 (a) failed 10.0 s later: disk_full" in why
    assert why[-1] == "clocks: node 0 (a) as ours, node 1 (b) as ours, compared to within 0.1 s"


def test_what_follows_from_elsewhere_is_never_the_cause_though_it_came_first() -> None:
    chosen, why = first([case(0, "nccl_timeout", 80.0, cascade=True), case(1, "disk_full", 90.0)])
    assert chosen.rank == 1
    assert why[0] == "node 0 (a) failed 10.0 s earlier: nccl_timeout, which follows a failure elsewhere"
    chosen, why = first([case(0, "nccl_timeout", 80.0, cascade=True), case(1, "root_cause_not_shown", 90.0)])
    assert chosen.rank == 1


def test_an_earlier_cause_that_is_not_shown_stands_behind_one_that_is() -> None:
    chosen, why = first([case(0, "root_cause_not_shown", 80.0), case(1, "disk_full", 90.0)])
    assert chosen.rank == 1
    assert "its cause is not shown there" in why[0]


def test_nearer_than_the_clocks_are_known_the_surer_one() -> None:
    both = [
        case(0, "a_kind", 100.0, confidence=0.6, unsure_s=1.0),
        case(1, "b_kind", 101.5, confidence=0.9, unsure_s=1.0),
    ]
    chosen, why = first(both)
    assert chosen.rank == 1
    assert why[0] == "node 0 (a) failed at the same time, as far as the clocks tell: a_kind"


def test_clocks_that_differ_are_said_and_a_healthy_node_is_no_cause() -> None:
    both = [
        case(0, "healthy", None, clock_s=-42.0, unsure_s=0.2),
        case(1, "disk_full", 90.0, clock_s=0.1, unsure_s=0.2),
    ]
    chosen, why = first(both)
    assert chosen.rank == 1
    assert why == (
        "node 0 (a) has no fault of its own",
        "clocks: node 0 (a) 42.0 s behind, node 1 (b) as ours, compared to within 0.2 s",
    )
    chosen, why = first([case(0, "healthy", None), case(1, "healthy", None)])
    assert (chosen.rank, why) == (0, ())


def test_a_time_that_is_not_known_loses_against_one_that_is() -> None:
    chosen, why = first([case(0, "disk_full", None), case(1, "cuda_oom", 90.0)])
    assert chosen.rank == 1
    assert "when is not known" in why[0]
