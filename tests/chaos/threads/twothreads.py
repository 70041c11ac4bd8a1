"""A small trainer of the kind that this tool was born from: one process, two drafter threads, one compiled function.

Each drafter takes half of a batch, and their gradients are averaged at every step. The compiled function gets a new
length at step AT: drafter 0 compiles it, and is held in the middle of that compile until drafter 1 has called what is
compiled already. Threads share torch's one flag (up to 2.13), so that call fails; processes do not.

    python twothreads.py [--workers processes] [--loss reentrant]

Environment: SAVE (folder of the checkpoints), TOTAL (steps), AT (0: never a new length), STEP_S (least time of a step).
The compile cache is private: TORCHINDUCTOR_CACHE_DIR, set by whoever starts it. Exit code 3 after TERM, with a
checkpoint.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
import time
import traceback

import torch
from safetensors.torch import load_file, save_file
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS, SAVE_EVERY = 32, 16, 5
#: Seconds for which a drafter waits for the other one at the crossing.
PATIENCE_S = 30.0


class Crossing:
    """Where both drafters meet once: one inside a compile, the other one in front of its call."""

    def __init__(self, kind):
        self.inside, self.called = kind.Event(), kind.Event()


CROSSING = None
compiling_new_length = threading.local()


def compile_backward(graph, inputs):
    """As Inductor does: the backward pass is traced once more, late, when `backward()` first needs it."""

    def traced(*args):
        if getattr(compiling_new_length, "now", False):
            CROSSING.inside.set()
            CROSSING.called.wait(PATIENCE_S)
        return graph(*args)

    return torch._functorch.aot_autograd.make_boxed_func(make_fx(traced)(*inputs))


def compile_forward(graph, inputs):
    return torch._functorch.aot_autograd.make_boxed_func(graph)


@torch.compile(dynamic=False, backend=aot_autograd(fw_compiler=compile_forward, bw_compiler=compile_backward))
def attention(query, key):
    return (query @ key.mT / WIDTH**0.5).softmax(-1) @ key


def set_up(crossing):
    """In each worker: its share of this process's settings."""
    global CROSSING
    CROSSING = crossing
    torch.set_num_threads(1)


def draft(index, step, weight, new_length, reentrant):
    """One drafter's half of a step: (loss, gradient)."""
    weight = weight.detach().clone().requires_grad_()
    rows = ROWS + 4 if new_length and index == 0 else ROWS
    noise = torch.Generator().manual_seed(2 * step + index)
    x = torch.randn(rows, WIDTH, generator=noise)
    goal = x.roll(1, -1)
    if new_length and index == 1:
        CROSSING.inside.wait(PATIENCE_S)
    try:
        guess = attention(x @ weight, x @ weight)
    finally:
        if new_length and index == 1:
            CROSSING.called.set()

    def loss_of(hidden):
        return (hidden @ weight - goal).square().mean()

    loss = loss_of(guess) if reentrant is None else checkpoint(loss_of, guess, use_reentrant=reentrant)
    compiling_new_length.now = new_length and index == 0
    loss.backward()
    compiling_new_length.now = False
    return loss.item(), weight.grad


def save(folder, step, weight):
    made = folder / f".step-{step:08d}.partial"
    made.mkdir(parents=True, exist_ok=True)
    file = made / "drafter.safetensors"
    save_file({"weight": weight.contiguous()}, file)
    entry = {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    (made / "manifest.json").write_text(json.dumps({"files": {file.name: entry}}))
    made.rename(folder / f"step-{step:08d}")
    print(f"saved step={step}", flush=True)


def newest(folder):
    """Step and weights of the newest checkpoint, whole or not: this trainer does not look."""
    there = sorted(folder.glob("step-*"))
    if not there:
        return 0, torch.eye(WIDTH) + 0.1 * torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    return int(there[-1].name.removeprefix("step-")), load_file(there[-1] / "drafter.safetensors")["weight"]


def workers(how):
    """Two drafters, each a thread of this process or a process of its own."""
    if how == "processes":
        own = multiprocessing.get_context("fork")  # both are there before this process has a second thread
        return [concurrent.futures.ProcessPoolExecutor(2, own, set_up, (Crossing(own),))] * 2
    meet = Crossing(threading)
    return [concurrent.futures.ThreadPoolExecutor(1, f"drafter-{i}", set_up, (meet,)) for i in range(2)]


def main():
    total, at = int(os.environ["TOTAL"]), int(os.environ.get("AT", "0"))
    least = float(os.environ.get("STEP_S", "0.1"))
    folder = pathlib.Path(os.environ["SAVE"])
    how = "processes" if "processes" in sys.argv else "threads"
    reentrant = "reentrant" in sys.argv
    stopping = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
    step, weight = newest(folder)
    print(f"torch {torch.__version__}, two drafters as {how}, loss {'reentrant' if reentrant else 'non-reentrant'}")
    print(f"dflash event=resumed step={step}", flush=True)
    with contextlib.ExitStack() as stack:
        drafters = workers(how)
        for one in {id(d): d for d in drafters}.values():
            stack.enter_context(one)
        first = True  # nobody calls while another one compiles what all steps need
        while step < total and not stopping:
            began = time.monotonic()
            step += 1
            jobs = []
            for i, one in enumerate(drafters):
                jobs.append(one.submit(draft, i, step, weight, step == at, reentrant))
                if first:
                    jobs[-1].result()
            first = False
            done = [job.result() for job in jobs]
            weight = weight - 0.5 * sum(grad for _, grad in done) / 2
            print(f"it {step} of {total} loss={sum(loss for loss, _ in done) / 2:.4f}", flush=True)
            if step % SAVE_EVERY == 0:
                save(folder, step, weight)
            time.sleep(max(0.0, least - (time.monotonic() - began)))
    if stopping:
        save(folder, step, weight)
        sys.exit(3)


if __name__ == "__main__":
    try:
        main()
    except RuntimeError:
        traceback.print_exc()
        sys.exit(1)
