"""Regenerated responses: the target's own, whatever the batch, and whole after any kill."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from demo_parts import LIMIT, TINY, call, start

from trainer.demo.target import build
from trainer.errors import ConfigError, DataError
from trainer.prompts import read_prompts
from trainer.regenerate import Plan, batches, greedy_batch, regenerate
from trainer.speculate import greedy
from trainer.target import Target, load_target

MAX_NEW = 12


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, and prompts.jsonl with 30 prompts of 1 to 90 bytes."""
    root = tmp_path_factory.mktemp("regenerate")
    build(root / "target", TINY, threads=1)
    draw = random.Random(0)
    lines = (root / "data" / "prompts.jsonl").read_text().splitlines()
    texts = [(json.loads(line)["prompt"] * 2)[: draw.randint(1, 90)] for line in lines]
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
    return root


@pytest.fixture(scope="module")
def target(root: Path) -> Target:
    torch.set_num_threads(1)
    return load_target(root / "target", dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def whole(root: Path) -> bytes:
    """The output of an undisturbed run."""
    out = root / "whole.jsonl"
    regenerate(root / "target", root / "prompts.jsonl", out, max_new=MAX_NEW, batch=8)
    return out.read_bytes()


def test_batched_equals_unbatched(target: Target) -> None:
    draw = random.Random(1)
    rows = [[draw.randrange(256) for _ in range(n)] for n in (1, 3, 9, 9, 40, 41)]
    alone = [greedy(target, row, MAX_NEW) for row in rows]
    assert greedy_batch(target, rows, MAX_NEW) == alone
    # Ends: the token that a row gives third ends it there; other rows go on.
    end = alone[4][2]
    expected = [greedy(target, row, MAX_NEW, {end}) for row in rows]
    assert len(expected[4]) <= 3
    assert greedy_batch(target, rows, MAX_NEW, {end}) == expected
    assert greedy_batch(target, rows, 1) == [tokens[:1] for tokens in alone]


def test_output_is_training_data_of_the_targets_own_text(root: Path, target: Target, whole: bytes) -> None:
    from trainer.data import scan

    rows = [json.loads(line) for line in whole.splitlines()]
    asked = sorted(len(p.text or "") for p in read_prompts(root / "prompts.jsonl")[0])
    assert [row["loss_mask"].index(1) for row in rows] == asked
    for row, length in list(zip(rows, asked, strict=True))[::7]:
        assert row["loss_mask"] == [0] * length + [1] * MAX_NEW
        assert row["input_ids"][length:] == greedy(target, row["input_ids"][:length], MAX_NEW)
    index = scan(root / "whole.jsonl", vocab_size=260, max_length=200, max_bad_lines=0)
    assert len(index.ids) == 30


def test_finished_output_is_not_made_again(root: Path, whole: bytes) -> None:
    done = call(
        "regenerate", "--target", root / "target", "--prompts", root / "prompts.jsonl", "--out", root / "whole.jsonl",
        "--max-new", str(MAX_NEW), "--batch", "8", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["made"] == 0
    assert "found 30 responses" in done.stdout


def test_cut_anywhere_it_ends_the_same(root: Path, whole: bytes, tmp_path: Path) -> None:
    """A kill between any two bytes leaves a prefix of the file."""
    draw = random.Random()
    line = whole.index(b"\n") + 1
    for cut in (0, line - 1, line, draw.randrange(len(whole)), len(whole) - 1):
        out = tmp_path / f"{cut}.jsonl"
        out.write_bytes(whole[:cut])
        shutil.copy(root / "whole.jsonl.from.json", tmp_path / f"{cut}.jsonl.from.json")
        plans: list[Plan] = []
        regenerate(
            root / "target", root / "prompts.jsonl", out, max_new=MAX_NEW, batch=8, planned=plans.append
        )  # fmt: skip
        assert plans[0].done == whole[:cut].count(b"\n")
        assert out.read_bytes() == whole, f"cut at byte {cut}"


def test_killed_at_random_moments_it_ends_the_same(root: Path, whole: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    arguments = [
        "regenerate", "--target", root / "target", "--prompts", root / "prompts.jsonl", "--out", out,
        "--max-new", str(MAX_NEW), "--batch", "8", "--threads", "1",
    ]  # fmt: skip
    process = start(*arguments)
    limit = time.monotonic() + LIMIT
    while not (out.exists() and out.stat().st_size) and time.monotonic() < limit:
        time.sleep(0.005)
    time.sleep(random.random() * 0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=LIMIT)
    assert whole.startswith(out.read_bytes())
    done = call(*arguments)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == whole


def test_another_origin_is_refused(root: Path, whole: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(whole)
    shutil.copy(root / "whole.jsonl.from.json", tmp_path / "out.jsonl.from.json")
    with pytest.raises(ConfigError, match="max_new differ"):
        regenerate(root / "target", root / "prompts.jsonl", out, max_new=MAX_NEW + 1, batch=8)
    (tmp_path / "out.jsonl.from.json").unlink()
    with pytest.raises(ConfigError, match="made from something else"):
        regenerate(root / "target", root / "prompts.jsonl", out, max_new=MAX_NEW, batch=8)
    assert out.read_bytes() == whole


def test_edited_output_is_not_built_upon(root: Path, whole: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    lines = whole.splitlines(keepends=True)
    out.write_bytes(b"".join([lines[0], lines[20], *lines[2:10]]))
    shutil.copy(root / "whole.jsonl.from.json", tmp_path / "out.jsonl.from.json")
    with pytest.raises(DataError, match="no answer") as caught:
        regenerate(root / "target", root / "prompts.jsonl", out, max_new=MAX_NEW, batch=8)
    assert caught.value.where == f"{out}:2"


def test_two_writers_are_one_too_many(root: Path, whole: bytes, tmp_path: Path) -> None:
    import fcntl

    out = tmp_path / "out.jsonl"
    with out.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another regenerate"):
            regenerate(root / "target", root / "prompts.jsonl", out, max_new=MAX_NEW, batch=8)


def test_bad_prompt_lines_are_all_named(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(
        b'{"prompt": "good"}\n{"prompt": \n\n[1]\n{"text": "x"}\n{"prompt": ""}\n{"input_ids": [1, -2]}\n'
        b'{"prompt": "\xff"}\n{"input_ids": [true]}\n{"messages": []}\n' + b"[" * 5000 + b"\n"
    )
    out = tmp_path / "out.jsonl"
    arguments = ["regenerate", "--target", root / "target", "--prompts", file, "--out", out, "--max-new", "2"]
    done = call(*arguments)
    assert done.returncode == 6, done.stderr
    for line in (2, 4, 5, 6, 7, 8, 9, 10, 11):
        assert f"{file}:{line}: " in done.stderr
    assert f"{file}:1: " not in done.stderr and "--skip-bad" in done.stderr and "Traceback" not in done.stderr
    assert not out.exists()
    done = call(*arguments, "--skip-bad")
    assert done.returncode == 0, done.stderr
    assert f"left out: {file}:2: " in done.stderr
    assert out.read_bytes().count(b"\n") == 1


@pytest.mark.parametrize(
    ("line", "fault", "place"),
    [
        ({"input_ids": [5, 260]}, "not below the target's vocabulary", "line"),
        ({"prompt": "x" * 1020}, "pass the target's length", "line"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "no chat template", "target"),
    ],
)
def test_prompts_that_do_not_fit_the_target(
    root: Path, tmp_path: Path, line: dict[str, object], fault: str, place: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "fits"}) + "\n" + json.dumps(line) + "\n")
    with pytest.raises((DataError, ConfigError), match=fault) as caught:
        regenerate(root / "target", file, tmp_path / "out.jsonl", max_new=8, batch=2)
    assert (f"{file}:2: " in caught.value.what) == (place == "line")
    assert (caught.value.where == str(root / "target")) == (place == "target")
    assert not (tmp_path / "out.jsonl").read_bytes()


def test_no_target_no_prompts(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a model folder"):
        regenerate(tmp_path, root / "prompts.jsonl", tmp_path / "out.jsonl", max_new=1, batch=1)
    with pytest.raises(ConfigError, match="cannot be read"):
        regenerate(root / "target", tmp_path / "none.jsonl", tmp_path / "out.jsonl", max_new=1, batch=1)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no prompts"):
        regenerate(root / "target", tmp_path / "empty.jsonl", tmp_path / "out.jsonl", max_new=1, batch=1)


def test_batches_hold_rows_of_similar_length() -> None:
    lengths = [1, 2, 10, 17, 18, 40, 100, 100, 120, 126, 400]
    ranges = list(batches(lengths, 3))
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(len(lengths)))
    assert ranges == [(0, 3), (3, 5), (5, 6), (6, 9), (9, 10), (10, 11)]
    assert list(batches([5], 8)) == [(0, 1)]
