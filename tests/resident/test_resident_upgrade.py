"""dflash-ops is upgraded under a job: in the middle of a repair, and over what an earlier version has left behind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import signal
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from resident_lab import Lab, wait_for  # type: ignore[import-not-found]

from dflash_ops.contracts import Budgets, Ledger, Policy, Process
from dflash_ops.resident import attempts, daemon, lease, proc
from dflash_ops.supervise.ledger import rebuild
from dflash_ops.tell.incidents import incidents

SAVING = Path(__file__).parent / "saving.py"
EARLIER = Path(__file__).parents[1] / "data" / "earlier"
ACT = Policy(mode="act", budgets=Budgets(backoff_s=0.2, backoff_cap_s=1.0))


def two_versions(one: Lab) -> tuple[Path, Path]:
    """`current.pyz` is the old one; the new one lies beside it."""
    folder = one.root / "resident"
    folder.mkdir()
    for name in ("old.pyz", "new.pyz"):
        shutil.copy(one.pyz, folder / name)
    with zipfile.ZipFile(folder / "new.pyz", "a") as archive:
        archive.writestr("later.txt", "another version")
    one.pyz = folder / "current.pyz"
    one.pyz.symlink_to("old.pyz")
    return folder / "old.pyz", folder / "new.pyz"


def switch(one: Lab) -> None:
    """As a deploy does: by rename."""
    beside = one.pyz.with_name("next")
    beside.symlink_to("new.pyz")
    beside.rename(one.pyz)


def passes(one: Lab) -> list[Process]:
    found = []
    for process in proc.every():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
            if str(one.root).encode() in words and b"repair" in words:
                found.append(process.process)
    return found


@pytest.mark.parametrize("then", [signal.SIGCONT, signal.SIGKILL])
def test_switched_in_the_middle_of_a_repair_nothing_is_done_twice(one: Lab, then: signal.Signals) -> None:
    """The old version's pass has announced its restart; it finishes, or dies and the new version finishes it."""
    old, new = two_versions(one)
    env = {"CONTROL": str(one.control), "SAVE": str(one.root / "checkpoints")}
    one.start(argv=(sys.executable, "-u", str(SAVING)), env=env, policy=ACT)
    one.until(lambda s: s.progress and (s.progress.step or 0) > 12, "steps")
    before = wait_for(lambda: daemon.running(one.layout), "a loop")
    proc.send(one.launcher(), signal.SIGKILL)
    (acting,) = wait_for(lambda: passes(one), "the pass")
    wait_for(lambda: one.events("action_intended"), "its word")
    proc.send(acting, signal.SIGSTOP)
    switch(one)
    proc.send(before.process, signal.SIGKILL)  # its guard starts what is current now
    record = wait_for(
        lambda: r if (r := daemon.running(one.layout)) and r.process != before.process else None, "a loop"
    )
    assert record.version == hashlib.sha256(new.read_bytes()).hexdigest()[:12]
    assert before.version == hashlib.sha256(old.read_bytes()).hexdigest()[:12]
    proc.send(acting, then)
    proc.send(acting, signal.SIGCONT)
    outcomes = wait_for(lambda: one.events("action_outcome"), "the proof", 60)
    assert [e.data["outcome"] for e in outcomes] == ["verified"]
    assert len(one.events("action_intended")) == len(one.events("action_done")) == 1
    ran = [n for n in attempts.numbers(one.layout) if attempts.read(one.layout, n).start is not None]
    assert len(ran) == 2
    now = daemon.running(one.layout)
    assert now is not None
    assert now.version == record.version
    assert len(incidents(one.events())) == 1


def earlier(one: Lab) -> None:
    """The folder of an earlier version, as if it had run here until a moment ago."""
    marks = {
        "@ROOT@": str(one.root),
        "@CONTROL@": str(one.control),
        "@PYTHON@": sys.executable,
        "@SAVING@": str(SAVING),
        "@BOOT@": proc.boot_id(),
        "@SOCKET@": one.socket,
    }
    for file in (p for p in EARLIER.rglob("*") if p.is_file() and p.name != "README.md"):
        text = file.read_text("utf-8")
        for mark, value in marks.items():
            text = text.replace(mark, value)
        made = one.root / file.relative_to(EARLIER)
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(text, "utf-8")
    saved = one.root / "checkpoints/step-00000130"
    saved.mkdir(parents=True)
    (saved / "w").write_text("state at 130")
    entry = {"bytes": 12, "sha256": hashlib.sha256(b"state at 130").hexdigest()}
    (saved / "manifest.json").write_text(json.dumps({"files": {"w": entry}}))


def test_what_an_earlier_version_left_is_read_and_the_job_goes_on(one: Lab) -> None:
    earlier(one)
    ledger = rebuild(one.events())
    assert isinstance(ledger, Ledger)
    assert [layer.action for layer in ledger.layers] == ["new_port"]
    assert lease.holder(one.layout) is None
    assert [i.kind for i in incidents(one.events())] == ["host_oom_sigkill", "port_in_use"]
    said: Any = one.ok("snapshot")
    assert (said["attempt"], said["state"]) == (3, "crashed")
    wait_for(lambda: len(found := one.events("action_outcome")) > 2 and found[-1].attempt == 4, "the proof", 60)
    done = [(e.data["decision"]["action"], e.data["decision"]["attempt"]) for e in one.events("action_intended")]
    assert done == [("restart", 1), ("new_port", 2), ("restart", 3)]
    assert one.events("action_outcome")[-1].data["outcome"] == "verified"
    environ = Path(f"/proc/{one.launcher(4).pid}/environ").read_bytes()
    assert b"\0MASTER_PORT=" in b"\0" + environ  # the earlier version's change is in force
    assert [e.seq for e in one.events()] == list(range(1, len(one.events()) + 1))
    wait_for(lambda: [i.state.value for i in incidents(one.events())] == ["repaired"] * 3, "all are over")
