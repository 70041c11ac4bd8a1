"""`make bench`: one table of ratios, and a benchmark that is broken is never passed over."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module("bench")
    finally:
        sys.path.remove(str(FOLDER))


def test_every_benchmark_of_the_folder_is_in_the_list(bench: ModuleType) -> None:
    there = {file.name for file in FOLDER.glob("*.py")}
    assert there == {case.words[0] for case in bench.CASES} | bench.HELPERS
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert not [name for name in there - bench.HELPERS if f"benchmarks/{name}" not in readme]


FAKES = {
    "good.py": "print('speed: 2.50 x\\nspeed: 1.60 x')",
    "slow.py": "print('speed: 0.90 x'); raise SystemExit(1)",
    "never.py": "print('speed: none x')",
    "mute.py": "print('nothing to say')",
    "crash.py": "print('speed: 3.00 x'); raise SystemExit(3)",
    "hung.py": "import time; print('speed: 3.00 x', flush=True); time.sleep(600)",
}


@pytest.fixture
def faked(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name, text in FAKES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(bench, "HERE", tmp_path)
    ratio = bench.Ratio(r"speed: ([\d.]+|none) x", "speed", 1.5)
    names = [name[:-3] for name in FAKES] + ["absent"]
    cases = [bench.Case(n, (f"{n}.py",), (ratio,), timeout_s=3 if n == "hung" else 60) for n in names]
    monkeypatch.setattr(bench, "CASES", (*cases, bench.Case("long", ("good.py",), (ratio,), needs="long")))
    return bench


def test_the_table_and_the_exit_code(
    faked: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def called(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["bench.py", *arguments])
        return faked.main(), capsys.readouterr().out

    code, out = called("--json")
    said = json.loads(out.splitlines()[-1])
    assert code == 1 and set(said["broken"]) == {"mute", "crash", "hung"}
    assert "said nothing of: speed" in said["broken"]["mute"] and "ended with 3" in said["broken"]["crash"]
    assert "longer than 3 s" in said["broken"]["hung"]
    assert said["not_run"] == {"absent": "not in this checkout", "long": "takes minutes: --only long"}
    rows = {row["benchmark"]: (row["ratio"], row["passed"]) for row in said["ratios"]}
    assert rows["good"] == (1.6, True) and rows["slow"] == (0.9, False) and rows["never"] == (0.0, False)
    assert "good           speed" in out and "1.60  >= 1.5   pass" in out and "BROKEN" in out
    # A goal that is missed is said, and is not an error of the benchmark.
    assert called("--only", "good", "slow")[0] == 0
    assert called("--only", "slow", "--strict")[0] == 1
    assert called("--only", "long")[0] == 0
    assert called("--only", "absent")[0] == 0


def test_the_rings_benchmark_says_what_the_list_looks_for(bench: ModuleType) -> None:
    case = next(c for c in bench.CASES if c.name == "ring")
    command = [sys.executable, str(case.script), "--mib", "1", "--repeat", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    rows, fault = bench.judge(case, done.returncode, done.stdout)
    assert fault is None, done.stderr
    assert len(rows) == 2 and all(value > 0 for _, value, _, _ in rows)
