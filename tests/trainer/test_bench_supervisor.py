"""goodput.py and supervise.py: their sums, what `make bench` reads of them, and the regimes' own small parts."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def load() -> Callable[[str], ModuleType]:
    def one(name: str) -> ModuleType:
        before = list(sys.path)
        sys.path.insert(0, str(FOLDER))
        try:
            return importlib.import_module(name)
        finally:
            sys.path[:] = before

    return one


def read(load: Callable[[str], ModuleType], case: str, output: str) -> dict[str, tuple[float, bool]]:
    """What `make bench` makes of an output."""
    bench = load("bench")
    rows, fault = bench.judge(next(c for c in bench.CASES if c.name == case), 0, output)
    assert fault is None, fault
    return {text: (value, passed) for text, value, _, passed in rows}


def test_goodput_counts_what_stands_at_the_end_of_the_window(load: Callable[[str], ModuleType]) -> None:
    goodput = load("goodput")
    # Two steps a second; at 10 s a fault throws it back by 4, and 3 s later it goes on.
    calm = [(t / 10, t // 5) for t in range(300)]
    mine = [(t, step if t < 10 else 16 if t < 13 else 16 + step - 26) for t, step in calm]
    assert goodput.useful(calm, 0.0, 29.0) == 58
    assert goodput.useful(mine, 0.0, 29.0) == 48
    one = goodput.Struck("ours", "drafter", None, 0.0, hits=[(10.0, "SIGKILL")])
    assert goodput.per_fault(mine, calm, one, 20.0) == {"SIGKILL": pytest.approx(5.0, abs=0.6)}


def test_goodput_says_what_make_bench_looks_for(
    load: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    goodput = load("goodput")
    row = {"useful": 97, "possible": 100, "faults": 4, "late_s": 0.0, "lost_s": {"SIGKILL": 1.0}}
    rows = [{**row, "way": "ours", "struck": role, "goodput": 0.95} for role in ("target", "drafter")]
    found: dict[str, Any] = {"rows": rows, "wrong": {}, "load": [(1.0, 2.0, 3.0)] * 2, "step_s": [0.5, 0.6]}
    given = argparse.Namespace(every=60.0, minutes=15.0, others=4.0)
    assert goodput.say(found, given) is False  # 0.95 is enough of drafter faults only
    out = capsys.readouterr().out
    assert "of targets" not in out and "goal 0.97: MISS" in out and "goal 0.9: pass" in out
    assert [value for value, _ in read(load, "goodput", out).values()] == [0.95, 0.95]
    found["rows"] = [{**r, "goodput": 0.99} for r in rows]
    assert goodput.say(found, given) is True
    assert goodput.say({**found, "wrong": {"ours-target": ["batch 3 twice"]}}, given) is False


def test_the_supervisors_goals(load: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    supervise = load("supervise")
    found: dict[str, Any] = {
        "cost": {"cpu": 0.004, "wrapper_cpu": 0.001, "seconds": 120.0, "pss_mb": 30.0, "rss_mb": 50.0,
                 "wrapper_mb": 12.0, "overhead": 1.001},
        "crash": {"seen": 0.1, "started": 2.0, "stepped": 8.0}, "torchrun": {"seen": 0.2, "stepped": 10.0},
        "drafter": 0.6, "hang": {"hung": 0.5, "named": 2.0}, "load": 1.0,
    }  # fmt: skip
    assert supervise.say(found)
    values = read(load, "supervise", capsys.readouterr().out)
    assert all(passed for _, passed in values.values())
    assert {round(value, 4) for value, _ in values.values()} == {1.001, 0.004, 0.5, 0.1, 0.8, 0.06}
    found["cost"]["cpu"] = 0.006
    assert not supervise.say(found)
    assert [text for text, (_, passed) in read(load, "supervise", capsys.readouterr().out).items() if not passed] == [
        "supervisor's CPU, of a core"
    ]


def test_what_a_process_used(load: Callable[[str], ModuleType]) -> None:
    supervise = load("supervise")
    code = "import subprocess,time\nsubprocess.run(['sh','-c','i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done'])"
    code += "\nx=bytearray(50<<20)\nprint(flush=True)\ntime.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        assert supervise.cpu_s(process.pid) > 0.02  # with the child that has ended
        pss, rss = supervise.memory(process.pid)
        assert 50 < pss <= rss
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


def test_the_loop_starts_everything_again_and_counts_what_is_left(
    load: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """A trainer of a few lines in the trainer's place: it saves step 20, gets to 23, and is killed."""
    systems = load("systems")
    fake = tmp_path / "fake.py"
    fake.write_text(
        "import sys, time, pathlib\n"
        "mark = pathlib.Path(sys.argv[1])\n"
        "first = 20 if mark.exists() else 0\n"
        "if first: print('dflash event=resumed step=20/99 path=x', flush=True); time.sleep(60)\n"
        "for n in range(1, 24): print(f'dflash step={n}/99 epoch=1', flush=True)\n"
        "print('dflash event=checkpoint step=20 path=x seconds=0.1', flush=True); mark.touch(); time.sleep(60)\n"
    )

    class Fake(systems.Loop):  # type: ignore[name-defined,misc]
        def trainer(self) -> list[str]:
            return [sys.executable, str(fake), str(tmp_path / "mark")]

    one = Fake("fake", tmp_path / "run", tmp_path / "run.json", {})
    try:
        one.start()
        systems.wait_until(one, 23, 30)
        (pid,) = [pid for pid, words in systems._below(one.launcher()) if str(fake) in words]
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while one.step() != 20 or not (one.attempts / "2").exists():
            assert time.monotonic() < deadline, one.tail()
            time.sleep(0.02)
    finally:
        one.close()
    assert not systems._below(os.getpid()) or all(str(fake) not in w for _, w in systems._below(os.getpid()))
