"""A deploy that cannot work costs nothing: the gate, the watch window, the way back, releases that stay."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from schemas import valid

if TYPE_CHECKING:
    from conftest import Toy

GATE = """\
import os, sys
print("gate of", os.environ["HERE"], os.getcwd() == sys.argv[1] == os.environ["DFLASH_GATE"])
open(sys.argv[1] + "/scratch", "w").close()
open(os.environ["HERE"] + "/gated", "w").write(os.environ.get("TOKEN", ""))
sys.exit({rc})
"""


def source(toy: Toy) -> Path:
    return toy.folder / "src"


def crashing(toy: Toy, text: str = 'raise ValueError("bad release")') -> None:
    """The next release crashes after its second step."""
    train = source(toy) / "train.py"
    train.write_text(train.read_text().replace("    if stop:", f"    if step == 2: {text}\n    if stop:", 1))


def running(toy: Toy) -> dict[str, Any]:
    return toy.until(lambda s: s["state"] == "stepping")


def test_a_release_that_fails_its_gate_never_touches_the_running_job(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "planted-7c1d")
    toy.write(gate=["python3", "{release}/smoke.py", "{gate}"], secret_env=["TOKEN"])
    assert toy.ops("deploy").code == 0  # nothing runs yet: no gate
    assert not (toy.root / "gated").exists()
    launcher = toy.record(1, "start")["launcher"]

    (source(toy) / "smoke.py").write_text(GATE.format(rc=7).replace("sys.exit", "print(os.environ['TOKEN'])\nsys.exit"))
    refused = toy.ops("deploy", "--replace", "--resume")
    assert refused.code == 3
    for word in ("smoke gate", "exit code 7", "was not touched", "--no-gate", f"gate of {toy.root} True", "***"):
        assert word in refused.err
    assert "planted-7c1d" not in refused.err
    assert toy.record(1, "start")["launcher"] == launcher
    assert running(toy)["attempt"] == 1
    assert [p.name for p in toy.root.glob("run/gate/*/scratch")] == ["scratch"]
    assert (toy.root / "gated").read_text() == "planted-7c1d"  # it has the job's whole environment

    (source(toy) / "smoke.py").write_text(GATE.format(rc=0))
    passed = toy.ops("deploy", "--replace", "--resume", "--json")
    assert passed.code == 0, passed.err
    valid("deploy", passed.json)
    assert passed.json["gate"]["ok"]
    assert len(list(toy.root.glob("run/gate/*"))) == 1  # of the one that failed
    assert "own gate" in toy.journal[-1 - [e["event"] for e in toy.journal[::-1]].index("deployed")]["data"]["gate"]

    (source(toy) / "smoke.py").write_text(GATE.format(rc=1))
    assert toy.ops("deploy", "--replace", "--resume", "--no-gate").code == 0
    assert toy.status["attempt"] == 3


def test_a_gate_that_never_ends_is_ended(toy: Toy) -> None:
    toy.write(gate=["sh", "-c", "sleep 1000 & echo $! > $HERE/sleeper; wait"], gate_s=1)
    refused = toy.ops("deploy", "--gate")
    assert refused.code == 3
    assert "did not end within 1 s" in refused.err
    sleeper = int((toy.root / "sleeper").read_text())
    toy.gone(sleeper)
    toy.nothing_started()


def test_a_crash_in_the_watch_window_goes_back_to_what_ran(toy: Toy) -> None:
    first = toy.ops("deploy", "--json").json
    running(toy)
    crashing(toy)
    outcome = toy.ops("deploy", "--replace", "--resume", "--json")
    assert outcome.code == 1
    valid("deploy", outcome.json)
    for word in ("ROLLED BACK", "bad release", f"release {first['release']}", "as attempt 1 did"):
        assert word in outcome.err
    back = outcome.json["rolled_back"]
    assert (back["back_to"], back["attempt"], back["release"]) == (1, 3, first["release"])
    assert (outcome.json["attempt"], outcome.json["state"]) == (3, "stepping")
    assert (toy.root / "current").readlink().name == first["release"]
    assert running(toy)["release"] == first["release"]
    assert [e["data"]["to"] for e in toy.journal if e["event"] == "rolled_back"] == [1]
    assert toy.record(3, "start")["argv"] == toy.record(1, "start")["argv"]

    # told to leave it: it stays crashed, and the way back is one command
    left = toy.ops("deploy", "--replace", "--resume", "--no-rollback")
    assert left.code == 1
    assert "ROLLED BACK" not in left.err
    assert toy.status["state"] == "crashed"
    by_hand = toy.ops("rollback", "--json", "--reason", "not today")
    assert by_hand.code == 0, by_hand.err
    valid("rollback", by_hand.json)
    assert (by_hand.json["release"], by_hand.json["attempt"]) == (first["release"], 5)
    assert running(toy)["attempt"] == 5


def test_fresh_and_then_back_brings_the_checkpoints_back(toy: Toy) -> None:
    assert toy.ops("deploy").code == 0
    running(toy)
    saved = toy.root / "checkpoints/step-00000001"
    saved.mkdir(parents=True)
    (saved / "weights").write_text("precious")
    crashing(toy, 'os.makedirs(root + "/checkpoints/step-00000009"); raise ValueError("bad release")')
    outcome = toy.ops("deploy", "--replace", "--fresh", "--json")
    assert outcome.code == 1
    assert (saved / "weights").read_text() == "precious"
    aside = Path(outcome.json["rolled_back"]["set_aside"])
    assert [p.name for p in aside.iterdir()] == ["step-00000009"]
    assert outcome.json["rolled_back"]["restored"] == outcome.json["aside"]["to"]


def test_checkpoints_of_the_crashed_attempt_are_set_aside(toy: Toy) -> None:
    assert toy.ops("deploy").code == 0
    running(toy)
    (toy.root / "checkpoints/step-00000001").mkdir(parents=True)
    crashing(toy, 'os.makedirs(root + "/checkpoints/step-00000009"); raise ValueError("bad release")')
    outcome = toy.ops("deploy", "--replace", "--resume", "--json")
    assert outcome.code == 1
    names = {p.name for p in (toy.root / "checkpoints").iterdir()}
    assert "step-00000001" in names
    assert "step-00000009" not in names
    aside = Path(outcome.json["rolled_back"]["set_aside"])
    assert [p.name for p in aside.iterdir()] == ["step-00000009"]


def test_where_the_world_is_bad_the_way_back_ends(toy: Toy) -> None:
    """The same release and config is nothing to go back to; another one that crashes as well is not tried again."""
    train = source(toy) / "train.py"
    text = train.read_text().replace("stop = []\n", 'stop, bad = [], os.path.exists(root + "/bad")\n')
    train.write_text(text.replace("    if stop:", '    if bad and step == 2: raise OSError("bad world")\n    if stop:'))
    assert toy.ops("deploy").code == 0
    running(toy)
    (toy.root / "bad").touch()
    same = toy.ops("deploy", "--replace", "--resume")
    assert same.code == 1
    assert "nothing to go back to" in same.err
    assert toy.status["attempt"] == 2

    (toy.root / "bad").unlink()
    assert toy.ops("deploy", "--resume").code == 0
    running(toy)
    (toy.root / "bad").touch()
    other = toy.ops("deploy", "--replace", "--resume", "--set", "env.X=1")
    assert other.code == 1
    assert "attempt 5 crashed too" in other.err
    assert toy.status["attempt"] == 5
    # and what crashed before is no reason to start anything
    assert toy.ops("deploy", "--resume", "--set", "env.X=2").code == 1
    assert toy.status["attempt"] == 6


def test_releases_are_listed_and_old_ones_go(toy: Toy) -> None:
    toy.write(keep_releases=2)
    ids = []
    for number in range(4):
        (source(toy) / "extra.py").write_text(f"x = {number}\n")
        outcome = toy.ops("deploy", "--replace", "--resume", "--json")
        assert outcome.code == 0, outcome.err
        ids.append(outcome.json["release"])
    listed = toy.ops("releases", "--json")
    valid("releases", listed.json)
    assert [r["release"] for r in listed.json["releases"]] == [ids[3], ids[2]]
    assert (listed.json["current"], listed.json["running"], listed.json["previous"]) == (ids[3], ids[3], ids[2])
    assert [r["attempts"] for r in listed.json["releases"]] == [[4], [3]]
    text = toy.ops("releases").out
    assert "running, current" in text
    assert "previous" in text
    removed = [e["data"]["releases"] for e in toy.journal if e["event"] == "releases_removed"]
    assert sorted(id for ids in removed for id in ids) == sorted(ids[:2])

    # back by the first digits of an id, and by a job's name alone
    assert toy.ops("rollback", ids[2][:6], "toy").code == 0
    assert (toy.root / "current").readlink().name == ids[2]
    assert toy.ops("rollback", "toy").code == 0
    assert (toy.root / "current").readlink().name == ids[3]
    gone = toy.ops("rollback", ids[0], "toy")
    assert gone.code == 2
    assert ids[3] in gone.err
    planned = toy.ops("rollback", "--plan")
    assert planned.code == 0
    assert "would stop attempt 6" in planned.err
    assert toy.status["attempt"] == 6


def test_the_current_the_running_and_the_previous_one_always_stay(toy: Toy) -> None:
    toy.write(keep_releases=1)
    for number in range(3):
        (source(toy) / "extra.py").write_text(f"x = {number}\n")
        assert toy.ops("deploy", "--replace", "--resume").code == 0
    assert len(list(toy.root.glob("releases/[0-9a-f]*"))) == 2


def test_a_plan_says_how_many_commands_and_it_is_true(toy: Toy) -> None:
    planned = toy.ops("deploy", "--plan")
    assert "in all 4 commands on here" in planned.err  # connect (which takes what is sent), preflight, start, watch
    assert toy.ops("deploy", "--json").json["execs"] == 4
    planned = toy.ops("deploy", "--plan", "--replace", "--resume")
    assert "in all 5 commands on here" in planned.err  # and a stop
    assert toy.ops("deploy", "--json", "--replace", "--resume").json["execs"] == 5


def test_ctrl_c_in_the_watch_window_leaves_a_job_that_runs(toy: Toy) -> None:
    import signal
    import time

    toy.write(progress=r"never (?P<step>\d+)", watch_s=300)
    process = toy.spawn("deploy")
    assert process.stderr is not None
    end = time.monotonic() + 60
    while not (toy.root / "run/attempts/1/start.json").exists():
        assert time.monotonic() < end
        time.sleep(0.1)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    said = process.stderr.read()
    assert "Traceback" not in said
    assert toy.status["state"] == "loading"
    assert toy.ops("stop").code == 0
    assert os.path.lexists(toy.root / "current")
    assert json.loads((toy.root / "run/attempts/1/exit.json").read_text())["requested"] == "stop"
