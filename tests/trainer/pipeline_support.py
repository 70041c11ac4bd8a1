"""What the pipeline's tests share: a data set made on the spot, and a launcher under test."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]


VOCAB, HIDDEN, LAYERS, MASK = 260, 64, 4, 259


def write_target(folder: Path) -> Path:
    """A random Qwen3 of 4 layers, H 64, 260 tokens, float32, in Hugging Face's layout; written without transformers."""
    import torch
    from safetensors.torch import save_file

    heads, kv, dim, inner = 4, 2, 16, 128
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(0.0, 0.1, generator=generator)

    weights = {"model.embed_tokens.weight": drawn(VOCAB, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for i in range(LAYERS):
        name = f"model.layers.{i}."
        weights |= {
            name + "input_layernorm.weight": torch.ones(HIDDEN),
            name + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            name + "self_attn.q_proj.weight": drawn(heads * dim, HIDDEN),
            name + "self_attn.k_proj.weight": drawn(kv * dim, HIDDEN),
            name + "self_attn.v_proj.weight": drawn(kv * dim, HIDDEN),
            name + "self_attn.o_proj.weight": drawn(HIDDEN, heads * dim),
            name + "self_attn.q_norm.weight": torch.ones(dim),
            name + "self_attn.k_norm.weight": torch.ones(dim),
            name + "mlp.gate_proj.weight": drawn(inner, HIDDEN),
            name + "mlp.up_proj.weight": drawn(inner, HIDDEN),
            name + "mlp.down_proj.weight": drawn(HIDDEN, inner),
        }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": inner,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "float32",
        "eos_token_id": 257,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_samples(path: Path, count: int, *, seed: int = 0, low: int = 12, high: int = 60) -> Path:
    """`count` samples of a small repetitive language, so that there is something to learn; a third of it is prompt."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as opened:
        for _ in range(count):
            length, start, stride = rng.randint(low, high), rng.randrange(200), rng.choice((1, 2, 3))
            ids = [(start + stride * i) % 250 for i in range(length)]
            opened.write(json.dumps({"input_ids": ids, "prompt_length": length // 3}) + "\n")
    return path


def write_state(folder: Path, weights: dict[str, Any], moments: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's tensor files from tensors at hand; their entries for the manifest."""
    from trainer.checkpoint import MOMENTS, WEIGHTS
    from trainer.tensor_files import write_tensor_file

    def raw(tensors: dict[str, Any]) -> dict[str, Any]:
        arrays = {name: tensor.detach().float().contiguous().numpy() for name, tensor in tensors.items()}
        return {name: (array.shape, memoryview(array.reshape(-1)).cast("B")) for name, array in arrays.items()}

    return {
        WEIGHTS: write_tensor_file(folder / WEIGHTS, raw(weights)),
        MOMENTS: write_tensor_file(folder / MOMENTS, raw(moments)),
    }


@dataclass
class Run:
    """One `python -m trainer run` of a job whose attempts and checkpoints lie in `root`."""

    root: Path
    config: Path
    attempts: int = 0
    running: list[subprocess.Popen[str]] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    @property
    def attempt(self) -> Path:
        return self.root / "attempts" / str(self.attempts)

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def start(self, *overrides: str, resume: str = "auto", **popen: Any) -> subprocess.Popen[str]:
        """Starts the next attempt; its standard output goes to the attempt's `log`."""
        self.attempts += 1
        self.attempt.mkdir(parents=True)
        command = [sys.executable, "-m", "trainer", "run", "--config", str(self.config), "--out", str(self.attempt)]
        command += ["--checkpoints", str(self.checkpoints), "--resume", resume]
        for override in overrides:
            command += ["--set", override]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment.pop("TORCHELASTIC_ERROR_FILE", None)
        with (self.attempt / "log").open("w") as log:
            options: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, **popen}
            process = subprocess.Popen(command, cwd=REPO, env=environment, text=True, **options)
        self.running.append(process)
        return process

    def finish(self, *overrides: str, resume: str = "auto", within: float = 120) -> int:
        """Runs the next attempt to its end; the exit code."""
        return self.start(*overrides, resume=resume).wait(within)

    @property
    def log(self) -> str:
        return (self.attempt / "log").read_text(encoding="utf-8", errors="replace")

    def metrics(self) -> list[dict[str, Any]]:
        file = self.attempt / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def until(self, holds: Callable[[], Any], within: float = 240) -> Any:
        """Polls; fails, with the log, if it never holds or the launcher ends before."""
        deadline = time.monotonic() + within
        while not (value := holds()):
            ended = self.running[-1].poll() is not None
            assert not ended or holds(), f"ended with {self.running[-1].returncode}:\n{self.log}"
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)
        return value

    def workers(self) -> list[int]:
        """Pids of the present launcher's workers; remembered, so that the teardown ends them whatever happened."""
        pids = [pid for pid, _ in children_of(self.running[-1].pid, spares=True)]
        self.seen.update(pids)
        return pids

    def kill(self) -> None:
        for pid in self.seen:
            with contextlib.suppress(OSError):
                if b"trainer.worker_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(30)


def children_of(pid: int, *, spares: bool = False) -> list[tuple[int, str]]:
    """(pid, command line) of the live children of a process, in the order of their start; spares that wait left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                if not spares and line.endswith(" spare ") and (entry / "comm").read_text().strip() not in line.split():
                    continue  # a process is called like its worker once it has taken its place
            except (OSError, IndexError):
                continue
            if parent == pid and line:
                found.append((int(entry.name), line))
    return sorted(found)


def worker_pid(run: Run, name: str) -> int:
    """Of the newest life of a worker, by its command line."""
    found = [pid for pid, line in children_of(run.running[-1].pid) if name in line]
    assert found, run.log
    return found[-1]


def make_job(root: Path, target: Path, *, samples: int = 48, data: Path | None = None, **changes: Any) -> Run:
    """A job in a new folder: run.json, and data unless there are any. `changes`: "table.key" to values."""
    root.mkdir()
    raw: dict[str, dict[str, Any]] = {
        "target": {"path": str(target)},
        "drafter": {"layers": 1, "block_size": 4, "taps": 1, "mask_token_id": MASK},
        "data": {
            "path": str(data or write_samples(root / "data.jsonl", samples)),
            "max_length": 64,
            "buckets": [32, 64],
            "batch_size": 4,
        },
        "train": {"epochs": 1, "anchors": 8, "average_every": 3, "log_every": 1},
        "checkpoint": {"every": 3},
    }
    for key, value in changes.items():
        table, _, entry = key.partition(".")
        raw.setdefault(table, {})[entry] = value
    config = root / "run.json"
    config.write_text(json.dumps(raw), encoding="utf-8")
    return Run(root, config)
