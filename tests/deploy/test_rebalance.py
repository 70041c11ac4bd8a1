"""`dflash-ops rebalance` on this machine, real tmux and real processes: told, applied, kept, taken back, cut off."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from schemas import valid
from split_trainer import write_source

if TYPE_CHECKING:
    from conftest import Toy

PYTHON = os.path.realpath(sys.executable)
pytestmark = pytest.mark.timeout(400)

TABLES = {
    "target": {"path": "target"},
    "drafter": {"mask_token_id": 3},
    "data": {"path": "data.jsonl"},
    "train": {"epochs": 4, "average_every": 4, "log_every": 1},
}


@pytest.fixture
def job(toy: Toy) -> Toy:
    """A job of 2 CPU devices, 1 target and 1 drafter, under a stand-in of the bundled trainer."""
    drop = dict.fromkeys(("command", "progress", "source"))
    source = write_source(toy.folder / "split-src")
    trainer = {"target_devices": ["cpu"], "drafter_devices": ["cpu"], **TABLES}
    toy.write(**drop | {"source": str(source), "trainer": trainer, "interpreter": PYTHON, "watch_s": 60, "gate_s": 30})
    return toy


def running(job: Toy, steps: int = 16) -> None:
    """Deployed, and so many steps on its way."""
    assert job.ops("deploy").code == 0
    job.until(lambda s: (s["progress"] or {}).get("step", 0) >= steps, 60)


def rebalance(job: Toy, targets: int, drafters: int, *more: str) -> Any:
    words = ("--targets", str(targets), "--drafters", str(drafters), "--devices", "cpu,cpu,cpu", "--json")
    return job.ops("rebalance", *words, *more)


def odd(job: Toy, splits: dict[str, float | str]) -> None:
    """Splits that do not do what is predicted: a factor, an error's text, `nan` or `hang`."""
    (job.root / "odd.json").write_text(json.dumps(splits))


def told(job: Toy, event: str) -> list[dict[str, Any]]:
    return [e["data"] for e in job.journal if e["event"] == event]


def ends(job: Toy) -> list[dict[str, Any]]:
    """What each attempt that saved had done when it did."""
    return [json.loads(line) for line in (job.root / "ends").read_text().splitlines()]


def devices(job: Toy) -> list[str]:
    return [line for line in job.inventory.read_text().splitlines() if "_devices" in line]


def test_a_split_is_applied_measured_and_kept(job: Toy) -> None:
    running(job)
    job.inventory.write_text(job.inventory.read_text().replace("_devices = ", "_devices  =  ") + "# the end\n")
    plan = job.ops("rebalance", "--plan", "--devices", "cpu,cpu,cpu", "--json")
    assert plan.code == 0, plan.err
    valid("rebalance", plan.json)
    rows = {(r["targets"], r["drafters"]): r for r in plan.json["rows"]}
    assert rows[2, 1]["best"]
    assert rows[1, 1]["current"]
    assert "0 drafters" in rows[3, 0]["refused"]
    assert (job.status["attempt"], len(told(job, "rebalancing"))) == (1, 0)
    text = job.ops("rebalance", "--plan", "--devices", "cpu,cpu,cpu").out
    assert "3+0 is refused: 0 drafters" in text
    assert plan.json["why"].split(":")[0] in text

    done = rebalance(job, 2, 1)
    assert done.code == 0, done.err
    said = done.json
    valid("rebalance", said)
    assert (said["outcome"], said["attempt"], said["inventory"]) == ("kept", 2, "written")
    assert said["gate"]["what"].startswith("4 steps with 2 targets and 1 drafters")
    assert said["measured"]["block_tok_s"] > 1.2 * said["before"]["block_tok_s"]
    assert 0.7 < said["predicted"]["block_tok_s"] / said["measured"]["block_tok_s"] < 1.4
    assert [line.split(":")[0] for line in done.err.splitlines() if "..." not in line and line[0] != " "] == [
        "look", "preflight", "gate", "connect", "stop", "start", "settle", "measure", "inventory", "kept 2+1",
    ]  # fmt: skip
    assert devices(job) == ['target_devices  =  ["cpu", "cpu"]', 'drafter_devices  =  ["cpu"]']
    assert job.inventory.read_text().endswith("# the end\n")
    begun, over = told(job, "rebalancing"), told(job, "rebalanced")
    assert (begun[0]["from"], begun[0]["to"]) == ({"targets": 1, "drafters": 1}, {"targets": 2, "drafters": 1})
    assert (over[0]["outcome"], over[0]["measured"]) == ("kept", said["measured"])
    assert job.record(2, "start")["release"] == job.record(1, "start")["release"]
    assert job.status["progress"]["step"] > ends(job)[0]["step"]  # it went on where it had saved

    same = rebalance(job, 2, 1)
    assert (same.code, same.json["outcome"], job.status["attempt"]) == (0, "same", 2)
    auto = job.ops("rebalance", "--auto", "--json")
    assert (auto.code, auto.json["outcome"]) == (0, "not_worth"), auto.err
    assert auto.json["worth"]["why"] in auto.err

    # What the supervisor starts again has the new split; so has what the next deploy starts.
    os.kill(job.record(2, "start")["launcher"]["pid"], signal.SIGKILL)
    job.until(lambda s: s["attempt"] == 3 and s["state"] == "stepping", 60)
    assert 'target_devices = ["cpu", "cpu"]' in (job.root / "run/attempts/3/run.toml").read_text()


