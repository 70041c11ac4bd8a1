"""Several nodes as one job: the worst state speaks, node 0 has the numbers, clocks that differ make no wrong ages."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

from rich.console import Console

from dflash_ops.contracts import CheckpointInfo, ErrorInfo, ExitRecord, Progress, Snapshot, State, WorkerShares
from dflash_ops.view.nodes import WORST, NodeSeen, joined, lines, nodes_json, render_nodes, worst

NOW = 1_764_000_000.0


def node(rank: int, state: State, *, ahead: float = 0.0, since: float = 60.0, **more: object) -> NodeSeen:
    now = NOW + ahead
    snapshot = Snapshot("big", now - 0.5, state, now - since, attempt=1, **more)  # type: ignore[arg-type]
    return NodeSeen(rank, "ab"[rank], f"/n{rank}", snapshot, now)


def steps(step: int, ahead: float = 0.0, rate: float = 1000.0) -> Progress:
    return Progress(t=NOW + ahead - 2.0, step=step, total=500, loss=2.0, block_tok_s=rate, ctx_tok_s=rate)


def shown(nodes: list[NodeSeen], width: int = 100) -> str:
    out = Console(file=io.StringIO(), width=width, no_color=True)
    out.print(render_nodes(nodes, width))
    return out.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_worst_state_speaks_whatever_the_order_of_the_nodes() -> None:
    page = " ".join((Path(__file__).resolve().parents[2] / "docs/deploy.md").read_text("utf-8").split())
    told = page.split("The worst state speaks for the job (", 1)[1].split(")", 1)[0]
    assert told.split(", ") == [state.value for state in WORST]
    assert set(WORST) == set(State)
    for bad, good in itertools.combinations(WORST, 2):
        for pair in ([node(0, bad), node(1, good)], [node(0, good), node(1, bad)]):
            whole = joined(pair)
            assert whole.snapshot.state is bad
            assert worst(pair).label in whole.snapshot.detail
    alike = joined([node(0, State.STEPPING, detail="step 1/9"), node(1, State.STEPPING, detail="step 1/9")])
    assert alike.snapshot.detail == "step 1/9"
    # of two that crashed the one that is crashed for longest
    assert worst([node(0, State.CRASHED, since=5.0), node(1, State.CRASHED, since=50.0, ahead=-300.0)]).rank == 1


def test_numbers_are_node_0s_and_without_it_those_of_the_one_furthest_behind() -> None:
    both = [node(0, State.STEPPING, progress=steps(120)), node(1, State.STEPPING, progress=steps(119, rate=400.0))]
    assert joined(both).snapshot.progress == steps(120)
    lost = [node(0, State.UNREACHABLE), node(1, State.STEPPING, progress=steps(119))]
    assert joined(lost).snapshot.progress is not None
    assert joined(lost).snapshot.progress.step == 119  # type: ignore[union-attr]
    assert joined([node(0, State.LOADING), node(1, State.LOADING)]).snapshot.progress is None


def test_ages_are_right_where_clocks_are_an_hour_apart() -> None:
    first = node(0, State.STEPPING, progress=steps(7), workers={"target0": WorkerShares(life=0)})
    error = ErrorInfo("drafter0", "boom", NOW + 3600.0 - 30.0)
    second = node(
        1, State.CRASHED, ahead=3600.0, since=30.0, error=error, workers={"target0": WorkerShares(life=1)},
        exit=ExitRecord(attempt=1, rc=1, signal=None, t=NOW + 3570.0, duration_s=10.0),
    )  # fmt: skip
    whole = joined([first, second])
    s, now = whole.snapshot, whole.now
    assert now - s.since == 30.0
    assert now - s.t == 0.5
    assert s.progress is not None
    assert now - s.progress.t == 2.0
    assert s.error is not None
    assert s.error.worker == "node 1 (b) drafter0"
    assert s.error.t is not None
    assert now - s.error.t == 30.0
    assert set(s.workers) == {"0/target0", "1/target0"}
    early = ErrorInfo("target3", "first", NOW - 40.0)
    cause = joined([node(0, State.CRASHED, error=early), second]).snapshot.error
    assert cause is not None
    assert cause.worker == "node 0 (a) target3"  # 40 s ago there, 30 s ago here


def test_the_screen_the_line_and_the_json_have_each_node() -> None:
    nodes = [
        node(0, State.STEPPING, progress=steps(7), checkpoint=CheckpointInfo(5, "/n0/checkpoints/step-5", NOW - 9)),
        node(1, State.CRASHED, exit=ExitRecord(attempt=1, rc=None, signal="SIGKILL", t=NOW - 60, duration_s=10.0)),
    ]
    screen = shown(nodes)
    for part in ("big", "✖ crashed", "node 1 (b)", "7/500", "SIGKILL", "status big --node 1"):
        assert part in screen, screen
    rows = [row for row in screen.splitlines() if row[:2] in ("0 ", "1 ")]
    assert ["stepping" in rows[0], "crashed" in rows[1]] == [True, True]
    assert all(len(row) <= 80 for row in shown(nodes, 80).splitlines())
    assert "node 0 stepping" in lines(nodes)
    entry = nodes_json(nodes)
    assert (entry["state"], entry["host"], [n["node"] for n in entry["nodes"]]) == ("crashed", "a, b", [0, 1])
