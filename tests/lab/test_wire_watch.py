"""The stream of `status --watch` through ssh and pct, and what befalls the wire under it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflash_ops.cli.adopted import client_of
from dflash_ops.fleet.follow import Look, Watch
from dflash_ops.hosts.factory import Hosts
from dflash_ops.inventory import load
from lab import Lab
from lab.wire_job import Job, job_in

pytestmark = pytest.mark.slow


@pytest.fixture
def job(lab: Lab, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Job]:
    with job_in(lab, tmp_path, capfd) as made:
        yield made


def until(watch: Watch[str], true: Callable[[Look], bool], seconds: float = 30.0) -> Look:
    end = time.monotonic() + seconds
    while not true(look := watch.looks()["wire"]):
        assert time.monotonic() < end, look
        watch.wait(0.1)
    return look


def fresh(look: Look) -> bool:
    return look.link == "live" and look.seen is not None and look.seen.snapshot.progress is not None


def streams(lab: Lab) -> list[int]:
    """Processes of the resident's `follow` in the container."""
    found = lab.faults.processes("pve1")
    return [pid for pid, words in found.items() if b"\0follow\0" in words and b"python" in words.split(b"\0")[0]]


def only(lab: Lab, count: int) -> None:
    end = time.monotonic() + 30
    while len(streams(lab)) != count:
        assert time.monotonic() < end, streams(lab)
        time.sleep(0.1)


def test_a_link_that_goes_is_said_and_the_stream_comes_back(job: Job, lab: Lab) -> None:
    deployed = job.ops("deploy", "--json")
    assert deployed.code == 0, deployed.err
    inventory = load(job.inventory)
    one = inventory.job("wire")
    with Hosts(inventory) as hosts:
        client = client_of(hosts[one.host], one, inventory.host_of(one).python)
        with Watch({"wire": client}) as watch:
            before = until(watch, fresh)
            assert before.seen is not None
            with lab.faults.drop("pve1"):
                cut = time.monotonic()
                lost = until(watch, lambda look: look.link == "lost")
                assert time.monotonic() - cut < 15
                assert lost.error
                assert lost.seen is not None
                assert lost.age_s is not None
                assert lost.age_s > 8, "what is still shown is told to be old"
                assert lost.seen.snapshot.attempt == 1
            back = until(watch, lambda look: fresh(look) and look.tries == 0)
            assert back.seen is not None
            assert back.seen.snapshot.t > lost.seen.snapshot.t
            only(lab, 1)  # of the stream that was cut nothing is left there

            lab.faults.cut_connections("pve1")
            again = until(watch, lambda look: look.link != "live")
            assert again.seen is not None
            newest = again.seen.snapshot.t
            until(watch, lambda look: fresh(look) and look.seen is not None and look.seen.snapshot.t > newest + 1)
            only(lab, 1)
            begun = time.monotonic()
        assert time.monotonic() - begun < 6, "what is read from holds nobody"
    only(lab, 0)
    begun = time.monotonic()
    with lab.faults.drop("pve1"), Hosts(inventory) as hosts:
        with Watch({"wire": client_of(hosts[one.host], one, inventory.host_of(one).python)}) as watch:
            watch.wait(0.5)
            assert watch.looks()["wire"].link == "connecting"
        hosts.close()
        assert time.monotonic() - begun < 6, "a connection that is being made holds nobody"
