"""`evaluate` and `export` as a person calls them: on an export, a checkpoint, a folder of checkpoints, and nonsense."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_parts import TINY, call, call_apart
from pipeline_support import write_state

from trainer.checkpoint import Store, seal
from trainer.demo.target import build
from trainer.demo.tokenizer import MASK
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.drafter_source import open_source
from trainer.errors import CheckpointError, ConfigError
from trainer.export import load_drafter


def save(store: Store, drafter: Drafter, step: int) -> None:
    """A checkpoint as the trainer writes it."""
    weights = {name: t.detach().float() for name, t in drafter.state_dict().items()}
    moments = {f"{kind}.{n}": torch.zeros_like(t) for kind in ("exp_avg", "exp_avg_sq") for n, t in weights.items()}
    state = {
        "step": step,
        "batches": step,
        "plan": {"base": 0},
        "data": {"sha256": ""},
        "drafter": drafter.config.to_hf(),
    }
    beside = store.begin(step, state)
    seal(beside, write_state(beside, weights, moments))
    store.publish(beside, store.claim(step))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, data/ and checkpoints/ of two untrained drafters, at steps 5 and 10."""
    root = tmp_path_factory.mktemp("evaluate")
    build(root / "target", TINY, threads=1)
    hf = type("Hf", (), json.loads((root / "target" / "config.json").read_text()))()
    config = DrafterConfig.from_target(hf, layers=1, block_size=4, mask_token_id=MASK, taps=2)
    store = Store(root / "checkpoints", keep_last=5)
    for step in (5, 10):
        save(store, Drafter(config, seed=step), step)
    store.close()
    return root


def test_export_then_evaluate(root: Path) -> None:
    done = call("export", "--checkpoints", root / "checkpoints", "--out", root / "export", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["step"], said["dtype"], said["export"]) == (10, "bfloat16", str(root / "export"))
    config, state = load_drafter(root / "export")
    trained = Drafter(config, seed=10).state_dict()
    assert state.keys() == trained.keys()
    assert all(torch.equal(state[name], trained[name].bfloat16()) for name in trained)

    evaluate = [
        "evaluate", "--target", root / "target", "--drafter", root / "export", "--prompts",
        root / "data" / "heldout.jsonl", "--max-new", "6", "--limit", "2", "--json", "--threads", "1",
    ]  # fmt: skip
    done = call_apart(*evaluate, "--least-tau", "3.9")
    # An untrained drafter is slow, never wrong.
    assert done.returncode == 1 and "below 3.9" in done.stderr and "not lossless" not in done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["kind"] == "evaluate" and said["lossless"] is True and said["mismatches"] == []
    assert said["prompts"] == 2 and said["tokens"] == said["plain_forwards"] == 12
    assert 1 <= said["tau"] <= said["block_size"] == 4 and len(said["slot_acceptance"]) == 3
    assert said["speedup_forwards"] == pytest.approx(12 / said["speculative_forwards"])
    assert said["speculative_seconds"] > 0 and said["plain_seconds"] > 0
    assert said["speedup"] == pytest.approx(said["speculative_tokens_per_s"] / said["plain_tokens_per_s"])
    assert [s["name"] for s in said["sets"]] == ["heldout"] and said["sets"][0]["tokens"] == 12
    assert "evaluate: 2/2 prompts" in done.stderr and "lossless     yes" in done.stdout


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    """A folder of two prompt files: code.jsonl with bad lines and a prompt that is too long, text.jsonl is fine."""
    folder = tmp_path / "sets"
    folder.mkdir()
    good = [{"input_ids": [5, 6, 7 + i]} for i in range(2)]
    (folder / "text.jsonl").write_text("".join(json.dumps(p) + "\n" for p in good))
    bad = [{"input_ids": [1] * 5000}, {"input_ids": [9, 8]}, {"input_ids": [1, 10**6]}]
    (folder / "code.jsonl").write_text("{no json\n" + "".join(json.dumps(p) + "\n" for p in bad))
    (folder / "notes.md").write_text("not a prompt file")
    return folder


