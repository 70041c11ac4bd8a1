"""What a deploy on several machines decides between the steps: versions that differ, who failed first, what is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from schemas import valid

from dflash_ops.client import Seen
from dflash_ops.contracts import ErrorInfo, ExitRecord, Snapshot, State
from dflash_ops.deploy.back import Rollback
from dflash_ops.deploy.decide import Options
from dflash_ops.deploy.nodes import NodesDeployment
from dflash_ops.deploy.nodes_back import NodesRollback
from dflash_ops.deploy.run import Deployment
from dflash_ops.deploy.spec import job_argv, job_env, job_spec
from dflash_ops.errors import HostUnreachable, PreflightError, StartError
from dflash_ops.hosts.fake import FakeHost
from dflash_ops.inventory import Job, load
from dflash_ops.nodes import NodesFailed
from dflash_ops.resident.preflight import Check
from dflash_ops.view.stages import Silent


class Told(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def job_of(tmp_path: Path, text: str) -> Job:
    path = tmp_path / "inventory.toml"
    path.write_text('[hosts.a]\nkind = "local"\n[hosts.b]\nkind = "local"\n[jobs.big]\n' + text, "utf-8")
    return load(path).job()


NODES = '\n[[jobs.big.nodes]]\nhost = "a"\nroot = "n0"\n[[jobs.big.nodes]]\nhost = "b"\nroot = "n1"\n'
TRAINER = "[jobs.big.trainer]\ntarget_devices = ['cpu']\ndrafter_devices = ['cpu']\n" + NODES
COMMAND = (
    'command = ["torchrun", "--nnodes", "{nnodes}", "--node-rank={node_rank}", "{rendezvous}", "{root}"]\n'
    'env = { MASTER = "{rendezvous}" }\n' + NODES
)


@pytest.fixture
def whole(tmp_path: Path) -> tuple[NodesDeployment, list[Deployment], Told]:
    job, told, options = job_of(tmp_path, TRAINER), Told(), Options()
    parts = [
        Deployment(FakeHost(n.host), n, options, Silent(), python="python3", environ=os.environ) for n in job.nodes
    ]
    return NodesDeployment(job, parts, options, told), parts, told


def imports(part: Deployment, what: str) -> None:
    part.result.checks = (Check("imports", "ok", what),)


def test_another_torch_refuses_and_another_numpy_is_said(whole: tuple[NodesDeployment, list[Deployment], Told]) -> None:
    deployment, (first, second), told = whole
    imports(first, "torch 2.13.0+cpu, numpy 2.0.1")
    imports(second, "torch 2.13.0+cu130, numpy 2.1.0")
    deployment._alike()
    assert "do not have the same versions" in told.notes[0]
    imports(second, "torch 2.12.1+cpu, numpy 2.0.1")
    with pytest.raises(NodesFailed, match="different versions of torch") as caught:
        deployment._alike()
    assert caught.value.exit_code == 3
    valid("nodes", caught.value.result)
    assert caught.value.result["exit"] == 3


def crashed(t: float, error: float | None = None) -> Seen:
    info = ErrorInfo("target0", "boom", error) if error is not None else None
    ended = ExitRecord(attempt=2, rc=1, signal=None, t=t, duration_s=1.0)
    return Seen(Snapshot("big", t, State.CRASHED, t, exit=ended, error=info), t)


def test_who_failed_first_is_told_by_clocks_made_equal(whole: tuple[NodesDeployment, list[Deployment], Told]) -> None:
    deployment, (first, second), _ = whole
    first.seen, first.offset = crashed(1000.0), 0.0
    second.seen, second.offset = crashed(1090.0), 100.0  # its clock is ahead: it failed at 990
    assert deployment._when(1) < deployment._when(0)
    first.seen = crashed(1000.0, error=980.0)  # its worker failed long before its launcher ended
    assert deployment._when(0) < deployment._when(1)
    second.seen = None
    assert deployment._when(1) == float("inf")


def test_faults_of_all_nodes_are_told_with_their_names_and_the_largest_code(
    whole: tuple[NodesDeployment, list[Deployment], Told],
) -> None:
    deployment, parts, _ = whole
    several = StartError("two things")
    several.errors = (PreflightError("disk: full", "a"), PreflightError("shm: small", "a"))  # type: ignore[attr-defined]
    deployment._errors = {1: HostUnreachable("no route", "b"), 0: several}
    failed = deployment._failed()
    assert [e.what for e in failed.errors] == [
        "node 0 (a): disk: full",
        "node 0 (a): shm: small",
        "node 1 (b): no route",
    ]
    assert failed.exit_code == 5
    assert [n["exit"] for n in failed.result["nodes"]] == [1, 5]
    assert "not touched" in deployment.interrupted()
    parts[1].touched = "stopped"
    assert "node 1 (b) was being stopped" in deployment.interrupted()


def test_a_refusal_says_how_many_commands_ran_on_each_node(
    whole: tuple[NodesDeployment, list[Deployment], Told],
) -> None:
    deployment, (first, second), _ = whole
    for part, commands in ((first, 2), (second, 1)):
        part.host._host.answer("true")  # type: ignore[attr-defined]
        for _ in range(commands):
            part.host.run(["true"], deadline=5)
    deployment._errors = {1: HostUnreachable("no route", "b")}
    said = deployment._failed().result
    valid("nodes", said)
    assert [n["result"]["execs"] for n in said["nodes"]] == [2, 1]


def test_releases_that_differ_are_told_beside_a_nodes_own_error(tmp_path: Path) -> None:
    third = '[[jobs.big.nodes]]\nhost = "b"\nroot = "n2"\nsession = "third"\n'
    job, options = job_of(tmp_path, TRAINER + third), Options(plan=True)
    parts = [
        Rollback(FakeHost(n.host), n, None, options, Silent(), python="python3", environ=os.environ) for n in job.nodes
    ]
    back = NodesRollback(job, parts, options, Silent())
    parts[1].result.release, parts[2].result.release = "a" * 12, "b" * 12
    back._errors = {0: HostUnreachable("no route", "a")}
    with pytest.raises(NodesFailed, match=r"node 0 \(a\): no route\nthe nodes would go back to different") as caught:
        back._one_release()
    said = caught.value.result
    valid("nodes", said)
    assert (caught.value.exit_code, said["exit"]) == (5, 5)
    assert [n["error"] and n["error"]["type"] for n in said["nodes"]] == ["HostUnreachable", None, None]
    back._errors = {}
    parts[0].result.release = "a" * 12
    with pytest.raises(NodesFailed) as caught:
        back._one_release()
    assert (caught.value.exit_code, caught.value.result["exit"]) == (2, 2)


def test_a_grace_of_no_seconds_is_not_the_jobs(tmp_path: Path) -> None:
    job, told = job_of(tmp_path, TRAINER).nodes[0], Told()
    assert Options().grace(job) == job.grace_s == 60.0
    at_once = Rollback(FakeHost(), job, None, Options(grace_s=0.0), told, python="python3", environ=os.environ)
    at_once.said = {"running": 3, "attempt": 2, "release": None}
    at_once.say_plan()
    assert "stop: would stop attempt 3 (TERM, KILL after 0 s)" in told.notes
    assert at_once._request()["grace_s"] == 0.0


def test_what_the_trainer_on_each_node_is_told(tmp_path: Path) -> None:
    job = job_of(tmp_path, 'rendezvous = "192.0.2.11:5000"\n' + TRAINER)
    argv = [job_argv(n, "run.toml") for n in job.nodes]
    assert argv[0][-6:] == ("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "192.0.2.11:5000")
    assert argv[1][-6:] == ("--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "192.0.2.11:5000")
    foreign = job_of(tmp_path, 'rendezvous = "192.0.2.11:5000"\n' + COMMAND).nodes[1]
    # {root} is the resident's to fill in
    assert job_argv(foreign, "") == ("torchrun", "--nnodes", "2", "--node-rank=1", "192.0.2.11:5000", "{root}")
    env = job_env(foreign, None, {})
    assert env == {
        "MASTER": "192.0.2.11:5000",
        "DFLASH_NNODES": "2",
        "DFLASH_NODE_RANK": "1",
        "DFLASH_RDZV_ENDPOINT": "192.0.2.11:5000",
    }
    spec = job_spec(foreign, None, None, "", {}, reason="", actor="")
    assert (spec.nnodes, spec.node_rank, spec.rendezvous) == (2, 1, "192.0.2.11:5000")


def test_a_job_on_one_machine_is_told_nothing(tmp_path: Path) -> None:
    alone = job_of(tmp_path, 'host = "a"\nroot = "r"\ncommand = ["run", "{nnodes}"]\nenv = { X = "{rendezvous}" }\n')
    assert job_argv(alone, "") == ("run", "{nnodes}")
    assert job_env(alone, None, {}) == {"X": "{rendezvous}"}
    spec = job_spec(alone, None, None, "", {}, reason="", actor="")
    assert (spec.nnodes, spec.node_rank, spec.rendezvous) == (1, 0, "")