def test_what_is_slower_or_fails_is_taken_back(job: Toy) -> None:
    running(job)
    before = job.inventory.read_bytes()
    odd(job, {"2+1": 0.3, "1+2": "no such split", "2+2": "nan"})
    slow = rebalance(job, 2, 1)
    assert slow.code == 1
    valid("rebalance", slow.json)
    assert (slow.json["outcome"], slow.json["attempt"], slow.json["back"]) == ("went_back", 2, 3)
    for word in ("2+1 is slower than 1+1", "predicted", "WENT BACK", "--plan"):
        assert word in slow.err
    saved = ends(job)
    assert [e["split"] for e in saved] == ["1+1", "2+1"]
    assert saved[1]["batches"] > saved[0]["batches"]
    job.until(lambda s: s["attempt"] == 3 and s["progress"]["step"] > saved[1]["step"], 60)  # nothing is trained twice

    crashed = rebalance(job, 1, 2)
    assert crashed.code == 1
    assert (crashed.json["outcome"], crashed.json["back"]) == ("went_back", 5)
    assert "RuntimeError: no such split" in crashed.err
    job.until(lambda s: s["attempt"] == 5 and s["state"] == "stepping", 60)

    names = {p.name for p in (job.root / "checkpoints").iterdir()}
    lost = job.ops("rebalance", "--targets", "2", "--drafters", "2", "--devices", "cpu,cpu,cpu,cpu", "--json")
    assert (lost.code, lost.json["outcome"]) == (1, "went_back")
    aside = {p.name for p in (job.root / "checkpoints.aside").glob("*/checkpoints/*")}
    assert aside  # saved with a loss that was not finite
    assert not aside & {p.name for p in (job.root / "checkpoints").iterdir()} - names
    assert job.inventory.read_bytes() == before
    assert [e["outcome"] for e in told(job, "rebalanced")] == ["went_back"] * 3
    assert 'target_devices = ["cpu"]' in (job.root / "run/job.json").read_text().replace("\\", "")

    # a gate that fails costs nothing
    (job.root / "gate_fails").touch()
    gate = rebalance(job, 2, 1)
    assert gate.code == 3
    assert "2+1 failed its smoke gate" in gate.err
    assert "was not touched" in gate.err
    assert job.status["attempt"] == 7