def test_several_sets_are_told_apart_and_together(root: Path, sets: Path) -> None:
    common = ["evaluate", "--threads", "1", "--target", root / "target", "--drafter", root / "checkpoints"]
    common += ["--max-new", "3"]
    done = call(*common, "--prompts", f"mine={sets}", "--prompts", sets / "text.jsonl", "--skip-bad", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert [(s["name"], s["prompts"]) for s in said["sets"]] == [("mine/code", 1), ("mine/text", 2), ("text", 2)]
    for key in ("tokens", "prompts", "verifications", "plain_forwards"):
        assert said[key] == sum(s[key] for s in said["sets"])
    file = sets / "code.jsonl"
    assert [text.split(": ")[0] for text in said["skipped"]] == [f"{file}:1", f"{file}:2", f"{file}:4"]
    assert f"left out     {file}:1" in done.stdout and "together" in done.stdout
    assert said["step"] == 10 and said["lossless"] is True

    refused = call(*common, "--prompts", sets)
    assert refused.returncode == 6 and f"{file}:1: no JSON" in refused.stderr
    file.write_text("\n".join(file.read_text().splitlines()[1:]))
    refused = call(*common, "--prompts", sets)
    assert refused.returncode == 6 and "2 prompts cannot be used" in refused.stderr
    assert f"{file}:1: the prompt has 5000 tokens" in refused.stderr and f"{file}:3: token id 1000000" in refused.stderr
    twice = call(*common, "--prompts", sets / "text.jsonl", "--prompts", sets / "text.jsonl")
    assert twice.returncode == 2 and "two prompt sets are called 'text'" in twice.stderr
    empty = call(*common, "--prompts", root)
    assert empty.returncode == 2 and "no *.jsonl" in empty.stderr
    assert call(*common[:-1], "0", "--prompts", sets).returncode == 2


def test_an_output_that_is_not_the_targets_is_told_by_line_and_ends_with_1(
    root: Path, sets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.speculate import greedy

    def changed(*args: Any, **kwargs: Any) -> list[int]:
        tokens = greedy(*args, **kwargs)
        return tokens if args[1] == [5, 6, 7] else [*tokens[:3], (tokens[3] + 1) % 60, *tokens[4:]]

    monkeypatch.setattr("trainer.evaluate.greedy", changed)
    arguments = ["evaluate", "--target", root / "target", "--drafter", root / "checkpoints", "--max-new", "5", "--json"]
    arguments += ["--threads", "1"]
    arguments += ["--prompts", sets / "text.jsonl"]
    done = call(*arguments)
    assert done.returncode == 1 and "not lossless: 1 of 2 outputs differ" in done.stderr
    (found,) = json.loads(done.stdout.splitlines()[-1])["mismatches"]
    assert (found["set"], found["line"], found["position"]) == ("text", 2, 3)
    assert found["plain"] == (found["speculative"] + 1) % 60 and found["gap"] < 0
    line = (
        f"{sets / 'text.jsonl'}:2: new token 3 is {found['speculative']}, plainly {found['plain']}; the target's logits"
    )
    assert line in done.stdout and "lossless     NO: 1 of 2" in done.stdout
    assert call(*arguments, "--allow-mismatch").returncode == 0


def test_a_drafter_is_found_wherever_it_lies(root: Path) -> None:
    folder = root / "checkpoints"
    assert open_source(folder).step == 10
    older = open_source(folder / "step-00000005")
    assert older.step == 5
    weights = Drafter(older.config, seed=5).state_dict()
    assert all(torch.equal(older.state[name], weights[name]) for name in weights)
    with pytest.raises(ConfigError, match="no drafter"):
        open_source(root / "data")


def test_export_of_an_older_checkpoint_by_name(root: Path, tmp_path: Path) -> None:
    done = call(
        "export", "--checkpoints", root / "checkpoints", "--checkpoint", "step-00000005", "--out", tmp_path / "out",
        "--dtype", "float32",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "step 5" in done.stdout
    assert load_drafter(tmp_path / "out")[1]["fc.weight"].dtype == torch.float32


def test_damage_and_nonsense_are_told(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "checkpoints", tmp_path / "checkpoints")
    weights = tmp_path / "checkpoints" / "step-00000010" / "weights.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    done = call("export", "--checkpoints", tmp_path / "checkpoints", "--out", tmp_path / "out")
    assert done.returncode == 5
    assert str(weights) in done.stderr and "step-00000005" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="hash"):
        open_source(tmp_path / "checkpoints" / "step-00000010")

    done = call("export", "--checkpoint", tmp_path / "nowhere", "--out", tmp_path / "out")
    assert done.returncode == 5 and "nowhere" in done.stderr and "next:" in done.stderr
    done = call("export", "--out", tmp_path / "out")
    assert done.returncode == 2 and "--checkpoints" in done.stderr
    done = call(
        "evaluate", "--target", root / "target", "--drafter", root / "target", "--prompts",
        root / "data" / "heldout.jsonl", "--max-new", "2",
    )  # fmt: skip
    assert done.returncode == 2 and "not a DFlash drafter" in done.stderr
