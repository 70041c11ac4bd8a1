"""The foreign trainer of tests/resident/saving.py with more ways to fail, each of them the real thing.

A file `begin-<cause>` in CONTROL makes it fail before its first step, once; `never` has it killed there each time.
"""

import contextlib
import multiprocessing
import os
import pathlib
import queue
import runpy
import signal
import socket
import sys
import threading

control, saves = pathlib.Path(os.environ["CONTROL"]), pathlib.Path(os.environ["SAVE"])
loss = []


def abort(_):
    os.abort()


def hangup(_):
    os.kill(os.getpid(), signal.SIGHUP)


def stopped(_):
    os.kill(os.getpid(), signal.SIGSTOP)


def takes_a_lock_twice(_):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def loses_its_loss(_):
    loss.append(float("nan"))


def ends_on_nan(_):
    print("error: the loss is nan at this step", flush=True)
    sys.exit(4)


def damage(which):
    """Cuts the newest checkpoint's file, or all of them, as a kill while writing would; then it is killed."""
    there = sorted(saves.glob("step-*"))
    for folder in there if which == "all" else there[-1:]:
        (folder / "w").write_bytes(b"cut")
    os.kill(os.getpid(), signal.SIGKILL)


def listens(_):
    """What a rendezvous does first."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        server.listen()


def opens(count):
    with contextlib.ExitStack() as stack:
        for _ in range(int(count)):
            stack.enter_context(pathlib.Path(os.devnull).open())


def waits_for_data(_):
    queue.Queue().get(timeout=0.3)


def reads_a_bad_line(_):
    file = saves.parent / "data.txt"
    file.write_bytes(b"a line\n\xff\xfe another\n")
    for line in file.open(encoding="utf-8"):
        print(len(line), flush=True)


def eats_memory(folder):
    """In a memory cgroup with a limit: the kernel's OOM killer ends it."""
    pathlib.Path(os.environ["MEMORY_CGROUP"], "cgroup.procs").write_text(str(os.getpid()))
    eaten = []
    while True:
        eaten.append(bytearray(b"x" * (1 << 22)))


def fills_shm(_):
    """This trainer's own /dev/shm (a mount namespace) is 64 KiB: what is mapped beyond it ends in a bus error."""
    import mmap

    with pathlib.Path("/dev/shm/torch_chaos").open("w+b") as file:
        file.truncate(1 << 20)
        with mmap.mmap(file.fileno(), 1 << 20) as shared:
            shared.write(b"x" * (1 << 20))


def compiles(_):
    """A compile cache whose index names a kernel that is not there."""
    cache = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    index = cache / "index"
    if index.exists():
        (cache / index.read_text().strip()).read_bytes()
    else:
        cache.mkdir(parents=True, exist_ok=True)
        (cache / "kernel.so").write_bytes(b"compiled anew")
        index.write_text("kernel.so")


def checkpointed_loss(_):
    """torch's own complaint: the second forward pass saves another tensor. Reentrant checkpointing does not compare."""
    import torch
    from torch.utils.checkpoint import checkpoint

    calls = []

    def changes(x):
        calls.append(1)
        return (x if len(calls) == 1 else x[:, :2]).exp().sum()

    x = torch.randn(3, 4, requires_grad=True)
    checkpoint(changes, x, use_reentrant="reentrant" in sys.argv).backward()


def compiles_beside_tracing(_):
    """One worker is held inside FX tracing while another calls what is compiled (benchmarks/fx_race.py)."""
    import torch

    torch.set_num_threads(1)
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    compiled(torch.ones(3))
    fork = multiprocessing.get_context("fork")
    kind = fork if "processes" in sys.argv else threading
    inside, called = kind.Event(), kind.Event()

    class Held(torch.nn.Module):
        def forward(self, x):
            inside.set()
            called.wait(20)
            return x + 1

    def traces():
        torch.fx.symbolic_trace(Held())

    other = fork.Process(target=traces) if kind is fork else threading.Thread(target=traces, name="drafter-1")
    other.start()
    try:
        assert inside.wait(20)
        compiled(torch.ones(3))
    finally:
        called.set()
        other.join(20)


def meets_nobody(_):
    """A group of two whose other half never comes."""
    import datetime

    import torch

    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}",
        rank=1,
        world_size=2,
        timeout=datetime.timedelta(seconds=1),
    )


CAUSES = {
    "abort": abort,
    "hangup": hangup,
    "stopped": stopped,
    "deadlock": takes_a_lock_twice,
    "nan": loses_its_loss,
    "nan-exit": ends_on_nan,
    "damage": damage,
    "listen": listens,
    "open": opens,
    "no-data": waits_for_data,
    "bad-line": reads_a_bad_line,
    "memory": eats_memory,
    "shm": fills_shm,
    "compile": compiles,
    "checkpoint": checkpointed_loss,
    "fx": compiles_beside_tracing,
    "meet": meets_nobody,
}

if (control / "never").exists():
    os.kill(os.getpid(), signal.SIGKILL)
for file in list(control.glob("begin-*")):
    file.unlink()
    cause, _, rest = file.name.removeprefix("begin-").partition("=")
    if cause == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    CAUSES[cause](rest)
known = {"CAUSES": CAUSES, "LOSS": loss}
saving = pathlib.Path(__file__).parents[1] / "resident" / "saving.py"
runpy.run_path(str(saving), init_globals=known, run_name="__main__")
