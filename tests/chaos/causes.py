"""How faults are brought about from outside the trainer, what they need of the machine, and what is looked at after."""

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

from chaos.scene import FAULTY, Scene
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
    return {"limits": Limits(step_s=3.0), "grace_s": 1.0}


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


def from_a_session_of_its_own(scene: Scene) -> dict[str, Any]:
    pid = Path(scene.one.control).parent / "laptop"
    scene.notes["laptop"] = pid
    return {"shell": f"sleep 600 >/dev/null 2>&1 & echo $$ > {pid}"}


def loses_the_laptop(scene: Scene) -> None:
    """Whatever the session that started it still has is killed at once."""
    scene.steps(3)
    os.killpg(int(scene.notes["laptop"].read_text()), signal.SIGKILL)
    scene.steps(10)
    proc.send(scene.one.launcher(), signal.SIGKILL)


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
