"""The demo target: a folder that others can load, built once, never half."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from demo_parts import LIMIT, SMALL, TINY, call, call_apart, start

from trainer.demo.target import Recipe, build, key_of
from trainer.demo.text import PROMPT_CHARS, prompts, python_topics, split
from trainer.demo.tokenizer import MASK, VOCAB_SIZE, save_tokenizer
from trainer.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with target/ and data/, made by the command."""
    root = tmp_path_factory.mktemp("demo")
    done = call_apart("demo-target", "--out", root / "target", *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["kind"], said["reused"]) == ("demo-target", False)
    assert "demo target: 4/4 steps" in done.stderr
    return root


def test_any_tool_can_load_the_target(built: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(built / "target")
    tokenizer = AutoTokenizer.from_pretrained(built / "target")
    assert 1_000_000 < sum(p.numel() for p in model.parameters()) < 1_500_000
    assert len(tokenizer) == model.config.vocab_size == VOCAB_SIZE
    text = 'The "assert" statement\n\n   é “x” \t\x00<|mask|>'
    ids = tokenizer(text).input_ids
    assert ids == [*text.removesuffix("<|mask|>").encode(), MASK]
    assert tokenizer.decode(ids) == text
    assert model(torch.tensor([ids])).logits.shape == (1, len(ids), VOCAB_SIZE)


def test_second_call_finds_it_and_another_recipe_builds_anew(built: Path, tmp_path: Path) -> None:
    shutil.copytree(built, tmp_path / "root")
    target = tmp_path / "root" / "target"
    recipe = Recipe(steps=4, train_prompts=40, held_out_prompts=6)
    steps: list[int] = []
    again = build(target, recipe, lambda done, total, loss: steps.append(done))
    assert again.reused and not steps
    assert again.loss == pytest.approx(json.loads((target / ".demo.json").read_text())["loss"])
    other = build(target, replace(TINY, steps=1), lambda done, total, loss: steps.append(done))
    assert not other.reused and steps == [0, 1]
    assert sorted(p.name for p in target.parent.iterdir()) == ["data", "target"]


def test_lost_prompts_are_cut_again_the_same(built: Path, tmp_path: Path) -> None:
    shutil.copytree(built, tmp_path / "root")
    lost = tmp_path / "root" / "data" / "heldout.jsonl"
    before = lost.read_bytes()
    lost.write_text("torn")
    assert build(tmp_path / "root" / "target", Recipe(steps=4, train_prompts=40, held_out_prompts=6)).reused
    assert lost.read_bytes() == before


def test_held_out_prompts_are_in_no_training_text() -> None:
    text = split(python_topics())
    made, kept = prompts(text, 1000, 48, seed=0)
    assert len(set(made)) == 1000 and len(set(kept)) == 48
    assert not set(made) & set(kept)
    assert all(len(p.encode()) == PROMPT_CHARS for p in made + kept)
    assert all(p in text.train for p in made)
    for prompt in kept:
        assert prompt in text.held_out
        assert prompt[: PROMPT_CHARS // 2] not in text.train and prompt[PROMPT_CHARS // 2 :] not in text.train
    with pytest.raises(DataError, match="different prompts"):
        prompts(text, 10**6, 1, seed=0)


def test_key_follows_what_the_target_is_made_of() -> None:
    text = split(python_topics())
    key = key_of(Recipe(), text)
    assert key == key_of(Recipe(), split(python_topics()))
    assert key != key_of(Recipe(steps=151), text)
    assert key != key_of(Recipe(), split({**python_topics(), "new": "another topic"}))


@pytest.mark.parametrize("when", ["training", "saving"])
def test_a_kill_leaves_nothing_half_done(tmp_path: Path, when: str) -> None:
    out = tmp_path / "root" / "target"
    if when == "training":
        process = start("demo-target", "--out", out, "--steps", "100000", "--threads", "1")
        assert process.stderr is not None
        for line in process.stderr:
            if "loss " in line:
                break
        time.sleep(random.random())
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=LIMIT)
        assert not out.exists() and not list(tmp_path.glob("root/*"))
    else:
        # What a kill between the writes would leave: a folder beside, without its last files.
        rest = tmp_path / "root" / ".target.building-1"
        rest.mkdir(parents=True)
        save_tokenizer(rest)
    build(out, TINY, threads=1)
    assert sorted(p.name for p in out.parent.iterdir()) == ["data", "target"]


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    done = call("demo-target", "--out", tmp_path, *SMALL)
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr and "--out" in done.stderr and "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_nonsense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        build(tmp_path / "t", Recipe(steps=0))
    assert not (tmp_path / "t").exists()
