"""Bad input: one clear message, the contract's exit code, nothing half-done. None of these starts a worker."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pipeline_support import REPO, Run, write_state  # type: ignore[import-not-found]

from trainer.checkpoint import WEIGHTS, Store, seal
from trainer.errors import ConfigError
from trainer.state_layout import drafter_shapes
from trainer.target_files import read_target


def refused(run: Run, code: int, *says: str, overrides: tuple[str, ...] = (), resume: str = "auto") -> None:
    assert run.finish(*overrides, resume=resume, within=60) == code, run.log
    for text in says:
        assert text in run.log, run.log
    assert "error: " in run.log
    assert "Traceback" not in run.log
    assert "stage=loading" not in run.log
    recorded = json.loads((run.attempt / "errors" / "launcher" / "error.json").read_text())["message"]
    assert float(recorded["extraInfo"]["timestamp"]) > 1e9
    if run.checkpoints.is_dir():
        assert not [p for p in run.checkpoints.iterdir() if p.name.startswith(".step")]


def check(run: Run, *extra: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-X", "importtime", "-m", "trainer", "check", "--config", str(run.config), *extra]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60)
    assert "| torch" not in done.stderr, "check imports torch"
    return done.returncode, json.loads(done.stdout)


def fake_checkpoints(run: Run, *steps: int) -> list[Path]:
    """Whole checkpoints of some other run."""
    store = Store(run.checkpoints, 5)
    paths = [fake_checkpoint(store, step) for step in steps]
    store.close()
    return paths


def fake_checkpoint(store: Store, step: int) -> Path:
    import torch

    base = {"number": 0, "epoch": 0, "trained": []}
    plan = {"seed": 0, "batch_size": 4, "buckets": [32, 64], "base": base}
    full = {"step": step, "batches": step, "plan": plan, "data": {"sha256": ""}, "drafter": {}, "threads": 1}
    beside = store.begin(step, full)
    one = torch.zeros(1)
    seal(beside, write_state(beside, {"a": one}, {"exp_avg.a": one, "exp_avg_sq.a": one}))
    path = store.claim(step)
    store.publish(beside, path)
    return path


def test_config_target_data_and_checkpoints_are_refused(make_run: Callable[..., Run], tmp_path: Path) -> None:
    refused(make_run("a", **{"workers.drafter_devices": []}), 2, "there are 0 drafters", "workers.drafter_devices")
    refused(make_run("b"), 2, "unknown key 'lrr'", "did you mean lr?", overrides=("train.lrr=1",))
    refused(make_run("c", **{"target.path": str(tmp_path)}), 2, "no config.json: this is no target", str(tmp_path))
    refused(make_run("d", **{"drafter.mask_token_id": 260}), 2, "260 is outside a vocabulary of 260")
    refused(make_run("e", **{"drafter.taps": 3}), 2, "taps", "ask for at most 1")

    bad = make_run("f")
    with (bad.root / "data.jsonl").open("a") as opened:
        opened.write("{no json\n")
    refused(bad, 6, "line 49: no JSON", f"{bad.root / 'data.jsonl'}:49", "data.max_bad_lines")
    refused(make_run("g", **{"data.path": "/absent.jsonl"}), 6, "cannot be read", "/absent.jsonl")

    damaged = make_run("h")
    older, newest = fake_checkpoints(damaged, 3, 6)
    (newest / WEIGHTS).write_bytes(b"torn")
    refused(damaged, 5, str(newest / WEIGHTS), f"--resume {older}")
    refused(damaged, 2, "--resume none, but there are 2 checkpoints", resume="none")
    refused(damaged, 2, "the checkpoint holds another drafter", resume=str(older))
    assert newest.exists()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda raw: raw[:-100], "its header says"),
        (lambda raw: raw + b"x", "its header says"),
        (lambda raw: raw[:200], "its header is cut"),
        (lambda raw: b"", "its header is cut"),
        (lambda raw: b"version https://git-lfs.github.com/spec/v1\n", "no whole safetensors file"),
        (lambda raw: raw[:8] + b"[" + raw[9:], "no whole safetensors file"),
    ],
)
def test_a_target_that_was_copied_in_part_is_refused(
    tiny_target: Path, tmp_path: Path, damage: Callable[[bytes], bytes], says: str
) -> None:
    folder = shutil.copytree(tiny_target, tmp_path / "target")
    weights = folder / "model.safetensors"
    read_target(str(folder))
    weights.write_bytes(damage(weights.read_bytes()))
    with pytest.raises(ConfigError, match=says) as caught:
        read_target(str(folder))
    assert (caught.value.where, bool(caught.value.next)) == (str(weights), True)


def test_a_config_of_another_vocabulary_than_the_weights_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_target, tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    with pytest.raises(ConfigError, match=r"\[260, 64\], config.json says .*\[300, 64\]"):
        read_target(str(folder))


def test_a_ring_that_does_not_fit_says_how_much_is_needed(make_run: Callable[..., Run]) -> None:
    run = make_run(**{"ring.slots": 10**9})
    says = ("bytes of shared memory are needed, the file system has", "the ring ", "averages", "ring.slots")
    refused(run, 2, *says)
    code, out = check(run)
    assert (code, out["errors"][0]["exit_code"]) == (2, 2)
    assert says[0] in out["errors"][0]["what"]


def test_a_folder_that_cannot_be_written_is_told(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.checkpoints.write_text("a file, no folder")
    refused(run, 2, "the checkpoints folder cannot be used")
    code, out = check(run, "--checkpoints", str(run.checkpoints / "below"))
    (error,) = out["errors"]
    assert (code, error["where"]) == (2, str(run.checkpoints / "below"))
    assert error["what"] == f"the checkpoints folder cannot be used: {run.checkpoints} is no folder"
    code, out = check(run, "--set", f"ring.dir={run.checkpoints}")
    assert (code, out["errors"][0]["what"]) == (2, "no file can be made there")


def test_check_says_what_it_takes(make_run: Callable[..., Run], tiny_target: Path) -> None:
    run = make_run(samples=50, **{"train.epochs": 2, "workers.drafter_devices": ["cpu", "cpu"]})
    code, out = check(run, "--checkpoints", str(run.checkpoints))
    assert (code, out["ok"], out["errors"]) == (0, True, [])
    assert out["total_steps"] == 13  # 2 epochs of 13 batches, two drafters
    needs = out["needs"]

    from trainer.config import load_config
    from trainer.drafter import Drafter
    from trainer.prepare import drafter_geometry

    drafter = Drafter(drafter_geometry(load_config(run.config), read_target(str(tiny_target))))
    parameters = sum(p.numel() for p in drafter.parameters())
    shapes = drafter_shapes(drafter.config)
    assert shapes == {name: tuple(p.shape) for name, p in drafter.named_parameters()}
    assert needs["drafter_parameters"] == parameters
    assert 24 * parameters <= needs["average_bytes"] <= 24 * parameters + 6 * 4096
    assert needs["shared_bytes"] == needs["ring_bytes"] + needs["average_bytes"]
    assert needs["checkpoint_bytes"] == 12 * parameters
    assert needs["ring_bytes"] > 6 * 4 * 64 * 64 * 4
    assert needs["target_bytes_per_worker"] > (tiny_target / "model.safetensors").stat().st_size
    assert needs["devices"] == ["cpu"]
    assert not run.checkpoints.exists()


def test_check_tells_every_fault_with_the_exit_code(make_run: Callable[..., Run]) -> None:
    code, out = check(make_run("a", **{"train.lr": -1, "data.batch_size": 0}))
    assert code == 2
    assert [e["where"].split(": ")[1] for e in out["errors"]] == ["data.batch_size", "train.lr"]
    assert all(e["what"] and e["next"] for e in out["errors"])
    run = make_run("b", **{"workers.target_devices": [98]})
    code, out = check(run)
    assert code == 2
    assert "cuda:98" in out["errors"][0]["what"]
    assert out["needs"] is not None
    (run.root / "data.jsonl").write_text("\n")
    assert check(run, "--set", 'workers.target_devices=["cpu"]')[0] == 6
    fine = make_run("c")
    (path,) = fake_checkpoints(fine, 3)
    (path / WEIGHTS).unlink()
    code, out = check(fine, "--checkpoints", str(fine.checkpoints))
    assert (code, out["errors"][0]["exit_code"]) == (5, 5)
    assert WEIGHTS in out["errors"][0]["where"]


def test_audit_from_the_command_line(tmp_path: Path) -> None:
    def run_audit(*extra: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "trainer", "audit", str(tmp_path), *extra]
        return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60)

    nothing = run_audit()
    assert nothing.returncode == 2
    assert "no plan.jsonl" in nothing.stderr
    (tmp_path / "1").mkdir()
    begin = {"k": "begin", "from_step": 0, "accepted": [[0, 1]]}
    acks = [{"k": "ack", "epoch": 0, "batch": 0, "samples": [0, 1], "drafter": "drafter0"}]
    over = [{"k": "epoch", "epoch": 0}, {"k": "commit", "step": 1, "checkpoint": "x"}]
    write = (tmp_path / "1" / "plan.jsonl").write_text
    write("".join(json.dumps(e) + "\n" for e in [begin, *acks, *over]))
    good = run_audit("--json")
    assert good.returncode == 0
    assert json.loads(good.stdout)["ok"] is True
    write("".join(json.dumps(e) + "\n" for e in [begin, *acks, *acks, *over]))
    twice = run_audit()
    assert twice.returncode == 1
    assert "more than once: 2, first [0, 1]" in twice.stdout


@pytest.mark.parametrize("command", [[], ["nonsense"], ["run"]])
def test_wrong_arguments_exit_with_2(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer", *command], cwd=REPO, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
