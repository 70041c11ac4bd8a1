"""The table of faults: what is done to a trainer, and what the supervisor must make of it (docs/supervise.md)."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from resident_lab import wait_for  # type: ignore[import-not-found]

from chaos.scene import FAULTY, Fault, Scene
from dflash_ops.contracts import Limits, RemedyTable, Way
from dflash_ops.resident import daemon, lease, proc

MEMORY = Path("/sys/fs/cgroup/memory")


# -- what a fault needs of this machine


def root_needed() -> str:
    return "" if os.geteuid() == 0 else "only root can mount"


def memory_group_needed() -> str:
    there = (MEMORY / "memory.limit_in_bytes").exists() and os.access(MEMORY, os.W_OK) and os.geteuid() == 0
    return "" if there else f"no memory cgroup (version 1) can be made in {MEMORY}"


def global_fx_flag_needed() -> str:
    import importlib.metadata

    version = tuple(int(x) for x in importlib.metadata.version("torch").split("+")[0].split(".")[:2])
    return "" if version < (2, 14) else "from torch 2.14 on the flag is each thread's own"


# -- jobs


def hangs(scene: Scene) -> dict[str, Any]:
    return {"limits": Limits(step_s=1.0), "grace_s": 1.0}


def table(**ways: Way) -> Any:
    return lambda scene: {"remedies": RemedyTable(ways)}


def port_taken(scene: Scene) -> dict[str, Any]:
    taken = scene.opened.enter_context(socket.socket())
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    return {"env": {"MASTER_PORT": str(taken.getsockname()[1])}}


def port_of_nobody(scene: Scene) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"env": {"MASTER_PORT": str(free.getsockname()[1])}}


def few_files(scene: Scene) -> dict[str, Any]:
    return {"shell": "ulimit -Sn 200"}


def small_shm(scene: Scene) -> dict[str, Any]:
    mount = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
    return {"argv": ("unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-u", str(FAULTY))}


def memory_group(scene: Scene) -> dict[str, Any]:
    group = MEMORY / f"dflash-chaos-{secrets.token_hex(4)}"
    group.mkdir()
    scene.opened.callback(group.rmdir)
    (group / "memory.limit_in_bytes").write_text(str(64 << 20))
    return {"env": {"MEMORY_CGROUP": str(group)}}


def damaged_cache(scene: Scene) -> dict[str, Any]:
    cache = Path(scene.one.root) / "torchinductor_chaos"
    cache.mkdir()
    (cache / "index").write_text("kernel.so")
    return {"env": {"TORCHINDUCTOR_CACHE_DIR": str(cache)}}


# -- done from outside


def small_disk(scene: Scene) -> None:
    """The checkpoints lie on a disk of 1 MiB, of which ballast leaves nothing."""
    scene.saves.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(scene.saves)]
    subprocess.run(command, check=True, timeout=10, capture_output=True)
    scene.opened.callback(
        lambda: subprocess.run(["umount", "-l", str(scene.saves)], check=False, timeout=10, capture_output=True)
    )


def fills_and_clears(scene: Scene) -> None:
    scene.steps(12)
    ballast = scene.saves / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for _ in range(1024):
            file.write(b"x" * 4096)
    scene.came("action_intended")
    scene.came("told")
    assert scene.attempts() == 1, "it was started although the disk is full"
    ballast.unlink()


def kills_server(scene: Scene) -> None:
    scene.steps(3)
    server = proc.of(int(scene.one.tmux("display-message", "-p", "-t", "=trainer:", "#{pid}")))
    proc.send(server, signal.SIGKILL)
    told = scene.one.until(lambda s: any("tmux session is gone" in w for w in s.warnings), "the warning")
    scene.steps(told.progress.step + 5)


def kills_loop(scene: Scene) -> None:
    """The loop dies; its guard makes another; that one repairs."""
    scene.steps(3)
    before = wait_for(lambda: daemon.running(scene.one.layout), "a loop").process
    proc.send(before, signal.SIGKILL)
    wait_for(lambda: (r := daemon.running(scene.one.layout)) and r.process != before, "another loop")
    proc.send(scene.one.launcher(), signal.SIGKILL)


def kills_launcher(scene: Scene) -> None:
    scene.steps(3)
    proc.send(scene.one.launcher(), signal.SIGKILL)


def kills_all(scene: Scene) -> None:
    """The tmux server first: it would tell by which signal its pane ended."""
    scene.steps(3)
    server = proc.of(int(scene.one.tmux("display-message", "-p", "-t", "=trainer:", "#{pid}")))
    for process in (server, scene.one.wrapper(), scene.one.launcher()):
        proc.send(process, signal.SIGKILL)


def holds_the_lease(scene: Scene) -> None:
    """Another supervisor has it while the trainer dies, and lets it go."""
    scene.steps(3)
    held = lease.take(scene.one.layout, "another")
    assert held is not None
    proc.send(scene.one.launcher(), signal.SIGKILL)
    wait_for(lambda: scene.events("attempt_exited"), "the end")
    refused = scene.one.run("repair")
    assert refused.error["type"] == "JobBusy"
    assert not scene.events("action_intended")
    held.release()


def ctrl_c(scene: Scene) -> None:
    scene.steps(3)
    scene.one.tmux("send-keys", "-t", "=trainer:", "C-c")
    scene.one.until(lambda s: s.state.value in ("stopped", "crashed"), "the end")


def stops(scene: Scene) -> None:
    scene.steps(3)
    scene.one.ok("stop", "--reason", "enough")


def kills_loop_in_the_pause(scene: Scene) -> None:
    """The second restart has its pause; in it the loop is killed, and the start comes all the same, once."""
    scene.came("action_done")
    wait_for(lambda: len(scene.events("attempt_exited")) == 2, "the second crash", 60)
    record = wait_for(lambda: daemon.running(scene.one.layout), "a loop")
    proc.send(record.process, signal.SIGKILL)
    for file in scene.one.control.glob("always-*"):
        file.unlink()


# -- looked at afterwards


def aside_has(*names: str) -> Any:
    def look(scene: Scene) -> None:
        aside = scene.one.ok("checkpoints", "list")["aside"]
        there = {p.name for one in aside for p in Path(one["path"]).glob("step-*")}
        assert there >= set(names), (there, names)

    return look


def restores(scene: Scene) -> None:
    """All that was set aside can be moved back whole."""
    aside_has("step-00000010", "step-00000020", "step-00000030")(scene)
    scene.one.ok("stop")
    made = scene.one.ok("checkpoints", "aside")
    assert made["to"]
    first = min(scene.one.ok("checkpoints", "list")["aside"], key=lambda a: a["stamp"])
    scene.one.ok("checkpoints", "restore", "--stamp", first["stamp"])
    assert (scene.saves / "step-00000020" / "w").read_bytes() == b"cut"


def resumed_before(step: int) -> Any:
    """Although checkpoints of later steps are whole."""

    def look(scene: Scene) -> None:
        said = scene.one.run("logs", "--attempt", "2", "--lines", "-1").out.decode()
        (line,) = [x for x in said.splitlines() if "event=resumed" in x]
        assert 0 < int(line.partition("step=")[2]) < step, line
        aside_has(f"step-{step + 5:08d}")(scene)

    return look


def stacks_show(text: str) -> Any:
    def look(scene: Scene) -> None:
        (stacks,) = (scene.one.layout.attempt(1).path / "evidence").glob("stacks-*.txt")
        assert text in stacks.read_text()

    return look


def limit_is_raised(scene: Scene) -> None:
    limits = Path(f"/proc/{scene.one.launcher(2).pid}/limits").read_text()
    (line,) = [x for x in limits.splitlines() if x.startswith("Max open files")]
    assert int(line.split()[3]) > 200, line


def in_command(number: int, *words: str) -> Any:
    def look(scene: Scene) -> None:
        line = Path(f"/proc/{scene.one.launcher(number).pid}/cmdline").read_bytes().decode().split("\0")
        assert all(word in line for word in words), line

    return look


def shared_cache_is_whole(scene: Scene) -> None:
    assert (Path(scene.one.root) / "torchinductor_chaos" / "index").read_text() == "kernel.so"


KILL = "host_oom_sigkill"
ONCE = ("restart",)
LOOKED = ("dump_stacks", "restart")

FAULTS: tuple[Fault, ...] = (
    Fault("killed", "SIGKILL of the launcher at step 25", (KILL,), ONCE, files=("at25-kill",), short=True),
    Fault("segfault", "SIGSEGV of the launcher at step 15", ("segfault",), ONCE, files=("at15-segv",), short=True),
    Fault("abort", "abort() in the launcher at step 15", ("process_abort",), ONCE, files=("at15-abort",)),
    Fault("hang-up", "SIGHUP to the launcher at step 15", ("sighup_terminal_closed",), ONCE, files=("at15-hangup",)),
    Fault("no record", "tmux, wrapper and launcher killed at once", ("pane_dead_nostatus",), ONCE, during=kills_all),
    Fault(
        "out of memory",
        "a memory cgroup of 64 MiB; the kernel kills it",
        (KILL,),
        ONCE,
        files=("at15-memory",),
        changes=memory_group,
        needs=memory_group_needed,
    ),
    Fault(
        "cut checkpoint",
        "the newest checkpoint is cut, then SIGKILL",
        (KILL, "corrupted_safetensors"),
        ("restart", "resume_earlier"),
        files=("at35-damage=newest",),
        after=aside_has("step-00000030"),
        short=True,
    ),
    Fault(
        "all checkpoints bad",
        "every checkpoint is cut, then SIGKILL; a fresh start is allowed",
        (KILL, "corrupted_safetensors"),
        ("restart", "fresh_start_aside"),
        files=("at35-damage=all",),
        allow=("corrupted_safetensors:fresh_start_aside",),
        after=restores,
    ),
    Fault(
        "all checkpoints bad, not allowed",
        "every checkpoint is cut, then SIGKILL",
        (KILL, "corrupted_safetensors"),
        ONCE,
        "held",
        files=("at35-damage=all",),
    ),
    Fault(
        "NaN, goes on",
        "the loss is NaN from step 105 on, and it goes on and saves",
        ("nan_loss",),
        ("dump_stacks", "resume_earlier"),
        state="stepping",
        files=("at105-nan",),
        allow=("nan_loss:resume_earlier",),
        after=resumed_before(105),
    ),
    Fault("NaN, ends", "exit 4 at step 15: the loss is NaN", ("nan_loss",), (), "held", files=("at15-nan-exit",)),
    Fault(
        "disk full",
        "no room while saving at step 20; room is made later",
        ("disk_full",),
        ("wait_disk",),
        before=small_disk,
        during=fills_and_clears,
        needs=root_needed,
        short=True,
    ),
    Fault(
        "waits for ever",
        "a loop without progress at step 15",
        ("hang_stack_dump",),
        LOOKED,
        state="hung",
        files=("at15-hang",),
        changes=hangs,
        after=stacks_show("in waits_for_ever"),
        short=True,
    ),
    Fault(
        "deadlock",
        "a lock is taken twice at step 15",
        ("hang_stack_dump",),
        LOOKED,
        state="hung",
        files=("at15-deadlock",),
        changes=hangs,
        after=stacks_show("in takes_a_lock_twice"),
    ),
    Fault(
        "stopped",
        "SIGSTOP of the launcher at step 15",
        ("hang_stack_dump",),
        LOOKED,
        state="hung",
        files=("at15-stopped",),
        changes=hangs,
    ),
    Fault(
        "port in use",
        "another process listens on MASTER_PORT",
        ("port_in_use",),
        ("new_port",),
        files=("always-listen:15",),
        changes=port_taken,
        short=True,
    ),
    Fault(
        "too many open files",
        "300 files at a limit of 200",
        ("too_many_open_files",),
        ("raise_nofile",),
        files=("always-open=300:15",),
        changes=few_files,
        after=limit_is_raised,
        short=True,
    ),
    Fault(
        "shared memory full",
        "a /dev/shm of 64 KiB: a real bus error",
        ("dataloader_shm_bus_error",),
        (),
        "held",
        files=("always-shm:15",),
        changes=small_shm,
        needs=root_needed,
    ),
    Fault(
        "damaged compile cache",
        "the cache names a kernel that is not there",
        ("inductor_cache_race",),
        ("fresh_compile_cache",),
        files=("always-compile:5",),
        changes=damaged_cache,
        after=shared_cache_is_whole,
        short=True,
    ),
    Fault(
        "bad data line",
        "bytes that are no UTF-8 in the data",
        ("dataset_malformed_sample",),
        (),
        "held",
        files=("always-bad-line:15",),
    ),
    Fault("no data in time", "an empty queue, with a limit", ("data_queue_timeout",), ONCE, files=("at15-no-data",)),
    Fault("crash before step 1", "SIGSEGV before anything is printed", ("segfault",), ONCE, files=("begin-segv",)),
    Fault(
        "crash loop",
        "killed at every start; an own ladder restarts",
        (KILL, KILL, KILL),
        ("restart", "restart"),
        "held",
        files=("always-kill:12",),
        ladders={KILL: ("restart",)},
        short=True,
    ),
    Fault(
        "recomputed pass differs",
        "torch's CheckpointError; reentrant is allowed",
        ("activation_checkpoint_mismatch",),
        ("loss_reentrant",),
        files=("always-checkpoint:5",),
        allow=("activation_checkpoint_mismatch:loss_reentrant",),
        changes=table(loss_reentrant=Way(args=("--loss", "reentrant"))),
        after=in_command(2, "--loss", "reentrant"),
    ),
    Fault(
        "FX race",
        "a compiled call while another thread traces",
        ("fx_dynamo_conflict",),
        ("workers_processes",),
        files=("always-fx:5",),
        allow=("fx_dynamo_conflict:workers_processes",),
        changes=table(workers_processes=Way(args=("--workers", "processes"))),
        after=in_command(2, "--workers", "processes"),
        needs=global_fx_flag_needed,
    ),
    Fault(
        "the others never come",
        "a process group of two, of which one is there",
        ("rendezvous_timeout",),
        ONCE,
        files=("at15-meet",),
        changes=port_of_nobody,
    ),
    Fault("tmux killed", "SIGKILL of the tmux server", (), (), "none", "stepping", during=kills_server, short=True),
    Fault("supervisor killed", "SIGKILL of the loop, then of the launcher", (KILL,), ONCE, during=kills_loop),
    Fault("two supervisors", "another holds the lease for a while", (KILL,), ONCE, during=holds_the_lease),
    Fault(
        "killed while it waits",
        "SIGKILL of the loop in the pause before a start",
        (KILL, KILL),
        ("restart", "restart"),
        files=("always-kill:12",),
        ladders={KILL: ("restart",)},
        during=kills_loop_in_the_pause,
    ),
    Fault("Ctrl-C", "Ctrl-C in the pane", (), (), "none", "stopped", during=ctrl_c),
    Fault("stop", "an operator's stop", (), (), "none", "stopped", during=stops),
)
