"""run.toml: every fault names file, key and fix; the document lists exactly the keys that exist."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.config import (
    ATTENTION,
    DEFAULT_EPOCHS,
    LOSS_MODES,
    OBJECTIVES,
    TABLES,
    RunConfig,
    load_config,
    parse_config,
)
from trainer.errors import ConfigErrors

REPO = Path(__file__).parents[2]


def good(**changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "target": {"path": "/models/target"},
        "drafter": {"mask_token_id": 7},
        "data": {"path": "/data/train.jsonl"},
    }
    for key, value in changes.items():
        table, _, entry = key.partition("__")
        raw.setdefault(table, {})[entry] = value
    return raw


def faults(raw: dict[str, Any]) -> list[tuple[str, str, str]]:
    with pytest.raises(ConfigErrors) as caught:
        parse_config(raw, "run.toml")
    return [(e.what, e.where, e.next) for e in caught.value.errors]


def test_toml_and_json_and_to_dict_give_the_same_config(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(
        'schema = 1\n[target]\npath = "/models/target"\n[drafter]\nmask_token_id = 7\n'
        '[data]\npath = "/data/train.jsonl"\nbuckets = [1024, 3072]\n[workers]\ntarget_devices = [0, "cuda:1"]\n'
        "drafter_devices = [2]\n[train]\nlr = 1\n"
    )
    config = load_config(toml)
    assert config.workers.target_devices == ("cuda:0", "cuda:1")
    assert config.train.lr == 1.0
    as_json = tmp_path / "run.json"
    as_json.write_text(json.dumps(config.to_dict()))
    assert load_config(as_json) == config


def test_defaults_follow_the_recipe() -> None:
    config = parse_config(good(), "run.toml")
    assert (config.epochs, config.train.lr, config.train.warmup, config.train.clip) == (6, 6e-4, 0.04, 1.0)
    assert config.buckets == (768, 1536, 3072)
    assert config.dtype == "float32"
    assert parse_config(good(train__steps=5), "x").epochs is None
    on_gpu = parse_config(good(workers__target_devices=[0], workers__drafter_devices=[1]), "run.toml")
    assert on_gpu.dtype == "bfloat16"


@pytest.mark.parametrize(("block", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_gamma_of_a_block_size(block: int, gamma: float) -> None:
    assert parse_config(good(drafter__block_size=block), "run.toml").gamma == pytest.approx(gamma)


@pytest.mark.parametrize(
    ("change", "where", "says"),
    [
        ({"train__avrage_every": 3}, "train.avrage_every", "did you mean average_every?"),
        ({"train__zzz": 1}, "train.zzz", "one of epochs, steps, lr"),
        ({"trian__lr": 1e-3}, "run.toml", "did you mean train"),
        ({"train__lr": "fast"}, "train.lr", "a number"),
        ({"train__lr": True}, "train.lr", "a number"),
        ({"train__lr": 0}, "train.lr", "above 0"),
        ({"train__seed": 2**63}, "train.seed", "at most 9223372036854775807"),  # torch takes no larger one
        ({"train__warmup": 1.5}, "train.warmup", "at most 1"),
        ({"train__epochs": 2.5}, "train.epochs", "a whole number"),
        ({"train__objective": "dpase"}, "train.objective", "did you mean 'dpace'?"),
        ({"loss__reentrant": 1}, "loss.reentrant", "true or false"),
        ({"data__buckets": 64}, "data.buckets", "a list"),
        ({"data__buckets": [64, "x"]}, "data.buckets[1]", "a whole number"),
        ({"data__buckets": [64, 128]}, "data.buckets", "max_length"),
        ({"data__path": ""}, "data.path", "JSONL"),
        ({"drafter__mask_token_id": None}, "drafter.mask_token_id", "give it"),
        ({"drafter__block_size": 4096}, "drafter.block_size", "smaller block"),
        ({"drafter__taps": 2, "drafter__layer_ids": [1, 2, 3]}, "drafter.taps", "give one"),
        ({"workers__drafter_devices": []}, "workers.drafter_devices", "at least one device"),
        ({"workers__target_devices": []}, "workers.target_devices", "at least one device"),
        ({"workers__target_devices": ["gpu0"]}, "workers.target_devices[0]", "cuda:N"),
        ({"workers__target_devices": [-1]}, "workers.target_devices[0]", "cuda:N"),
        ({"workers__target_devices": [0, 1], "workers__drafter_devices": ["cuda:1"]}, "workers", "one process a GPU"),
        ({"train__epochs": 1, "train__steps": 1}, "train", "remove one"),
        ({"drafter__attention": "flex"}, "drafter.attention", "sdpa"),
        ({"train__lr": float("nan")}, "train.lr", "above 0"),
        ({"train__lr": float("inf")}, "train.lr", "above 0"),
    ],
)
def test_a_fault_names_file_key_and_fix(change: dict[str, Any], where: str, says: str) -> None:
    found = faults(good(**change))
    assert len(found) == 1, found
    what, at, fix = found[0]
    assert at.startswith("run.toml")
    assert at.endswith(where)
    assert says in fix, fix
    assert what


def test_all_faults_are_told_at_once() -> None:
    found = faults(good(train__lr=-1, data__batch_size=0, ring__slot=3) | {"schema": 2})
    assert [where.removeprefix("run.toml: ") for _, where, _ in found] == [
        "schema",
        "data.batch_size",
        "train.lr",
        "ring.slot",
    ]


def test_tables_must_be_tables_and_files_must_parse(tmp_path: Path) -> None:
    assert "not a table" in faults({**good(), "train": 3})[0][0]
    for name, text in (("run.toml", "[train\nlr=1"), ("run.json", "{"), ("list.json", "[]"), ("bytes.toml", "\xff")):
        file = tmp_path / name
        file.write_text(text, encoding="latin-1")
        with pytest.raises(ConfigErrors) as caught:
            load_config(file)
        assert str(file) in caught.value.where
    with pytest.raises(ConfigErrors, match="cannot be read"):
        load_config(tmp_path / "absent.toml")


def test_a_python_without_toml_is_told_to_take_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.toml").write_text("schema = 1\n")
    monkeypatch.setitem(sys.modules, "tomllib", None)
    with pytest.raises(ConfigErrors, match="reads no TOML") as caught:
        load_config(tmp_path / "run.toml")
    assert "run.json" in caught.value.next


def test_overrides(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(good()))
    config = load_config(
        file, ["train.lr=1e-3", "data.path=/other", "workers.target_devices=[0,1]", "workers.drafter_devices=[2]"]
    )
    assert config.train.lr == 1e-3
    assert config.data.path == "/other"
    assert config.workers.target_devices == ("cuda:0", "cuda:1")
    for wrong in ("train.lr", "lr=3", "train.=3"):
        with pytest.raises(ConfigErrors, match=r"no table\.key=value"):
            load_config(file, [wrong])
    with pytest.raises(ConfigErrors, match="unknown key"):
        load_config(file, ["train.lrr=1"])


def test_lists_here_are_the_numerics_own() -> None:
    from trainer.attention import BACKENDS
    from trainer.loss import MODES
    from trainer.loss import OBJECTIVES as KNOWN

    assert LOSS_MODES == MODES
    assert OBJECTIVES == KNOWN
    assert ("auto", *BACKENDS) == ATTENTION


def test_the_document_lists_every_key_with_its_default() -> None:
    text = (REPO / "docs" / "run-config.md").read_text(encoding="utf-8")
    documented: dict[str, dict[str, str]] = {}
    for section in text.split("\n## ")[1:]:
        name = re.match(r"\[(\w+)\]", section)
        if name:
            rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|", section, flags=re.MULTILINE)
            documented[name.group(1)] = {key: default.strip(" `") for key, default in rows}
    assert list(documented) == list(TABLES)
    for table, cls in TABLES.items():
        assert set(documented[table]) == {f.name for f in dataclasses.fields(cls)}, table
        for f in dataclasses.fields(cls):
            told = documented[table][f.name]
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                assert told == "required", (table, f.name)
            elif isinstance(f.default, str):
                assert told == json.dumps(f.default), (table, f.name)
            elif isinstance(f.default, (int, float)):
                assert json.loads(told) == f.default, (table, f.name)
    assert documented["train"]["epochs"] == str(DEFAULT_EPOCHS)


def test_config_and_help_need_no_torch() -> None:
    code = (
        "import sys; from trainer.cli import main; import trainer.prepare, trainer.checkpoint, trainer.plan_record\n"
        "import trainer.scheduler, trainer.signals\n"
        "try: main(['--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_config_is_frozen() -> None:
    config: RunConfig = parse_config(good(), "run.toml")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.lr = 3  # type: ignore[misc]
