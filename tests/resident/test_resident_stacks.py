"""Stacks of a living attempt: everybody is asked, nobody dies of it, and who cannot answer is told by the kernel."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from resident_lab import Lab, wait_for  # type: ignore[import-not-found]

from dflash_ops.resident import attempts, proc, stacks

TRAINER = """
import faulthandler, os, signal, subprocess, sys, time
WORKER = '''
import faulthandler, os, signal, sys, time
if sys.argv[1] == "answers":
    faulthandler.register(signal.SIGUSR2)
def waits_for_a_batch():
    print("ready", flush=True)
    time.sleep(600)
waits_for_a_batch()
'''
faulthandler.register(signal.SIGUSR2)
for rank, kind in enumerate(("answers", "silent", "answers")):
    subprocess.Popen([sys.executable, "-c", WORKER, kind], env={**os.environ, "RANK": str(rank)})
spare = (kind, "trainer.worker_main", "drafter", "drafter0", "1", "socket", "0", "spare")
subprocess.Popen([sys.executable, "-c", WORKER, *spare])
def looks_after_them():
    time.sleep(600)
looks_after_them()
"""


@pytest.mark.skipif(shutil.which("py-spy") is not None, reason="with py-spy nobody is sent a signal")
def test_everybody_is_asked_and_nobody_dies_of_it(one: Lab, tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    one.start(argv=(sys.executable, str(script)), progress="")
    attempt = attempts.read(one.layout, 1)
    wait_for(lambda: attempt.layout.log.read_bytes().count(b"ready") == 4, "three workers and a spare")
    launcher = one.launcher()
    family = sorted(proc.family(launcher), key=lambda p: p.pid)
    os.kill(family[2].pid, signal.SIGSTOP)
    found = {s.name: s for s in stacks.dump(attempt)}
    assert list(found) == ["launcher", "rank0", "rank1", "rank2"]  # the spare has no part in a hang
    assert "in looks_after_them" in found["launcher"].text
    assert "in waits_for_a_batch" in found["rank0"].text
    assert [found[n].how for n in ("launcher", "rank0", "rank1", "rank2")] == [
        "faulthandler", "faulthandler", "kernel", "kernel"
    ]  # fmt: skip
    assert "does not catch SIGUSR2" in found["rank1"].text
    assert found["rank2"].state == "T"
    assert "it is stopped (SIGSTOP or a debugger)" in found["rank2"].text
    assert all(proc.alive(p) for p in (launcher, *family))
    path = stacks.save(attempt, list(found.values()))
    assert path.name == "stacks-1.txt"
    assert "==== rank2 pid " in path.read_text()
    assert stacks.save(attempt, []).name == "stacks-2.txt"


def test_the_kernel_is_asked_only_in_the_time_that_is_left(one: Lab) -> None:
    one.start()
    one.stepping()
    (only, *_) = stacks.dump(attempts.read(one.layout, 1), deadline_s=0)
    assert (only.name, only.text) == ("launcher", "not asked: too little time was left")
