"""`make demo-crash`: its first part as a whole, what it leaves behind, and that a claim which is not so is said."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.night import FIRST, FX, Night, claims, global_flag
from dflash_ops.contracts import Decision, Verdict, to_dict
from dflash_ops.resident import journal, proc

TESTS = Path(__file__).parents[1]
REPO = TESTS.parent


@contextlib.contextmanager
def night(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """It, ended in any case as a person would: by Ctrl-C, which leaves nothing."""
    env = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "chaos.night", *words]
    with subprocess.Popen(argv, cwd=TESTS, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            yield run
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGINT)
                run.communicate(timeout=60)


def left(folder: Path) -> list[str]:
    """Files below it, and processes that name it."""
    lines = [Path(f"/proc/{p.pid}/cmdline") for p in proc.every()]
    words = [f.read_bytes().decode("utf-8", "replace") for f in lines if f.exists()]
    return [*(str(p) for p in folder.glob("dflash-night-*")), *(w for w in words if f"{folder}/dflash-night-" in w)]


@pytest.mark.timeout(480)  # half a minute on two free cores; only a very busy machine needs more
@pytest.mark.skipif(not global_flag(__import__("torch").__version__), reason="the race is mended in this torch")
def test_the_race_is_named_what_only_looks_like_a_cure_is_told_so_and_one_process_a_device_ends_it(
    tmp_path: Path,
) -> None:
    with night(tmp_path, "--short") as run:
        out, _ = run.communicate(timeout=400)
    assert run.returncode == 0, out
    assert "6 of 6 shown" in out
    assert "loss_reentrant: it did not help" in out
    assert not left(tmp_path)


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    told = []
    with night(tmp_path) as run:
        assert run.stdout is not None
        for line in run.stdout:
            told.append(line)
            if "attempt 1 started" in line:
                run.send_signal(signal.SIGINT)
                break
        rest, _ = run.communicate(timeout=60)
    assert run.returncode == 130, (told, rest)
    assert "all that was started is ended" in rest
    assert not left(tmp_path)


def test_what_did_not_happen_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Night(tmp_path)
    one.layout.run.mkdir(parents=True)

    def note(event: str, attempt: int | None = None, **data: Any) -> None:
        journal.append(one.layout.journal, event, actor="supervisor", attempt=attempt, data=data)

    for number, (action, outcome) in enumerate([("loss_reentrant", "useless"), ("workers_processes", "verified")], 1):
        decision = Decision(Verdict.ACT, "why", id=action, action=action, attempt=number, kind=FX)
        note("diagnosed", number, kind=FX, fingerprint="f")
        note("action_intended", number, decision=to_dict(decision))
        note("action_outcome", number + 1, id=action, outcome=outcome)
    note("attempt_exited", 3, state="finished", step=FIRST)
    said = json.dumps({"jobs": [{"incidents": [{"kind": FX, "attempts": [1, 2], "state": "repaired"}]}]})
    monkeypatch.setattr(one, "ops", lambda *_: said)
    assert all(so for _, so in claims(one, raced=True, whole=False))
    note("action_outcome", 2, id="loss_reentrant", outcome="verified")
    assert [text for text, so in claims(one, raced=True, whole=False) if not so] == [
        "reentrant checkpointing was tried first, and the journal says that it did not help"
    ]
    note("held", 3, reason="nothing is left")
    assert len([text for text, so in claims(one, raced=True, whole=True) if not so]) == 6
    assert [global_flag(v) for v in ("2.11.0", "2.13.0+cpu", "2.14.0", "3.0.0a0")] == [True, True, False, False]