def test_a_command_that_went_away_is_finished_by_the_next(job: Toy) -> None:
    running(job, 80)  # so many that the intervals of two splits do not overlap
    job.root.joinpath("slow_stop").write_text("2")
    process = job.spawn("rebalance", "--auto", "--devices", "cpu,cpu,cpu")  # which goes to 2+1
    end = time.monotonic() + 60
    while not told(job, "rebalancing"):
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)  # while the job is being stopped: that goes on by itself
    assert process.wait(30) == 130
    assert process.stderr is not None
    said = process.stderr.read()
    assert "goes on by itself" in said
    assert "--targets 2 --drafters 1" in said
    job.until(lambda s: s["attempt"] == 2 and s["state"] == "stepping", 60)
    assert devices(job)[0] == 'target_devices = ["cpu"]'  # not measured, not written
    assert "never measured" in job.ops("rebalance", "--plan").err
    again = rebalance(job, 2, 1)
    assert again.code == 0, again.err
    assert (again.json["outcome"], again.json["attempt"]) == ("kept", 2)
    assert again.json["before"] == told(job, "rebalancing")[0]["before"]
    assert devices(job)[0] == 'target_devices = ["cpu", "cpu"]'

    # Killed while it settles: what ran before is known, and is gone back to
    odd(job, {"1+2": 0.3})
    process = job.spawn("rebalance", "--targets", "1", "--drafters", "2", "--settle", "9000")
    job.until(lambda s: s["attempt"] == 3 and s["state"] == "stepping", 60)
    process.kill()
    process.wait(10)
    taken = rebalance(job, 1, 2)
    assert (taken.code, taken.json["outcome"], taken.json["back"]) == (1, "went_back", 4)
    assert "as attempt 2 did" in taken.err


def test_what_is_refused_touches_nothing(job: Toy) -> None:
    def refused(code: int, *words: str, args: tuple[str, ...]) -> None:
        outcome = job.ops("rebalance", *args)
        assert outcome.code == code, outcome.err
        for word in words:
            assert word in outcome.err
        assert "Traceback" not in outcome.err

    refused(3, "never started", "dflash-ops deploy", args=("--plan",))
    running(job, 6)
    split = ("--targets", "2", "--drafters", "1")
    cases: list[tuple[int, tuple[str, ...], tuple[str, ...]]] = [
        (2, ("0 targets", "fill the ring"), ("--targets", "0", "--drafters", "1")),
        (2, ("0 drafters",), ("--targets", "2", "--drafters", "0")),
        (2, ("-1 drafters",), ("--targets", "1", "--drafters", "-1")),
        (2, ("100 devices", "has 2"), ("--targets", "99", "--drafters", "1")),
        (2, ("exclude each other",), ("--plan", "--auto")),
        (2, ("exclude each other",), ("--auto", *split)),
        (2, ("half of a split", "--drafters"), ("--targets", "2")),
        (2, ("nothing says",), ()),
        (2, ("no job 'toi'", "toy"), ("toi", "--plan")),
        (2, ("is no time",), ("--auto", "--horizon", "soon")),
        (2, ("is no device",), ("--plan", "--devices", "cpu,gpu")),
        (2, ("named twice",), ("--plan", "--devices", "0,0")),
    ]
    for code, words, args in cases:
        refused(code, *words, args=args)
    metrics = job.root / "run/attempts/1/metrics.jsonl"

    # Somebody else acts: the supervisor, or another rebalance
    lease = job.root / "run/lease"
    held = {"schema": 1, "token": 99, "owner": "supervisor of the resident", "t": time.time(),
            "expires": time.time() + 60, **me()}  # fmt: skip
    lease.write_text(json.dumps(held))
    refused(4, "supervisor of the resident", "dflash-ops status toy", args=(*split, "--devices", "cpu,cpu,cpu"))
    lease.unlink()

    assert job.ops("stop").code == 0
    refused(
        3,
        "does not run",
        "--resume --target-gpus cpu,cpu --drafter-gpus cpu",
        args=(*split, "--devices", "cpu,cpu,cpu"),
    )
    assert job.ops("rebalance", "--plan").code == 0  # of what was measured before
    whole = metrics.read_bytes()
    metrics.write_bytes(b'{"broken\n' + whole)
    assert "1 line that cannot be read" in job.ops("rebalance", "--plan").err
    metrics.write_bytes(b"no json\n[1]\n")
    refused(6, "damaged", "2 lines", args=("--plan",))
    metrics.unlink()
    refused(3, "no pace yet", args=("--plan",))
    metrics.write_bytes(whole.splitlines(keepends=True)[0])
    refused(3, "too little", args=("--plan",))
    assert told(job, "rebalancing") == []

    job.write(trainer=None, command=["python3", "x.py"])
    refused(2, "its own command", "--replace --resume", args=split)
    job.write(command=None, adopted=True, source=None, interpreter=None)
    refused(2, "adopted", args=split)


def me() -> dict[str, int]:
    return {"pid": os.getpid(), "start": int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])}
