"""The FX crash as an experiment (docs/fx-crash.md): one worker compiles, the others only call what is compiled already.

    python benchmarks/fx_race.py                        # every way of running the workers
    python benchmarks/fx_race.py --how threads --checkpoint all
    python benchmarks/fx_race.py --how threads --forward-only

All workers run one small compiled function, forward and backward. Before the count begins, each has called it with a
length of its own, one after the other. Then worker 0 goes on with a new length each step, so that each step compiles;
the others repeat their own length, which is compiled, until worker 0 is done. Counted are the calls of the others and
how many of them raise "Detected that you are using FX to symbolically trace a dynamo-optimized function"; any other
error ends the experiment. Each run is a process of its own with an empty compile cache: a warm one hides the race.

    threads     workers are threads and share one compiled function
    own         threads, each with a compiled function and a lock of its own
    lock        threads, one lock for all of them around every step
    processes   each worker is a process
    nested      one worker alone, whose call is itself traced by FX: true nesting
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

HOW = ("threads", "own", "lock", "processes", "nested")
CHECKPOINT = ("none", "nonreentrant", "reentrant")
MESSAGE = "Detected that you are using FX to symbolically trace"
WIDTH = 48
PATIENCE = 1800  # seconds for one run


def similarity(query: Any, key: Any) -> Any:
    """The function that is compiled: dense attention in miniature, (n, WIDTH) and (n, WIDTH) -> (n, WIDTH)."""
    return (query @ key.mT / WIDTH**0.5).softmax(-1) @ key


class Bench:
    """The workers of one process."""

    def __init__(self, how: str, kind: str, backend: str, forward_only: bool) -> None:
        import torch

        self.how, self.kind, self.forward_only = how, kind, forward_only
        self.head = torch.randn(WIDTH, WIDTH, requires_grad=True)
        self.compile: Callable[[], Any] = lambda: torch.compile(
            lambda q, k: similarity(q, k), dynamic=False, backend=backend
        )
        self.shared = self.compile()
        self.everybody = threading.Lock()
        self.counts = {"compiled": 0, "calls": 0, "failed": 0}
        self.errors: list[BaseException] = []

    def tools(self) -> tuple[Callable[[Any, Any], Any], AbstractContextManager[Any]]:
        """What one worker calls, and what it holds meanwhile."""
        if self.how == "own":
            return self.compile(), threading.Lock()
        return self.shared, self.everybody if self.how == "lock" else nullcontext()

    def step(self, call: Callable[[Any, Any], Any], length: int) -> None:
        import torch
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.utils.checkpoint import checkpoint

        if self.how == "nested":
            make_fx(lambda x: call(x, x) * 2)(torch.randn(length, WIDTH))
            return
        rows = torch.randn(length, WIDTH) @ self.head
        rows = call(rows, rows)

        def loss_of(hidden: Any) -> Any:
            return (hidden @ self.head).logsumexp(-1).mean()

        loss = (
            loss_of(rows) if self.kind == "none" else checkpoint(loss_of, rows, use_reentrant=self.kind == "reentrant")
        )
        if not self.forward_only:
            loss.backward()

    def worker(self, index: int, steps: int, stop: Callable[[], bool], tools: Any) -> None:
        """Worker 0 compiles `steps` new lengths; another one calls its own length until `stop`."""
        import torch

        # dynamo's settings are kept for each thread from torch 2.12 on: set where they are needed
        torch._dynamo.config.recompile_limit = 10_000
        call, guard = tools
        done = 0
        while done < steps if index == 0 else not stop():
            length = 40 + done if index == 0 else 10 + index
            what = "compiled" if index == 0 else "calls"
            self.counts[what] += 1  # one writer for "compiled"; "calls" may lose a count in a thousand between threads
            done += 1
            try:
                with guard:
                    self.step(call, length)
            except RuntimeError as error:
                if MESSAGE not in str(error):
                    self.errors.append(error)
                    return
                self.counts["failed"] += 1
            if index:
                time.sleep(0.001)

    def run(self, indices: list[int], steps: int, until: str) -> dict[str, int]:
        import torch

        torch._dynamo.config.recompile_limit = 10_000
        tools = {index: self.tools() for index in indices}
        if self.how != "nested":
            for index in indices:
                self.step(tools[index][0], 10 + index)
        ended = threading.Event()
        stop = (lambda: Path(until).exists()) if until else ended.is_set
        threads = {i: threading.Thread(target=self.worker, args=(i, steps, stop, tools[i])) for i in indices}
        for thread in threads.values():
            thread.start()
        if 0 in threads:
            threads[0].join()
            ended.set()
        for thread in threads.values():
            thread.join()
        if self.errors:
            raise self.errors[0]
        return self.counts


def one_run(given: argparse.Namespace, how: str, kind: str) -> dict[str, int]:
    """One run in fresh processes with a fresh compile cache."""
    everybody = list(range(given.workers))
    groups = [[0]] if how == "nested" else [[i] for i in everybody] if how == "processes" else [everybody]
    with tempfile.TemporaryDirectory(prefix="fx-race-") as folder:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": str(Path(folder) / "triton")}
        until = str(Path(folder) / "compiler-is-done") if how == "processes" else ""
        base = [sys.executable, __file__, "--inside", "--how", how, "--checkpoint", kind, "--steps", str(given.steps)]
        base += ["--backend", given.backend, *(["--forward-only"] if given.forward_only else []), "--until", until]
        children = []
        for group in groups:
            command = [*base, "--indices", ",".join(map(str, group))]
            children.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        total = {"compiled": 0, "calls": 0, "failed": 0}
        for child in children:  # the first one compiles; the others wait for its mark
            text, _ = child.communicate(timeout=PATIENCE)
            if until:
                Path(until).touch()
            if child.returncode:
                raise SystemExit(f"{how}, {kind}: a worker ended with {child.returncode}")
            for key, value in json.loads(text.splitlines()[-1]).items():
                total[key] += value
        return total


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--how", choices=("all", *HOW), default="all")
    parser.add_argument("--checkpoint", choices=("all", *CHECKPOINT), default="none")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="lengths that worker 0 compiles")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--forward-only", action="store_true", help="no backward, hence no lazy compile of it")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--indices", default="", help=argparse.SUPPRESS)
    parser.add_argument("--until", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        bench = Bench(given.how, given.checkpoint, given.backend, given.forward_only)
        print(json.dumps(bench.run([int(i) for i in given.indices.split(",")], given.steps, given.until)))
        return
    import torch

    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {given.workers} workers, {given.backend}", end="")
    print(", forward only" if given.forward_only else "")
    print(f"{'workers':<12}{'checkpointing':<16}failed calls of calls, while so many lengths were compiled")
    for kind in CHECKPOINT if given.checkpoint == "all" else (given.checkpoint,):
        for how in HOW if given.how == "all" else (given.how,):
            began = time.monotonic()
            runs = [one_run(given, how, kind) for _ in range(given.runs)]
            said = "; ".join(f"{r['failed']} of {r['calls'] or r['compiled']}, {r['compiled']}" for r in runs)
            print(f"{how:<12}{kind:<16}{said}   ({(time.monotonic() - began) / given.runs:.0f} s a run)", flush=True)


if __name__ == "__main__":
    main()
