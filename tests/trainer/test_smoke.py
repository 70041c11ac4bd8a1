"""The smoke run: tiny in every size, and trained as the job is."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.cli import smoke
from trainer.config import load_config, parse_config
from trainer.errors import ConfigError
from trainer.prepare import prepare
from trainer.smoke import STEPS, make

JOB = {
    "target": {"path": "/no/such/target", "dtype": "bfloat16"},
    "drafter": {"mask_token_id": 151669, "layers": 5, "taps": 5, "block_size": 16, "sliding_window": 2048,
                "attention": "flex", "init_from": "/no/such/drafter"},
    "data": {"path": "/no/such/data", "max_length": 3072, "batch_size": 4},
    "train": {"epochs": 6, "anchors": 512, "objective": "dpace", "schedule": "fixed", "average_every": 50},
    "loss": {"mode": "checkpoint", "reentrant": True},
    "workers": {"target_devices": [0, 1, 2, 3, 4], "drafter_devices": [5, 6, 7], "threads": 8, "restarts": 3},
    "ring": {"slots": 16, "dir": "/tmp"},
}  # fmt: skip


def test_the_way_of_training_is_kept_and_sizes_and_places_are_not(tmp_path: Path) -> None:
    made = load_config(make(tmp_path / "out", parse_config(JOB, "run.toml"), ["cpu"] * 5, ["cpu"] * 3))
    assert (made.loss.mode, made.loss.reentrant) == ("checkpoint", True)
    assert (made.train.objective, made.train.schedule) == ("dpace", "fixed")
    assert (made.drafter.block_size, made.ring.dir, made.target.dtype) == (16, "/tmp", "bfloat16")
    assert (len(made.workers.target_devices), len(made.workers.drafter_devices)) == (5, 3)
    assert (made.drafter.attention, made.drafter.init_from) == ("sdpa", None)
    assert (made.train.steps, made.train.epochs, made.workers.threads, made.workers.restarts) == (STEPS, None, 1, 0)
    assert str(tmp_path) in made.target.path
    # it could start: enough data for every drafter's steps, a geometry that fits the target
    prepared = prepare(made, tmp_path / "checkpoints", "none")
    assert prepared.total_steps == STEPS


def test_on_gpus_the_jobs_attention_is_tried(tmp_path: Path) -> None:
    made = json.loads(make(tmp_path / "out", parse_config(JOB, "run.toml"), ["cuda:0"], ["cuda:1"]).read_text())
    assert made["drafter"]["attention"] == "flex"


def test_without_a_config_the_defaults_are_tried(tmp_path: Path) -> None:
    made = load_config(make(tmp_path / "out", None, ["cpu"], ["cpu"]))
    assert made.loss.mode == "fused"
    assert prepare(made, tmp_path / "checkpoints", "none").total_steps == STEPS


def test_what_cannot_be_meant(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    smoke.add_arguments(parser)
    for words in (["--targets", "0"], ["--targets", "2", "--devices", "cpu,cpu"]):
        with pytest.raises(ConfigError, match="devices for"):
            smoke.main(parser.parse_args(["--out", str(tmp_path / "new"), *words]))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        smoke.main(parser.parse_args(["--out", str(tmp_path / "full")]))
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["file"]


def test_the_command_makes_its_steps(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "trainer", "smoke", "--out", str(tmp_path / "out")]
    argv += ["--targets", "1", "--drafters", "1", "--devices", "cpu,cpu"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["ok"], said["steps"]) == (True, STEPS)
