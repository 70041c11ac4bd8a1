"""No command of the trainer is silent while its data, its target, its disk or a server is slow."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_server import ChatServer
from demo_parts import TINY
from schemas import whole
from shows import standard_error
from test_demo_evaluate import save

from trainer.checkpoint import Store
from trainer.cli import main
from trainer.demo.target import build
from trainer.demo.tokenizer import MASK
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.target import load_target


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, data/, checkpoints/ of an untrained drafter, and its export."""
    root = tmp_path_factory.mktemp("shows")
    build(root / "target", TINY, threads=1)
    hf = type("Hf", (), json.loads((root / "target" / "config.json").read_text()))()
    store = Store(root / "checkpoints", keep_last=5)
    save(store, Drafter(DrafterConfig.from_target(hf, layers=1, block_size=4, mask_token_id=MASK, taps=2), seed=1), 5)
    store.close()
    assert main(["export", "--checkpoints", str(root / "checkpoints"), "--out", str(root / "export")]) == 0
    (root / "prompts.jsonl").write_text('{"prompt": "help"}\n' * 3)
    devices = {"target_devices": ["cpu"], "drafter_devices": ["cpu"]}
    config: dict[str, Any] = {"target": {"path": str(root / "target")}, "data": {"path": str(root / "prompts.jsonl")}}
    config["drafter"] = {"mask_token_id": MASK}
    (root / "run.json").write_text(json.dumps({"schema": 1, **config, "workers": devices}))
    (root / "run/attempts/1").mkdir(parents=True)
    begin = {"k": "begin", "attempt_t": 1.0, "seed": 0, "from_step": 0, "epoch": 0, "from_batch": 0}
    (root / "run/attempts/1/plan.jsonl").write_text(json.dumps({**begin, "accepted": [[0, 0]]}) + "\n")
    return root


#: What is slow, the command's words, and what it shows meanwhile. `{r}` = the root, `{n}` = a new folder.
SLOW = [
    ("trainer.target.load_target", "evaluate --target {r}/target --drafter {r}/export --prompts {r}/prompts.jsonl "
     "--max-new 4 --allow-mismatch", "loading the target"),
    ("trainer.evaluate.evaluate", "evaluate --target {r}/target --drafter {r}/export --prompts {r}/prompts.jsonl "
     "--max-new 4 --allow-mismatch", "evaluate: 0/3 prompts"),
    ("trainer.target.load_target", "regenerate --target {r}/target --prompts {r}/prompts.jsonl --out {n}/o.jsonl "
     "--max-new 4", "responses: 0/3 prompts"),
    ("trainer.regenerate.read_prompts", "regenerate --target {r}/target --prompts {r}/prompts.jsonl --out {n}/o.jsonl "
     "--max-new 4", "reading the prompts"),
    ("trainer.checkpoint.sha256", "export --checkpoints {r}/checkpoints --out {n}/e", "verifying step-00000005: 0/"),
    ("safetensors.torch.save_file", "export --checkpoints {r}/checkpoints --out {n}/e", "writing: "),
    ("trainer.checkpoint.sha256", "verify --checkpoints {r}/checkpoints", "verifying step-00000005: 0/"),
    ("trainer.export.load_drafter", "import {r}/export", "reading the drafter"),
    ("trainer.prepare.prepare", "check --config {r}/run.json", "reading config, target, data and checkpoint"),
    ("trainer.prepare.prepare", "features --config {r}/run.json --out {n}/f", "reading target and data"),
    ("trainer.nodes_record.audit_nodes", "audit {r}/run/attempts", "replaying the record"),
    ("trainer.demo.target.build", "demo-target --out {r}/target --steps 4 --prompts 30 --held-out 4", "demo target"),
]  # fmt: skip


NAMES = [f"{words.split()[0]}-{slow.rpartition('.')[2]}" for slow, words, _ in SLOW]


@pytest.mark.parametrize(("slow", "words", "said"), SLOW, ids=NAMES)
def test_slow_work_shows_itself(
    slow: str, words: str, said: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.bar.TERMINAL_BEAT_S", 0.05)
    with standard_error() as told:
        patch(monkeypatch, slow, lambda: told.until_told())
        code = main(words.format(r=root, n=tmp_path).split())
        monkeypatch.undo()
    assert code in (0, 1, 2, 6), told.text  # what it says in the end is not the matter here
    assert said in told.text, told.text


def patch(monkeypatch: pytest.MonkeyPatch, name: str, wait: Callable[[], None]) -> None:
    """The function of this name waits first, once; nothing of what it does is changed."""
    import importlib

    module, _, attribute = name.rpartition(".")
    real, waited = getattr(importlib.import_module(module), attribute), []

    def slowly(*args: Any, **options: Any) -> Any:
        if not waited:
            waited.append(True)
            wait()
        return real(*args, **options)

    monkeypatch.setattr(name, slowly)


def test_a_slow_server_too(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.bar.TERMINAL_BEAT_S", 0.05)
    with ChatServer() as server, standard_error() as told:
        server.delay_s = 0.5  # each answer; the bar has room for nine beats
        words = f"regenerate --server {server.url}/v1 --model m --prompts {root}/prompts.jsonl --max-new 4"
        code = main([*words.split(), "--out", str(tmp_path / "o.jsonl"), "--concurrency", "1"])
    assert code == 0 and told.text.count("\r") >= 4, told.text


def test_what_is_said_with_json_fits_its_schema(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in dict.fromkeys(words for _, words, _ in SLOW if not words.startswith("features")):
        json_too = [] if line.startswith("check") else ["--json"]
        main([*line.format(r=root, n=tmp_path).split(), *json_too])
        captured = capsys.readouterr()
        assert captured.out, f"{line}: {captured.err}"
        said = json.loads(captured.out.splitlines()[-1])
        assert said["kind"] == line.split()[0]
        whole().validate(said)


def test_plain_lines_come_at_least_every_two_seconds() -> None:
    from trainer import bar

    assert bar.PLAIN_EVERY_S <= 2.0 and bar.TERMINAL_BEAT_S <= 2.0


def test_weights_are_counted_while_a_target_loads(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.loading.EVERY_S", 0.0)
    told: list[tuple[int, int]] = []
    target = load_target(root / "target", dtype=torch.float32, device="cpu", progress=lambda d, n: told.append((d, n)))
    done, of = zip(*told, strict=True)
    assert list(done) == sorted(done) and len(set(of)) == 1 and done[-1] == of[0] > target.num_layers
    told.clear()
    load_target(root / "target", dtype=torch.float32, device="cpu")  # nobody is told, and the hook is gone
    assert not told


def test_a_run_tells_the_weights_of_its_targets(make_run: Callable[..., Any]) -> None:
    run = make_run(samples=8)
    assert run.finish() == 0, run.log
    lines = [line for line in run.log.splitlines() if "stage=loading" in line]
    assert any(re.fullmatch(r"dflash stage=loading k=\d+ n=\d+ what=target0:weights", line) for line in lines), lines
    assert re.fullmatch(r"dflash stage=loading k=2 n=2 what=(target|drafter)0", lines[-1])
