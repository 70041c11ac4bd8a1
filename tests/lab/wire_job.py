"""A job in container 200, reached by ssh and pct, and the command line to it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dflash_ops.cli.main import run
from dflash_ops.deploy.toml import dump_toml
from lab import Lab
from lab.container import SHIFT, VENV

#: In the part of a trainer: counts, saves when it is asked to stop, crashes when its release says so.
TRAINER = """\
import os, signal, sys, time
bad = {bad!r}
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
for step in range(1, 100000):
    time.sleep(0.05)
    print(f"it {{step}}/99999 loss {{4.0 / step:.3f}}", flush=True)
    if bad and step == 3:
        raise ValueError("bad release")
    if stop:
        os.makedirs(os.environ["SAVE"] + f"/step-{{step:08d}}", exist_ok=True)
        sys.exit(3)
"""
PYTHON = f"{VENV}/bin/python"


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.out))


@dataclass
class Job:
    """One job; `root` is its folder in the container."""

    lab: Lab
    folder: Path
    name: str
    root: str
    capfd: pytest.CaptureFixture[str]
    number: int = 200
    keys: dict[str, Any] = field(default_factory=dict)
    more: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def inventory(self) -> Path:
        return self.folder / "inventory.toml"

    @property
    def source(self) -> Path:
        return self.folder / "source"

    @property
    def host(self) -> str:
        return f"ct{self.number}"

    def write(self, **changes: Any) -> None:
        """The inventory, with keys of the job changed (None removes one)."""
        self.keys = {k: v for k, v in {**self.keys, **changes}.items() if v is not None}
        hosts: dict[str, Any] = {f"pve{n}": {"kind": "ssh", "address": f"192.0.2.1{n}", "user": "root"} for n in (1, 2)}
        hosts |= {f"ct{n}": {"kind": "lxc", "via": "pve1", "id": n, "python": PYTHON} for n in (200, 201)}
        hosts |= {"ct300": {"kind": "lxc", "via": "pve2", "id": 300, "python": PYTHON}}
        document = {"schema": 1, "default_job": self.name, "hosts": hosts, "jobs": {self.name: self.keys, **self.more}}
        self.inventory.write_text(dump_toml(document), "utf-8")

    def release(self, *, bad: bool = False, **files: str | bytes) -> None:
        """Another release."""
        self.source.mkdir(exist_ok=True)
        (self.source / "train.py").write_text(TRAINER.format(bad=bad))
        for name, content in files.items():
            (self.source / name).write_bytes(content.encode() if isinstance(content, str) else content)

    def ops(self, *args: str) -> Outcome:
        """One command of dflash-ops, in this thread."""
        self.capfd.readouterr()
        code = run([args[0], "-i", str(self.inventory), *args[1:]])
        seen = self.capfd.readouterr()
        return Outcome(code, seen.out, seen.err)

    def spawn(self, *args: str, **env: str) -> subprocess.Popen[str]:
        """One command in a process of its own, on the operator's machine."""
        argv = [sys.executable, "-m", "dflash_ops.cli.main", args[0], "-i", str(self.inventory), *args[1:]]
        return subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **env},
            start_new_session=True,
        )  # fmt: skip

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.ops("status", self.name, "--json").json["jobs"][0])

    def until(self, what: Callable[[dict[str, Any]], bool], seconds: float = 30.0) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while not what(found := self.status):
            assert time.monotonic() < end, found
            time.sleep(0.1)
        return found

    @property
    def there(self) -> Path:
        """The job's root as the lab sees it from outside of the container."""
        return self.lab.containers[self.number].rootfs / self.root.lstrip("/")

    @property
    def calls(self) -> int:
        """pct calls so far."""
        return len(self.lab.calls("pve1")) + len(self.lab.calls("pve2"))

    def releases(self) -> set[str]:
        """Everything in releases/ that looks complete, or like a leftover."""
        return {p.name for p in self.there.glob("releases/*")} | {p.name for p in self.there.glob("releases/.*")}

    def nothing_switched(self) -> None:
        """No release is current, nothing was started, nothing looks complete."""
        assert not os.path.lexists(self.there / "current")
        assert not list(self.there.glob("run/attempts/*"))
        assert not [name for name in self.releases() if not name.startswith(".incoming-")]

    def end(self) -> None:
        """All that runs for this job in its container."""
        container = self.lab.containers[self.number]
        if container.running:
            # brackets: the shell itself must not be met
            ours = "'[t]rain.py|[r]esident/|-m [t]rainer'"
            # again and again: a guard that came before the signal has started another loop
            script = (
                f"tmux -L wire kill-server; tmux -L theirs kill-server; while pkill -9 -f {ours}; do sleep 0.05; done"
            )
            container.exec(["sh", "-c", script])
        shutil.rmtree(self.there, ignore_errors=True)


@contextlib.contextmanager
def job_in(lab: Lab, folder: Path, capfd: pytest.CaptureFixture[str], name: str = "wire", **keys: Any) -> Iterator[Job]:
    made = Job(lab, folder, name, str(keys.pop("root", f"/srv/{name}")), capfd)
    made.release()
    made.write(
        host=keys.pop("host", "ct200"),
        root=made.root,
        session=keys.pop("session", "wire"),
        socket="wire",
        source=str(made.source),
        command=[PYTHON, "{release}/train.py"],
        progress=r"it (?P<step>\d+)/(?P<total>\d+) loss (?P<loss>\S+)",
        env={"SAVE": "{checkpoints}"},
        grace_s=10,
        watch_s=30,
        **keys,
    )
    try:
        yield made
    finally:
        made.end()


def stepping(status: dict[str, Any]) -> bool:
    return bool(status["state"] == "stepping" and status["progress"]["step"])


@contextlib.contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """`work` in a thread beside the block; its error is the test's."""
    errors: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def into_container(lab: Lab, number: int, source: Path, place: str) -> None:
    """A folder of files copied into a container, owned by its root."""
    target = lab.containers[number].rootfs / place.lstrip("/")
    shutil.copytree(source, target, dirs_exist_ok=True)
    for path in (target, *target.rglob("*")):
        os.lchown(path, SHIFT, SHIFT)
