"""Features on disk: written by real target processes, trained from by real readers, refused where they do not fit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_parts import save_words, turns
from demo_parts import call
from pipeline_support import REPO, Run, write_samples  # type: ignore[import-not-found]
from safetensors import safe_open

from trainer.checkpoint import MOMENTS, WEIGHTS, list_checkpoints
from trainer.config import load_config
from trainer.errors import ConfigError, DataError
from trainer.feature_reader import FeatureReader
from trainer.feature_writer import _Writer
from trainer.features import MANIFEST, fingerprint, read_manifest
from trainer.plan_record import audit
from trainer.prepare import prepare
from trainer.target import load_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # several launchers in a row: minutes on a busy machine
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
#: 80 samples of 12 to 60 tokens of 64 floats: six shards or so.
SHARD = ["--shard-mib", "0.125"]
#: Runs the command in a process that kills itself right behind its second shard, before the manifest knows of it.
DRIVER = """
import os, signal, sys
from trainer import feature_writer
from trainer.cli import main
def closed(self, whole):
    if len(self.manifest.shards) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    before(self, whole)
before, feature_writer._Writer._closed = feature_writer._Writer._closed, closed
sys.exit(main(["features", *sys.argv[1:]]))
"""


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=REPO, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)


def write_config(path: Path, target: Path, data: Path, features: Path) -> Path:
    raw = {
        "target": {"path": str(target)},
        "drafter": {"layers": 1, "block_size": 4, "taps": 1, "mask_token_id": 259},
        "data": {"path": str(data), "max_length": 64, "buckets": [32, 64], "batch_size": 4},
        "train": {"epochs": 2, "anchors": 8, "average_every": 3, "log_every": 1, "schedule": "fixed"},
        "checkpoint": {"every": 50},
        "features": {"path": str(features)},
    }
    path.write_text(json.dumps(raw))
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """run.json, data.jsonl and features/ of all its samples."""
    root = tmp_path_factory.mktemp("features")
    data = write_samples(root / "data.jsonl", 80)
    config = write_config(root / "run.json", tiny_target, data, root / "features")
    done = python("-m", "trainer", "features", "--config", config, "--json", *SHARD)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["complete"], said["samples"]) == (True, 80) and said["shards"] > 3
    assert f"{said['samples']} of 80 samples" in done.stdout and "tokens" in done.stderr and "took" in done.stderr
    return root


def prepared(root: Path, *overrides: str, targets: int = 0) -> Any:
    return prepare(load_config(root / "run.json", overrides, targets=targets), None, "none")


@pytest.fixture
def copied(root: Path, tmp_path: Path) -> Path:
    """The features, to be damaged, and the option that points to them."""
    return shutil.copytree(root / "features", tmp_path / "features")


def test_they_are_what_the_target_computes_and_any_safetensors_reader_reads_them(
    root: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.feature_reader.OPEN_FILES", 2)  # fewer than there are shards
    reader, before = FeatureReader(root / "features"), len(list(Path("/proc/self/fd").iterdir()))
    target = load_target(tiny_target, dtype=torch.float32, device="cpu")
    lines = [json.loads(line)["input_ids"] for line in (root / "data.jsonl").read_text().splitlines()]
    manifest = read_manifest(root / "features")
    assert manifest is not None
    seen: set[int] = set()
    for shard in manifest.shards:
        with safe_open(str(root / "features" / shard.name), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  no mapping
                seen.add(int(name))
                ids = lines[int(name)][:64]
                own = target.features(torch.tensor([ids]), [2])[0]
                torch.testing.assert_close(opened.get_tensor(name), own, atol=1e-5, rtol=1e-4)
                rows = torch.empty(len(ids), 64)
                reader.read(int(name), rows)
                assert torch.equal(rows, opened.get_tensor(name))
    assert seen == set(range(80)) and len(list(Path("/proc/self/fd").iterdir())) <= before + 2
    reader.close()


def test_a_run_from_disk_equals_the_run_with_its_target_bit_for_bit(root: Path, tmp_path: Path) -> None:
    last = []
    for name, count in (("online", "1"), ("offline", "0")):
        attempts, checkpoints = tmp_path / name / "attempts", tmp_path / name / "checkpoints"
        done = python(
            "-m", "trainer", "run", "--config", root / "run.json", "--targets", count,
            "--out", attempts / "1", "--checkpoints", checkpoints,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        said = "note: 1 readers take the features from" if count == "0" else "is not read"
        assert said in done.stdout
        result = audit(attempts)
        assert result.ok and [e.trained for e in result.epochs] == [80, 80]
        workers = json.loads((attempts / "1" / "metrics.jsonl").read_text().splitlines()[-1])["workers"]
        assert set(workers) == {"reader0" if count == "0" else "target0", "drafter0"}
        last.append(list_checkpoints(checkpoints)[-1])
    for name in (WEIGHTS, MOMENTS):
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes(), f"{name} differs"


def test_killed_then_stopped_then_with_a_target_killed_it_ends_with_the_same_bytes(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "features"
    (tmp_path / "driver.py").write_text(DRIVER)
    arguments = ["--config", root / "run.json", "--out", out, *SHARD]
    killed = python(tmp_path / "driver.py", *arguments)
    assert killed.returncode == -9
    manifest = read_manifest(out)
    assert manifest is not None and not manifest.complete and len(manifest.shards) == 1
    assert len(list(out.glob("shard-*"))) >= 2
    with pytest.raises(DataError, match="not all there") as caught:
        prepared(root, f"features.path={out}")
    assert caught.value.exit_code == 6 and "go on writing" in caught.value.next

    own_closed, own_give = _Writer._closed, _Writer._give

    def stop_after(self: Any, whole: object) -> None:
        own_closed(self, whole)
        os.kill(os.getpid(), signal.SIGTERM)

    def kill_in_the_first_batch(self: Any) -> None:
        own_give(self)
        for name in list(self.given):
            if self.crew[name].life == 0:
                os.kill(self.crew[name].pid, signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(_Writer, "_closed", stop_after)
        stopped = call("features", *arguments)
    assert stopped.returncode == 3 and "the same command goes on" in stopped.stdout
    manifest = read_manifest(out)
    assert manifest is not None and not manifest.complete and len(manifest.shards) >= 2
    assert not list(out.glob(".*.partial"))
    with monkeypatch.context() as patched:
        patched.setattr(_Writer, "_give", kill_in_the_first_batch)
        done = call("features", *arguments, "--set", 'workers.target_devices=["cpu","cpu"]')
    assert done.returncode == 0, done.stderr + done.stdout
    assert "event=worker_exit worker=target0 life=0 exitcode=-9" in done.stdout
    there = {p.name: p.read_bytes() for p in out.iterdir()}
    assert there == {p.name: p.read_bytes() for p in (root / "features").iterdir()}


def test_features_of_something_else_are_refused_naming_it(root: Path, tiny_target: Path, tmp_path: Path) -> None:
    assert prepared(root).config.readers == 1
    other = shutil.copytree(tiny_target, tmp_path / "target")
    weights = other / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    assert fingerprint(other) == fingerprint(tiny_target)
    raw[-40_000:] = bytes(40_000)
    weights.write_bytes(raw)
    more = write_samples(tmp_path / "more.jsonl", 81)
    for override, named in (
        ("drafter.layer_ids=[1]", r"tapped layers \[2\], the run has \[1\]"),
        ("drafter.layer_ids=[1,2]", r"width 64, the run has 128"),
        ('target.dtype="bfloat16"', "dtype float32, the run has bfloat16"),
        ("data.max_length=128", r"data\.max_length 64, the run has 128"),
        (f"data.path={more}", "sha256 of the data .*number of samples 80, the run has 81"),
        (f"target.path={other}", "target's fingerprint"),
    ):
        extra = ["data.buckets=[64,128]"] if "max_length" in override else []
        extra += ["drafter.taps=null"] if "layer_ids" in override else []
        with pytest.raises(DataError, match=named) as caught:
            prepared(root, override, *extra)
        assert (caught.value.exit_code, str(root / "features") in caught.value.where) == (6, True)
    with pytest.raises(DataError, match="no such folder"):
        prepared(root, "features.path=/absent")
    with pytest.raises(DataError, match=r"no features\.json"):
        prepared(root, f"features.path={tiny_target}")


def test_damage_is_told_by_shard(root: Path, copied: Path) -> None:
    option = f"features.path={copied}"
    manifest = read_manifest(copied)
    assert manifest is not None
    shard = copied / manifest.shards[1].name
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-1])
    with pytest.raises(DataError, match=rf"{shard.name} has {len(raw) - 1} bytes"):
        prepared(root, option)
    shard.unlink()
    with pytest.raises(DataError, match=f"{shard.name} cannot be read"):
        prepared(root, option)

    shard.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    prepared(root, option)  # as long as it should be
    with safe_open(str(shard), framework="pt") as opened:
        shapes = {int(n): opened.get_slice(n).get_shape() for n in opened.keys()}  # noqa: SIM118
    reader, bad = FeatureReader(copied), []
    for sample, shape in shapes.items():
        try:
            reader.read(sample, torch.empty(shape))
        except DataError as error:
            assert shard.name in error.what and str(copied) in error.next
            bad.append(sample)
    assert len(bad) == 1, bad
    with pytest.raises(DataError, match="has 3 tokens"):
        reader.read(bad[0], torch.empty(3, 64))
    done = call("features", "--config", root / "run.json", "--out", copied, "--verify")
    assert done.returncode == 6 and f"damaged or gone: {shard.name}" in done.stderr
    shard.write_bytes(b"\xff" * len(raw))
    with pytest.raises(DataError, match=f"{shard.name} is damaged: its header is cut"):
        FeatureReader(copied)
    (copied / MANIFEST).write_text('{"schema": 1}')
    with pytest.raises(DataError, match=r"features\.json lacks"):
        prepared(root, option)
    done = call("features", "--config", root / "run.json", "--verify")
    assert done.returncode == 0 and "all as they were written" in done.stdout


def test_what_cannot_be_written_is_told_before_a_worker_starts(
    root: Path, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = call("features", "--config", root / "run.json", *SHARD)
    assert again.returncode == 0 and "80 of 80 samples" in again.stdout
    other = call("features", "--config", root / "run.json", "--set", "drafter.layer_ids=[1]", *SHARD)
    assert other.returncode == 6 and "tapped layers [2], the run has [1]" in other.stderr
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    mine = call("features", "--config", root / "run.json", "--out", tmp_path / "notes")
    assert mine.returncode == 2 and "mine.txt" in mine.stderr
    none = call(
        "features", "--config", root / "run.json", "--set", "workers.target_devices=[]", "--out", tmp_path / "n"
    )
    assert none.returncode == 2 and "0 targets" in none.stderr
    (copied / read_manifest(copied).shards[0].name).unlink()  # type: ignore[union-attr]
    changed = call("features", "--config", root / "run.json", "--set", "train.seed=5", "--out", copied, *SHARD)
    assert changed.returncode == 6 and "seed 0, now 5" in changed.stderr
    monkeypatch.setattr("trainer.feature_writer.room", lambda _: 1000)
    full = call("features", "--config", root / "run.json", "--out", tmp_path / "full", *SHARD)
    rows = sum(prepared(root).index.lengths) * 64 * 4
    needed = int(full.stderr.split("there is no room: ")[1].split()[0])
    assert full.returncode == 2 and rows < needed < rows + 20_000 and "1000 are free" in full.stderr


def test_conversations_are_made_into_tokens_under_the_one_bar_of_the_command(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, talk = shutil.copytree(tiny_target, tmp_path / "target"), {"messages": turns("hey", "you yes")}
    save_words(target)
    (tmp_path / "d.jsonl").write_text((json.dumps(talk) + "\n") * 300)
    config = write_config(tmp_path / "run.json", target, tmp_path / "d.jsonl", tmp_path / "out")
    monkeypatch.setattr("trainer.corpus.QUIET_S", 0.0)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")  # it ends where the work would begin
    done = call("features", "--config", config)
    assert done.returncode == 2, done.stderr
    said = [line for line in done.stderr.splitlines() if "lines" in line]
    assert said and all(line.startswith("tokenizing: ") and "/s" in line for line in said), done.stderr
    assert "tokenizing: 300/300 lines" in said[-1]


def test_targets_and_drafters_of_the_command_line(root: Path, make_run: Callable[..., Run]) -> None:
    run = make_run(**{"workers.target_devices": ["cpu"] * 3, "workers.drafter_devices": ["cpu"] * 2})
    config = load_config(run.config, targets=1, drafters=1)
    assert (len(config.workers.target_devices), len(config.workers.drafter_devices), config.readers) == (1, 1, 0)
    with pytest.raises(ConfigError, match=r"--targets 4: workers\.target_devices names 3"):
        load_config(run.config, targets=4)
    with pytest.raises(ConfigError, match="there are 0 targets") as caught:
        load_config(run.config, targets=0)
    assert "features.path" in caught.value.next
    assert load_config(root / "run.json", ["features.readers=2"], targets=0).slots == 6
