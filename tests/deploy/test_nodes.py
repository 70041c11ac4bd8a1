"""One job on two machines (two roots here), real processes: deployed, watched, stopped and rolled back as one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from schemas import valid

from dflash_ops.errors import HostUnreachable
from dflash_ops.hosts.base import Completed
from dflash_ops.hosts.factory import Hosts
from dflash_ops.hosts.local import LocalHost

if TYPE_CHECKING:
    from conftest import Pair


def both_step(status: dict[str, Any]) -> bool:
    return all(n["state"] == "stepping" and n["progress"]["step"] for n in status["nodes"])


def test_the_life_of_a_job_on_two_nodes(pair: Pair) -> None:
    planned = pair.ops("deploy", "--plan", "--json")
    assert planned.code == 0, planned.err
    valid("nodes", planned.json)
    for label in ("[node 0 (a)] start: would start", "[node 1 (b)] start: would start"):
        assert label in planned.err
    assert not any(root.exists() for root in pair.roots)
    assert [n["result"]["execs"] for n in planned.json["nodes"]] == [2, 2]

    first = pair.ops("deploy", "--json")
    assert first.code == 0, first.err
    valid("nodes", first.json)
    assert [(n["node"], n["host"], n["exit"]) for n in first.json["nodes"]] == [(0, "a", 0), (1, "b", 0)]
    for node in first.json["nodes"]:
        valid("deploy", node["result"])
    assert len({n["result"]["release"] for n in first.json["nodes"]}) == 1
    for label in ("[node 0 (a)] start: attempt 1 runs", "[node 1 (b)] start: attempt 1 runs"):
        assert label in first.err
    # what the trainer on each node is told of its place
    for rank, root in enumerate(pair.roots):
        job = json.loads((root / "run/attempts/1/job.json").read_text())
        assert (job["nnodes"], job["node_rank"], job["rendezvous"]) == (2, rank, pair.job["rendezvous"])
        assert job["env"]["DFLASH_NODE_RANK"] == str(rank)
        assert job["session"] == f"dflash-big-{rank}"

    status = pair.until(both_step)
    valid("status", pair.ops("status", "--json").json)
    assert (status["state"], status["host"]) == ("stepping", "a, b")
    screen = pair.ops("status").out
    assert "--node" in screen
    for word in ("big", "node", "a", "b", "stepping"):
        assert word in screen
    assert "dflash-big-1" in pair.ops("status", "--node", "1").out
    assert pair.ops("status", "--node", "2").code == 2

    lines = pair.ops("logs", "-n", "2").out.splitlines()
    told = [line[:9] for line in lines]  # a trainer at work may add one while it is read
    assert told == sorted(told)
    assert 2 <= told.count("node 0 | ") <= 3
    assert 2 <= told.count("node 1 | ") <= 3
    assert pair.ops("logs", "-n", "1", "--node", "1").out.startswith("it ")
    assert pair.ops("attach", "--print", "--node", "1").out.endswith("=dflash-big-1\n")

    busy = pair.ops("deploy", "--json")
    assert busy.code == 4
    valid("nodes", busy.json)
    assert "node 1 (b): job big runs" in busy.err

    # checkpoints are moved on all nodes or on none: never while one of them runs
    for root in pair.roots:
        (root / "checkpoints/step-00000007").mkdir(parents=True)
        (root / "checkpoints/step-00000007/weights").write_text("precious")
    moved = pair.checkpoints("aside")
    assert moved.code == 4
    assert "node 0 (a) of job big runs" in moved.err

    stopped = pair.ops("stop", "--json", "--reason", "enough")
    assert stopped.code == 0, stopped.err
    valid("nodes", stopped.json)
    for node in stopped.json["nodes"]:
        valid("stop", node["result"])
    for rank in (0, 1):
        assert pair.attempt(rank, 1, "exit")["rc"] == 3
        assert pair.attempt(rank, 1, "stop")["reason"] == "enough"
    assert pair.status["state"] == "stopped"

    moved = pair.checkpoints("aside", "--json")
    assert moved.code == 0, moved.err
    valid("nodes", moved.json)
    assert not any((root / "checkpoints/step-00000007").exists() for root in pair.roots)
    assert "node 1 (b)" in pair.checkpoints("list").out
    assert pair.checkpoints("restore", "--node", "1").code == 0
    held = [(root / "checkpoints/step-00000007/weights").exists() for root in pair.roots]
    assert held == [False, True]


def test_a_fault_of_one_node_refuses_all_and_a_death_of_one_speaks_for_the_job(pair: Pair) -> None:
    assert pair.ops("deploy").code == 0
    pair.until(both_step)
    launchers = [pair.attempt(rank, 1, "start")["launcher"] for rank in (0, 1)]
    saved = pair.roots[1] / "checkpoints/step-00000007"
    saved.mkdir(parents=True)
    refused = pair.ops("deploy", "--replace", "--json")
    assert refused.code == 3
    valid("nodes", refused.json)
    assert [n["exit"] for n in refused.json["nodes"]] == [0, 3]
    assert "node 1 (b): checkpoints: " in refused.err
    assert [pair.attempt(rank, 1, "start")["launcher"] for rank in (0, 1)] == launchers
    assert all(n["attempt"] == 1 and n["state"] == "stepping" for n in pair.nodes)
    planned = pair.ops("deploy", "--plan", "--replace")
    assert planned.code == 3
    assert "[node 0 (a)] start: would start a new attempt" in planned.err
    assert "[node 1 (b)] start: would be refused" in planned.err

    # a gate that fails on one node only
    gate = ["sh", "-c", f'case "$HERE" in {pair.roots[1]}) echo no; exit 1;; esac']
    pair.write(gate=gate)
    gated = pair.ops("deploy", "--replace", "--resume", "--gate")
    assert gated.code == 3
    assert "node 1 (b): the new release failed its smoke gate" in gated.err
    assert all(n["attempt"] == 1 and n["state"] == "stepping" for n in pair.nodes)

    # a node that is gone
    os.kill(pair.attempt(1, 1, "start")["launcher"]["pid"], signal.SIGKILL)
    status = pair.until(lambda s: s["state"] == "crashed")
    assert [n["state"] for n in status["nodes"]] == ["stepping", "crashed"]
    assert "node 1 (b)" in status["detail"]
    screen = pair.ops("status").out
    assert "crashed" in screen and "SIGKILL" in screen and "stepping" in screen, screen
    # the cause is looked for on all nodes
    named = pair.ops("triage", "--job", "big", "--json")
    assert named.code == 0, named.err
    valid("triage", named.json)
    assert named.json["node"] == 1
    assert [n["class"] for n in named.json["nodes"]] == ["healthy", named.json["class"]]
    assert "node 0 (a) still runs" in named.json["why"]
    told = pair.ops("triage", "--job", "big").out
    assert told.startswith("big, node 1 (b), attempt 1: ")
    assert "clocks: node 0 (a)" in told
    assert pair.ops("triage", "--job", "big", "--node", "0").out.startswith("big, node 0 (a), attempt 1, still running")
    # a node that is gone is not hidden by those that work, and those are stopped all the same
    again = pair.ops("stop", "--json")
    assert again.code == 0
    assert [n["result"]["already"] for n in again.json["nodes"]] == [False, True]


def test_a_node_that_crashes_takes_all_back_to_what_ran_before(pair: Pair) -> None:
    source = Path(pair.job["source"])
    assert pair.ops("deploy").code == 0
    pair.until(both_step)
    before = pair.nodes[0]["release"]
    # the new release dies on node 1 only; node 0 would go on
    script = (source / "train.py").read_text()
    dies = 'stop = []\nif os.environ["DFLASH_NODE_RANK"] == "1": raise RuntimeError("bad luck")'
    (source / "train.py").write_text(script.replace("stop = []", dies))
    failed = pair.ops("deploy", "--replace", "--resume", "--json")
    assert failed.code == 1, failed.err
    valid("nodes", failed.json)
    assert failed.json["rolled_back"] is True
    assert "RuntimeError: bad luck" in failed.err
    assert "ROLLED BACK: all 2 nodes run release" in failed.err
    status = pair.until(lambda s: both_step(s) and all(n["attempt"] == 3 for n in s["nodes"]))
    assert {n["release"] for n in status["nodes"]} == {before}

    # without a way back the others are stopped: no part of a job holds its machine and waits
    left = pair.ops("deploy", "--replace", "--resume", "--no-rollback", "--json")
    assert left.code == 1
    assert left.json["rolled_back"] is False
    assert "ALL NODES OR NONE: node 0 (a) was stopped, node 1 (b) does not run" in left.err
    assert pair.attempt(0, 4, "exit")["rc"] == 3
    assert pair.status["state"] == "crashed"


def test_a_node_that_cannot_start_takes_all_back(pair: Pair) -> None:
    """On node 1 the new release vanishes between its check and the start, when node 0 has been stopped already."""
    assert pair.ops("deploy").code == 0
    pair.until(both_step)
    before = pair.nodes[0]["release"]
    (Path(pair.job["source"]) / "more.py").write_text("x = 1\n")
    gone = f'case "$HERE" in {pair.roots[1]}) mv "{{release}}" "{{root}}/gone";; esac'
    pair.write(gate=["sh", "-c", gone])
    failed = pair.ops("deploy", "--replace", "--resume", "--gate", "--json")
    assert failed.code != 0
    valid("nodes", failed.json)
    assert "error: " in failed.err
    assert failed.json["rolled_back"] is True
    assert "ROLLED BACK: all 2 nodes run release" in failed.err
    status = pair.until(both_step)
    assert {n["release"] for n in status["nodes"]} == {before}
    assert [n["attempt"] for n in status["nodes"]] == [3, 2]


def test_rollback_releases_and_watch_of_all_nodes(pair: Pair) -> None:
    assert pair.ops("deploy").code == 0
    first = pair.nodes[0]["release"]
    source = Path(pair.job["source"])
    (source / "more.py").write_text("x = 1\n")
    assert pair.ops("deploy", "--replace", "--resume").code == 0
    listed = pair.ops("releases", "--json")
    assert listed.code == 0
    valid("nodes", listed.json)
    for node in listed.json["nodes"]:
        valid("releases", node["result"])
        assert node["result"]["previous"] == first
    assert "node 1 on b" in pair.ops("releases").out
    planned = pair.ops("rollback", "--plan")
    assert planned.code == 0
    assert f"[node 1 (b)] start: would start release {first}" in planned.err
    back = pair.ops("rollback", "--json")
    assert back.code == 0, back.err
    valid("nodes", back.json)
    for node in back.json["nodes"]:
        valid("rollback", node["result"])
    assert {n["release"] for n in pair.nodes} == {first}
    assert {n["attempt"] for n in pair.nodes} == {3}

    # watched until the last of them has ended
    watching = pair.spawn("status", "--watch", "--json")
    following = pair.spawn("logs", "--follow", "-n", "1")
    assert watching.stdout is not None
    assert following.stdout is not None
    first = json.loads(watching.stdout.readline())
    valid("status", first)
    assert len(first["jobs"][0]["nodes"]) == 2
    (pair.roots[0] / "finish").touch()
    pair.until(lambda s: [n["state"] for n in s["nodes"]] == ["finished", "stepping"])
    assert pair.status["state"] == "stepping"
    (pair.roots[1] / "finish").touch()
    out, err = watching.communicate(timeout=60)
    assert watching.returncode == 0, err
    last = json.loads(out.splitlines()[-1])["jobs"][0]
    assert (last["state"], [n["state"] for n in last["nodes"]]) == ("finished", ["finished", "finished"])
    tail, _ = following.communicate(timeout=60)
    assert following.returncode == 0
    assert {line[:9] for line in tail.splitlines()} == {"node 0 | ", "node 1 | "}
    assert "node 1 | all done" in tail


class Cuttable(LocalHost):
    """This machine, whose way is cut while a file is there."""

    def __init__(self, name: str, cut: Path) -> None:
        super().__init__(name)
        self._cut = cut

    def _way(self) -> None:
        if self._cut.exists():
            raise HostUnreachable("no route to it", f"host {self.name}", "look at the network")

    def run(self, argv: Sequence[str], **options: Any) -> Completed:
        self._way()
        return super().run(argv, **options)

    def stream(self, argv: Sequence[str], **options: Any) -> Iterator[bytes]:
        self._way()
        for line in super().stream(argv, **options):
            self._way()
            yield line


def test_a_node_that_cannot_be_reached(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = pair.folder / "cut"
    real = Hosts._make
    monkeypatch.setattr(Hosts, "_make", lambda self, name: Cuttable(name, cut) if name == "b" else real(self, name))
    cut.touch()
    refused = pair.ops("deploy", "--json")
    assert refused.code == 5
    assert [n["exit"] for n in refused.json["nodes"]] == [0, 5]
    assert not (pair.roots[0] / "run/attempts").exists()  # node 0 was ready, and was not started alone
    cut.unlink()
    assert pair.ops("deploy").code == 0
    pair.until(both_step)

    cut.touch()
    status = pair.ops("status", "--json")
    assert status.code == 5
    valid("status", status.json)
    assert status.json["jobs"][0]["state"] == "unreachable"
    assert [n["state"] for n in status.json["jobs"][0]["nodes"]] == ["stepping", "unreachable"]
    named = pair.ops("triage", "--job", "big", "--json")
    assert named.code == 5
    valid("triage", named.json)
    assert [bool(n["error"]) for n in named.json["nodes"]] == [False, True]
    lines = pair.ops("logs", "-n", "1")
    assert lines.code == 5
    assert lines.out.startswith("node 0 | it ")
    assert "node 1 (b): no route to it" in lines.err

    # the way is cut once everything was checked, and node 0 is asked to stop: it is not started again by itself
    cut.unlink()
    pair.write(gate=["sh", "-c", f'case "$HERE" in {pair.roots[1]}) touch {cut};; esac'])
    failed = pair.ops("deploy", "--replace", "--resume", "--json")
    assert failed.code == 5, failed.err
    valid("nodes", failed.json)
    assert failed.json["rolled_back"] is False
    assert "ALL NODES OR NONE: node 0 (a) does not run, node 1 (b) cannot be reached" in failed.err
    stopped = pair.ops("stop", "--json")
    assert stopped.code == 5
    assert [n["exit"] for n in stopped.json["nodes"]] == [0, 5]
    cut.unlink()
    assert [n["state"] for n in pair.nodes] == ["stopped", "stepping"]  # what was told is what is true
