"""Several jobs at once: a bad host never hides the others, and the exit code is the largest one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from schemas import valid

from dflash_ops.cli import several
from dflash_ops.deploy.toml import dump_toml
from dflash_ops.inventory import load

if TYPE_CHECKING:
    from conftest import Toy


@pytest.fixture
def three(toy: Toy) -> Toy:
    """Jobs `toy` and `two` on a good host, `bad` on one without a Python; each with its own root."""
    jobs = {
        "toy": toy.job,
        "two": {**toy.job, "root": str(toy.folder / "two"), "session": "two"},
        "bad": {**toy.job, "host": "broken", "root": str(toy.folder / "bad"), "session": "bad"},
    }
    hosts = {"here": {"kind": "local", "python": os.path.realpath(sys.executable)},
             "broken": {"kind": "local", "python": "/no/such/python"}}  # fmt: skip
    toy.inventory.write_text(dump_toml({"schema": 1, "hosts": hosts, "jobs": jobs}), "utf-8")
    return toy


def exits(said: dict[str, Any]) -> dict[str, int]:
    return {j["job"]: j["exit"] for j in said["jobs"]}


def test_all_of_them(three: Toy) -> None:
    deployed = three.ops("deploy", "--all", "--json")
    assert deployed.code == 1
    said = deployed.json
    valid("several", said)
    assert exits(said) == {"toy": 0, "two": 0, "bad": 1}
    for job in said["jobs"][:2]:
        valid("deploy", job["result"])
    assert "/no/such/python" in said["jobs"][2]["error"]["what"]
    for label in ("[toy] start: attempt 1 runs", "[two] start: attempt 1 runs", "[bad] error: "):
        assert label in deployed.err
    assert deployed.err.splitlines()[-1].startswith("bad  broken  exit code 1")

    # two jobs that run are not deployed again: busy is worse than what the third one says
    again = three.ops("deploy", "toy", "bad", "two", "toy", "--json")
    assert again.code == 4
    assert list(exits(again.json).items()) == [("toy", 4), ("bad", 1), ("two", 4)]

    status = three.ops("status", "--json")
    assert [j["state"] for j in status.json["jobs"][:2]] == ["stepping", "stepping"]
    assert status.json["jobs"][2]["state"] == "unknown"
    valid("status", status.json)
    listed = three.ops("releases", "--all", "--json")
    assert exits(listed.json) == {"toy": 0, "two": 0, "bad": 1}
    valid("several", listed.json)
    doctor = three.ops("doctor", "toy", "bad", "--json")
    assert doctor.code == 3
    valid("several", doctor.json)
    assert exits(doctor.json)["bad"] == 3

    stopped = three.ops("stop", "two", "toy")
    assert stopped.code == 0, stopped.err
    assert "[two] stop: two: attempt 1 stopped" in stopped.err
    assert json.loads((three.folder / "two/run/attempts/1/exit.json").read_text())["rc"] == 3


def test_names_that_cannot_be_meant(three: Toy) -> None:
    assert three.ops("stop", "--all", "toy").code == 2
    assert three.ops("stop", "toy", "nobody").code == 2
    assert three.ops("stop").code == 2  # several, and none was named


def test_hosts_side_by_side_and_jobs_of_one_host_in_turn(tmp_path: Path) -> None:
    import threading

    hosts = {f"h{n}": {"kind": "local"} for n in range(12)}
    jobs = {
        f"j{n}{k}": {"host": f"h{n}", "root": str(tmp_path / f"{n}{k}"), "session": f"s{n}{k}", "command": ["true"]}
        for n in range(12)
        for k in "ab"
    }
    path = tmp_path / "inventory.toml"
    path.write_text(dump_toml({"hosts": hosts, "jobs": jobs}))
    loaded = load(path)
    at_once, most, inside, lock = 0, 0, set(), threading.Lock()
    full = threading.Event()

    def work(job: Any, host: Any, python: str) -> str:
        nonlocal at_once, most
        with lock:
            assert job.host not in inside, "two jobs of one host at one time"
            inside.add(job.host)
            at_once += 1
            most = max(most, at_once)
            if at_once == several.SIDE_BY_SIDE:
                full.set()
        assert full.wait(10)
        with lock:
            at_once -= 1
            inside.remove(job.host)
        if job.name == "j3a":
            raise RuntimeError("a fault of ours")
        return str(job.name)

    outcomes = several.each(loaded, list(loaded.jobs.values()), work)
    assert most == several.SIDE_BY_SIDE
    assert [o.result for o in outcomes if o.error is None] == [j for j in jobs if j != "j3a"]
    assert several.worst(outcomes) == 1
    assert "a fault of ours" in str(next(o.error for o in outcomes if o.error))
