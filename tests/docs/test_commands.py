"""Every command of the README is run, in the order of the text. The tutorial: tests/lab/test_tutorial.py."""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from reader import REPO, Reader, Rule, commands, follow, reader_in, rule_of

from dflash_ops.deploy.toml import dump_toml

PYTHON = os.path.realpath(sys.executable)
TRAINER = """
import os, signal, sys, time
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
os.makedirs(os.environ["ATTEMPT"] + "/logs", exist_ok=True)
for step in range(1, 3000):
    time.sleep(0.1)
    print(f"step {step}/3000 loss {4 / step:.3f}", flush=True)
    open(os.environ["ATTEMPT"] + "/logs/drafter0.log", "a").write(f"drafter0 at {step}\\n")
    if stop:
        sys.exit(3)
"""


def own_job(reader: Reader) -> None:
    """`main`, the reader's own job, instead of the demo that `init` writes: short, and no torch."""
    home = reader.home
    (home / "src").mkdir()
    (home / "src/train.py").write_text(TRAINER)
    job = {
        "host": "local", "root": str(home / "root"), "session": "main", "source": str(home / "src"), "watch_s": 60,
        "socket": reader.socket, "command": [PYTHON, "{release}/train.py"], "grace_s": 20,
        "progress": r"step (?P<step>\d+)/(?P<total>\d+) loss (?P<loss>\S+)", "env": {"ATTEMPT": "{attempt}"},
    }  # fmt: skip
    devices = {"target_devices": [0, 1], "drafter_devices": [2]}
    trainer = {**devices, "target": {"path": "/models/target"}, "data": {"path": "/data/train.jsonl"}}
    gpus = {"host": "local", "root": str(home / "gpus"), "interpreter": PYTHON, "trainer": trainer}
    hosts = {"local": {"kind": "local", "python": PYTHON}, "nobody": {"kind": "ssh", "address": "127.0.0.1", "port": 1}}
    away = {**job, "host": "nobody"}  # nothing listens there: it is the news that `supervise` has
    for name, jobs in (("inventory", {"main": job}), ("gpus", {"main": gpus}), ("away", {"main": job, "away": away})):
        (home / f"{name}.toml").write_text(dump_toml({"schema": 1, "hosts": hosts, "jobs": jobs}))


RULES = (
    Rule(r"make (demo|demo-crash|chaos|bench|venv.*|lab)$", skip="minutes, or a network: its target is looked up only"),
    Rule(r"make test$", skip="this is it"),
    Rule(r"dflash-ops init$", after=own_job),
    Rule(r"dflash-ops doctor", codes=(0, 3)),  # what this machine lacks is no fault of the text
    Rule(r"dflash-ops status main --watch", lasts="stepping"),
    Rule(r"dflash-ops logs main -f", lasts="drafter0 at"),
    Rule(r"dflash-ops exporter", more="--listen 127.0.0.1:0", lasts="/metrics"),
    Rule(r"dflash-ops supervise --all", lasts="away: unreachable", environ={"DFLASH_INVENTORY": "away.toml"}),
    Rule(r"dflash-ops deploy .*--target-gpus", more="--plan", codes=(3,), environ={"DFLASH_INVENTORY": "gpus.toml"}),
    Rule(r"dflash-ops rebalance", proof="tests/deploy/test_rebalance.py"),  # a run of the bundled trainer, measured
    Rule(r"dflash-ops enable", proof="tests/lab/test_wire_boot.py"),  # writes into this machine's start
    Rule(r"dflash-ops --install-completion", codes=(0, 1)),  # 1: whose shell this is cannot be told under a test
    Rule(r"python -m trainer check", proof="tests/trainer/test_found_by_trying.py"),
    Rule(r"python -m trainer verify", proof="tests/trainer/test_average_memory.py"),
    Rule(r"python -m trainer features", proof="tests/trainer/test_features.py"),
)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    (tmp_path / "train.log").write_text("OSError: [Errno 28] No space left on device\n")
    (tmp_path / "other.gz").write_bytes(gzip.compress(b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"))
    made = reader_in(tmp_path)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.timeout(600)  # some thirty commands, each a start of the interpreter, on a machine that is busy
def test_every_command_of_the_readme_does_what_it_says(reader: Reader) -> None:
    follow((REPO / "README.md").read_text("utf-8"), RULES, reader)


def test_a_command_that_nobody_knows_fails_and_comments_are_none() -> None:
    plain = "```\nmake test     # all\nsome output: yes\n$ dflash-ops status \\\n  main\n```\n"
    text = plain + "```toml\nx = 1\n```\n```sh\ncat > f <<'END'\nmake test\nEND\nrm -rf x\n```\n"
    assert commands(text) == ["make test", "dflash-ops status main", "cat > f <<'END'\nmake test\nEND", "rm -rf x"]
    with pytest.raises(AssertionError, match="rm -rf x"):
        rule_of("rm -rf x", RULES)
