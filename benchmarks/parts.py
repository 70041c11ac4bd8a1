"""What the trainer's benchmarks share: a small random target, samples, and a launcher whose lines have their time."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VOCAB, MASK = 1024, 1023


def write_target(folder: Path, *, hidden: int = 128, layers: int = 4) -> Path:
    """A random Qwen3 in Hugging Face's layout."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    heads, dim, inner = hidden // 32, 32, 2 * hidden
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Any:
        return torch.empty(shape).normal_(0.0, 0.05, generator=generator)

    weights = {"model.embed_tokens.weight": drawn(VOCAB, hidden), "model.norm.weight": torch.ones(hidden)}
    for i in range(layers):
        name = f"model.layers.{i}."
        weights |= {name + f"{n}.weight": torch.ones(hidden) for n in ("input_layernorm", "post_attention_layernorm")}
        weights |= {name + f"self_attn.{n}.weight": torch.ones(dim) for n in ("q_norm", "k_norm")}
        weights |= {name + f"self_attn.{n}_proj.weight": drawn(hidden, hidden) for n in "qkvo"}
        weights |= {name + f"mlp.{n}_proj.weight": drawn(inner, hidden) for n in ("gate", "up")}
        weights[name + "mlp.down_proj.weight"] = drawn(hidden, inner)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": dim, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "hidden_act": "silu",
        "tie_word_embeddings": True, "attention_bias": False, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_samples(file: Path, count: int, length: int) -> Path:
    """Samples of one length, so that every batch is of one shape."""
    rng = random.Random(0)
    with file.open("w", encoding="utf-8") as opened:
        for _ in range(count):
            ids = [rng.randrange(VOCAB - 1) for _ in range(length)]
            opened.write(json.dumps({"input_ids": ids, "prompt_length": 8}) + "\n")
    return file


def write_config(root: Path, *, samples: int, length: int, **tables: dict[str, Any]) -> Path:
    """run.json of a job in `root`, with its target and data; `tables` are laid over it."""
    raw: dict[str, dict[str, Any]] = {
        "target": {"path": str(write_target(root / "target"))},
        "drafter": {"layers": 1, "block_size": 8, "taps": 1, "mask_token_id": MASK},
        "data": {
            "path": str(write_samples(root / "data.jsonl", samples, length)),
            "max_length": length, "buckets": [length], "batch_size": 2,
        },
        "train": {"epochs": 1, "anchors": 16, "average_every": 5, "log_every": 1},
    }  # fmt: skip
    for name, table in tables.items():
        raw.setdefault(name, {}).update(table)
    config = root / "run.json"
    config.write_text(json.dumps(raw), encoding="utf-8")
    return config


class Launcher:
    """`python -m trainer run` as a process; every line of its output with the monotonic time at which it came.

    Args:
        slow: seconds of each stage (benchmarks/slow_stages); nothing sleeps without any.
    """

    def __init__(
        self, root: Path, config: Path, attempt: int, *arguments: str, slow: dict[str, float] | None = None
    ) -> None:
        self.out = root / "attempts" / str(attempt)
        self.out.mkdir(parents=True)
        self.began = time.monotonic()
        command = [sys.executable, "-m", "trainer", "run", "--config", str(config), "--out", str(self.out)]
        command += ["--checkpoints", str(root / "checkpoints"), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
        if slow:
            environment["PYTHONPATH"] += os.pathsep + str(ROOT / "benchmarks" / "slow_stages")
            environment["DFLASH_SLOW_STAGES"] = json.dumps(slow)
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    def until(self, pattern: str, *, after: float = 0.0, within: float = 60.0) -> float:
        """When the first line that matches came, later than `after`.

        Raises:
            RuntimeError: it did not come in time, or the launcher ended before.
        """
        wanted, deadline = re.compile(pattern), time.monotonic() + within
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            if ended:
                self._reader.join(5)
            for at, line in list(self.lines):
                if at > after and wanted.search(line):
                    return at
            if ended:
                raise RuntimeError(f"ended with {self.process.returncode} before {pattern!r}:\n{self.tail()}")
            time.sleep(0.01)
        raise RuntimeError(f"no {pattern!r} in {within:g} s:\n{self.tail()}")

    def tail(self) -> str:
        return "\n".join(line for _, line in self.lines[-15:])

    def worker(self, name: str) -> int:
        """Pid of a living worker."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if b"spare" in words and (entry / "comm").read_text().strip() != name:
                    continue  # it waits for the death of the one that is looked for
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if name.encode() in words and parent == self.process.pid:
                    return int(entry.name)
        raise RuntimeError(f"there is no {name}")

    def metrics(self) -> list[dict[str, Any]]:
        file = self.out / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def stop(self, number: signal.Signals = signal.SIGTERM, within: float = 60.0) -> int:
        self.process.send_signal(number)
        return self.process.wait(within)

    def close(self) -> None:
        """Leaves nothing behind: workers die with their launcher."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        self._reader.join(5)


def best(repeat: int, work: Callable[[], object]) -> float:
    """Seconds of the fastest of `repeat` calls, after one that does not count."""
    work()
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
