"""Conversations as a run's data: made into tokens once, kept, found again, and never half of them."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_parts import MARKED, PLAIN, save_words, turns
from demo_parts import call, environment
from pipeline_support import Run

import trainer.corpus as corpus_module
from trainer.config import DataConfig
from trainer.corpus import open_corpus
from trainer.data import SampleReader
from trainer.errors import ConfigError, DataError, TrainerError
from trainer.plan import Plan

VOCAB = 260


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """As much of a target as the data need: its tokenizer and the tokens that end its text."""
    folder = save_words(tmp_path / "target")
    (folder / "config.json").write_text('{"eos_token_id": 257}')
    return folder


def write_chats(path: Path, count: int, *, seed: int = 0, words: int = 12) -> Path:
    draw = random.Random(seed)
    said = ["hey", "you", "yes", "the", "way", "to", "y", "there"]
    with path.open("w", encoding="utf-8") as opened:
        for _ in range(count):
            texts = [" ".join(draw.choices(said, k=draw.randint(2, words))) for _ in range(2 * draw.randint(1, 2))]
            opened.write(json.dumps({"messages": turns(*texts)}) + "\n")
    return path


def opened(data: Path, target: Path, kept: Path | None, **changes: Any) -> corpus_module.Corpus:
    more = {k: changes.pop(k) for k in ("keep", "progress", "limit") if k in changes}
    config = replace(DataConfig(path=str(data), max_length=200), **changes)
    return open_corpus(config, str(target), VOCAB, kept, **more)


def test_a_samples_id_is_its_line_and_bad_lines_are_named_in_the_source(tmp_path: Path, target: Path) -> None:
    data = write_chats(tmp_path / "d.jsonl", 4)
    lines = data.read_bytes().splitlines()
    ids = b'{"input_ids": [1, 2, 3], "prompt_length": 1}'
    lines[1:3] = [b"{", b'{"messages": [{"role": "user", "content": "a"}]}', ids, b'{"input_ids": [1, 260, 3]}', b""]
    data.write_bytes(b"\n".join(lines))
    index = opened(data, target, tmp_path, max_bad_lines=4).index
    assert list(index.ids) == [0, 3, 6]
    assert [(b.number, b.reason[:28]) for b in index.bad] == [
        (1, "no JSON: Expecting property "),
        (2, "no turn of the assistant: no"),
        (4, "token 260 is outside the tar"),
        (5, "empty line"),
    ]
    assert index.source == str(data) and index.path != str(data)
    reader = SampleReader(index.path, index.size, index.mtime_ns, 200)
    assert reader.read([index.place(3)])[0].input_ids == [1, 2, 3]
    with pytest.raises(DataError, match="4 bad lines in all, 3 allowed") as caught:
        opened(data, target, tmp_path, max_bad_lines=3)
    assert caught.value.where == f"{data}:2" and caught.value.exit_code == 6


def test_tokens_are_made_once_and_found_without_transformers(tmp_path: Path, target: Path) -> None:
    data, kept = write_chats(tmp_path / "d.jsonl", 5), tmp_path / "kept"
    first = opened(data, target, kept).index
    script = (
        "import sys; from pathlib import Path; from trainer.config import DataConfig\n"
        "from trainer.corpus import open_corpus\n"
        f"index = open_corpus(DataConfig(path={str(data)!r}), {str(target)!r}, 260, Path({str(kept)!r})).index\n"
        "print(index.sha256, 'transformers' in sys.modules, 'torch' in sys.modules)"
    )
    again = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert again.stdout.split() == [first.sha256, "False", "False"], again.stderr


@pytest.mark.parametrize("changed", ["source", "template", "options", "turns", "tokenizer", "ends"])
def test_whatever_decides_the_tokens_makes_them_anew(tmp_path: Path, target: Path, changed: str) -> None:
    data, kept = write_chats(tmp_path / "d.jsonl", 3), tmp_path / "kept"
    opened(data, target, kept)
    more: dict[str, Any] = {}
    if changed == "source":
        write_chats(data, 3, seed=1)
    elif changed == "template":
        (tmp_path / "own.jinja").write_text(MARKED)
        more["chat_template"] = str(tmp_path / "own.jinja")
    elif changed == "options":
        more["template_options"] = '{"a": 1}'
    elif changed == "turns":
        more["turns"] = "last"
    elif changed == "tokenizer":
        save_words(target, template=PLAIN + " ")
    else:
        (target / "config.json").write_text('{"eos_token_id": [257, 258]}')
    opened(data, target, kept, **more)
    assert len(list((kept / "tokens").glob("*.jsonl"))) == 2
    opened(data, target, kept, **more, max_length=190)  # a cut needs no new tokens
    assert len(list((kept / "tokens").glob("*.jsonl"))) == 2


@pytest.mark.parametrize("damage", ["cut", "changed", "no stamp", "foreign stamp"])
def test_damaged_tokens_are_not_trained_on(tmp_path: Path, target: Path, damage: str) -> None:
    data = write_chats(tmp_path / "d.jsonl", 5)
    first = opened(data, target, tmp_path)
    file = Path(first.index.path)
    whole = file.read_bytes()
    if damage == "cut":
        file.write_bytes(whole[: len(whole) // 2])
    elif damage == "changed":
        at = whole.index(b"1,1", len(whole) // 2)
        file.write_bytes(whole[:at] + b"0" + whole[at + 1 :])
    elif damage == "no stamp":
        file.with_suffix(".json").unlink()
    else:
        file.with_suffix(".json").write_text("[]")
    again = opened(data, target, tmp_path)
    assert file.read_bytes() == whole and again.index.sha256 == first.index.sha256
    assert bool(again.notes) == (damage == "changed")


def test_killed_while_tokens_are_made_it_leaves_none_that_are_half(tmp_path: Path) -> None:
    data = write_chats(tmp_path / "d.jsonl", 3000)
    script = (
        "import sys, trainer.corpus as c; from pathlib import Path; from trainer.config import DataConfig\n"
        "c.QUIET_S = 0.0\n"
        "c.open_corpus(DataConfig(path=sys.argv[1]), sys.argv[2], 260, Path(sys.argv[3]), progress=print)"
    )
    target = save_words(tmp_path / "target")
    for stop in (0, 1):
        process = subprocess.Popen(
            [sys.executable, "-uc", script, str(data), str(target), str(tmp_path)],
            env=environment(), stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        for _ in range(1 + 3 * stop):
            assert "3000" in process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        (left,) = (tmp_path / "tokens").iterdir()  # what the one before left is gone
        assert left.name.startswith(".")
    index = opened(data, target, tmp_path).index
    assert len(index.ids) == 3000
    assert sorted(p.suffix for p in (tmp_path / "tokens").iterdir()) == [".json", ".jsonl"]


def test_progress_is_told_with_rate_and_time_left_and_may_stop_the_work(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_chats(tmp_path / "d.jsonl", 600)
    told: list[tuple[int, int, str]] = []
    monkeypatch.setattr(corpus_module, "QUIET_S", 3600.0)
    opened(data, target, tmp_path / "quiet", progress=lambda *a: told.append(a))
    assert told == []
    monkeypatch.setattr(corpus_module, "QUIET_S", 0.0)
    told.clear()
    opened(data, target, tmp_path / "told", progress=lambda *a: told.append(a))
    assert [(done, total) for done, total, _ in told] == [(256, 600), (512, 600), (600, 600)]
    assert "lines/s" in told[0][2] and told[0][2].endswith("s_left") and " " not in told[0][2]

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    with pytest.raises(Stop):
        opened(data, target, tmp_path / "stopped", progress=stop)
    assert not list((tmp_path / "stopped" / "tokens").iterdir())


def test_many_bad_lines_end_the_work_early(tmp_path: Path, target: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"messages": turns("a", "b")}) + "\n" + '{"messages": 3}\n' * 3000)
    with pytest.raises(DataError, match=r"line 2: messages is no list.*among the first 1024, 5 allowed"):
        opened(data, target, tmp_path, max_bad_lines=5)


def test_check_writes_nothing_and_looks_at_the_first_lines(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "GLANCE", 10)
    few, many = write_chats(tmp_path / "few.jsonl", 10), write_chats(tmp_path / "many.jsonl", 11)
    before = sorted(p.name for p in tmp_path.iterdir())
    assert opened(few, target, tmp_path, keep=False).index.whole
    part = opened(many, target, None, keep=False).index
    assert len(part.ids) == 10 and not part.whole and not part.sha256
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    opened(many, target, tmp_path)
    assert opened(many, target, tmp_path, keep=False).index.whole  # the kept ones are looked at


def test_check_leaves_damaged_tokens_as_they_are_and_says_so(tmp_path: Path, target: Path) -> None:
    data = write_chats(tmp_path / "d.jsonl", 5)
    file = Path(opened(data, target, tmp_path).index.path)
    damaged = file.read_bytes().replace(b"1,1", b"0,1", 1)
    file.write_bytes(damaged)
    checked = opened(data, target, tmp_path, keep=False)
    assert file.read_bytes() == damaged and len(checked.index.ids) == 5
    assert "are damaged: run makes them anew" in checked.notes[0]


def test_what_another_machine_writes_into_the_same_folder_is_left_alone(tmp_path: Path, target: Path) -> None:
    data = write_chats(tmp_path / "d.jsonl", 5)
    file = Path(opened(data, target, tmp_path).index.path)
    file.unlink()
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = socket.gethostname()
    # Pids of another machine: one that lives here by chance (this very one), one that does not.
    others = [file.with_name(f".{file.name}.192.0.2.7.{pid}") for pid in (ended.pid, os.getpid())]
    own = file.with_name(f".{file.name}.{here}.{ended.pid}")
    for half in (*others, own):
        half.write_text("half")
    opened(data, target, tmp_path)
    assert [half.read_text() for half in others] == ["half", "half"] and not own.exists()
    assert len(file.read_bytes().splitlines()) == 5


def test_a_cut_that_takes_all_the_loss_is_a_bad_line(tmp_path: Path, target: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"messages": turns(t, "yes yes")}) + "\n" for t in ("a", "a" * 100)))
    index = opened(data, target, tmp_path, max_length=80, max_bad_lines=1).index
    assert list(index.ids) == [0]
    assert "no two supervised tokens in a row within 80 tokens" in index.bad[0].reason


def test_batches_are_made_of_samples_of_one_bucket(tmp_path: Path, target: Path) -> None:
    index = opened(write_chats(tmp_path / "d.jsonl", 200, words=30), target, tmp_path, max_length=512).index
    plan = Plan(index.ids, index.lengths, 0, 4, (64, 128, 256, 512))
    lengths = dict(zip(index.ids, index.lengths, strict=True))
    whole = [plan.batch(n) for n in range(plan.per_epoch - 4)]
    for batch in whole:
        assert {min(b for b in plan.buckets if lengths[i] <= b) for i in batch.sample_ids} == {batch.length}
    assert len({b.length for b in whole}) >= 3


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda t: save_words(t, extra=10), "the tokenizer has 266 tokens, the target's vocabulary 260"),
        (lambda t: (t / "config.json").write_text('{"eos_token_id": 259}'), "ends its text with token 259"),
        (lambda t: (t / "tokenizer.json").unlink(), "tokenizer cannot be loaded"),
        (lambda t: (t / "tokenizer.json").write_text("{"), "tokenizer cannot be loaded"),
        (lambda t: save_words(t, template=None), "the tokenizer has no chat template"),
        (lambda t: save_words(t, template="{% if %}"), "the chat template cannot be parsed"),
    ],
)
def test_a_tokenizer_that_is_not_the_targets(
    tmp_path: Path, target: Path, make: Callable[[Path], object], fault: str
) -> None:
    make(target)
    with pytest.raises(ConfigError, match=fault):
        opened(write_chats(tmp_path / "d.jsonl", 2), target, tmp_path)
    assert not list(tmp_path.glob("tokens/*"))


def test_another_tokenizer_must_have_the_targets_tokens(tmp_path: Path, target: Path) -> None:
    data, other = write_chats(tmp_path / "d.jsonl", 2), save_words(tmp_path / "other", template=MARKED)
    assert opened(data, target, tmp_path, tokenizer=str(other)).index.ids
    text = json.loads((other / "tokenizer.json").read_text())
    vocab = text["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(ConfigError, match=r"not the target's: 'a' is token 64 of the target, 65 of"):
        opened(data, target, tmp_path, tokenizer=str(other))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"template_options": "{"}, "is no JSON"),
        ({"template_options": "[1]"}, "is no JSON object"),
        ({"chat_template": "/absent.jinja"}, "chat template cannot be read"),
    ],
)
def test_options_that_are_none(tmp_path: Path, target: Path, changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault) as caught:
        opened(write_chats(tmp_path / "d.jsonl", 2), target, tmp_path, **changes)
    assert caught.value.where.startswith("data.")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, target: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainerError, match="tokens cannot be kept") as caught:
        opened(write_chats(tmp_path / "d.jsonl", 2), target, tmp_path, cache=str(tmp_path / "file"))
    assert caught.value.where == str(tmp_path / "file")


def chat_target(tiny_target: Path, tmp_path: Path) -> Path:
    """The tiny target with a tokenizer that has a chat template."""
    target = tmp_path / "target"
    target.mkdir()
    for file in tiny_target.iterdir():
        os.link(file, target / file.name)
    save_words(target)
    return target


def test_a_run_trains_on_conversations_and_goes_on_with_the_same_tokens(
    make_run: Callable[..., Run], tiny_target: Path, tmp_path: Path
) -> None:
    target = chat_target(tiny_target, tmp_path)
    data = write_chats(tmp_path / "chats.jsonl", 24, words=4)
    run = make_run(data=data, **{"target.path": str(target), "data.max_length": 128, "data.buckets": [64, 128]})
    checked = call("check", "--config", run.config)
    report = json.loads(checked.stdout)
    assert checked.returncode == 0 and report["samples"] == 24, report
    assert run.finish() == 0, run.log
    tokens = list((run.root / "checkpoints" / "tokens").glob("*.jsonl"))
    assert len(tokens) == 1
    again = call("check", "--config", run.config, "--checkpoints", run.root / "checkpoints", "--set", "train.epochs=2")
    assert json.loads(again.stdout)["from_step"] == report["total_steps"]
    other = ("check", "--config", run.config, "--checkpoints", run.root / "checkpoints", "--set", "data.turns=last")
    report = json.loads(call(*other).stdout)
    assert report["errors"][0]["exit_code"] == 6 and "tokens made from the data are not" in report["errors"][0]["what"]
    (target / "tokenizer.json").unlink()  # and the kept tokens are another tokenizer's now
    assert call("check", "--config", run.config, "--checkpoints", run.root / "checkpoints").returncode == 2


def test_a_stop_while_tokens_are_made_ends_the_run_soon(
    make_run: Callable[..., Run], tiny_target: Path, tmp_path: Path
) -> None:
    target = chat_target(tiny_target, tmp_path)
    run = make_run(data=write_chats(tmp_path / "chats.jsonl", 60000, words=4), **{"target.path": str(target)})
    process = run.start()
    run.until(lambda: "dflash stage=tokenizing k=" in run.log)
    process.terminate()
    assert process.wait(60) == 3, run.log
    assert "event=stopped" in run.log and "Traceback" not in run.log and "n=60000" in run.log
    assert not list((run.checkpoints / "tokens").iterdir())
