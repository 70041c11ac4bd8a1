"""The lease: one holder, a token that only grows, and a holder whose time is over does nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_ops.contracts import Layout
from dflash_ops.errors import ContractError, LeaseLost, StateError
from dflash_ops.resident import lease

HOLD = """
import sys, time
from pathlib import Path
from dflash_ops.contracts import Layout
from dflash_ops.errors import LeaseLost
from dflash_ops.resident import lease
held = lease.take(Layout(Path(sys.argv[1])), "other")
print(held.token if held else "none", flush=True)
for line in sys.stdin:
    try:
        held.check()
        print("mine", flush=True)
    except LeaseLost as lost:
        print("lost", lost.what, flush=True)
"""


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path)
    made.run.mkdir()
    return made


def other(layout: Layout) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(layout.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def says(process: subprocess.Popen[str], ask: bool = True) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    if ask:
        process.stdin.write("\n")
        process.stdin.flush()
    return process.stdout.readline().strip()


def test_only_one_holds_it_and_the_token_grows(layout: Layout) -> None:
    first = lease.take(layout, "me")
    assert first is not None
    with other(layout) as process:
        assert says(process, ask=False) == "none"
        process.kill()
    first.check()
    first.renew()
    first.release()
    assert lease.holder(layout) is None
    second = lease.take(layout, "me again")
    assert second is not None
    assert second.token == first.token + 1
    with pytest.raises(LeaseLost, match=f"me again .* has token {second.token}"):
        first.check()
    first.release()  # nothing of the newer holder is touched
    second.check()


def test_a_killed_holder_frees_it_at_once_and_a_frozen_one_finds_out(layout: Layout) -> None:
    with other(layout) as process:
        assert says(process, ask=False) == "1"
        assert lease.take(layout, "me") is None
        assert says(process) == "mine"
        os.kill(process.pid, signal.SIGSTOP)
        record = json.loads(layout.lease.read_text())
        record["expires"] = time.time() - 1  # its time runs out while it is frozen
        layout.lease.write_text(json.dumps(record))
        mine = lease.take(layout, "me")
        assert mine is not None
        assert mine.token == 2
        os.kill(process.pid, signal.SIGCONT)
        assert says(process).startswith("lost the lease with token 1 is not ours any more: me (pid ")
        mine.release()
        process.kill()
    with other(layout) as process:
        assert says(process, ask=False) == "3"
        process.kill()
        process.wait(10)
        again = lease.take(layout, "me")
        assert again is not None
        assert again.token == 4


@pytest.mark.parametrize("change", [{"expires": 9e12}, {"boot_id": "another"}, {"start": 1}])
def test_a_clock_that_jumped_a_reboot_or_a_reused_pid_holds_nothing(layout: Layout, change: dict[str, object]) -> None:
    assert lease.take(layout, "me") is not None
    record = json.loads(layout.lease.read_text())
    layout.lease.write_text(json.dumps({**record, **change}))
    assert lease.holder(layout) is None
    taken = lease.take(layout, "me")
    assert taken is not None
    assert taken.token == 2


@pytest.mark.parametrize("raw", ["", "{", '{"schema": 99, "token": 1}', "[]"])
def test_a_damaged_lease_is_nobodys(layout: Layout, raw: str) -> None:
    held = lease.take(layout, "me")
    assert held is not None
    layout.lease.write_text(raw)
    with pytest.raises((StateError, ContractError)):
        lease.take(layout, "me")
    with pytest.raises(LeaseLost, match="cannot be read"):
        held.check()
    layout.lease.unlink()
    with pytest.raises(LeaseLost, match="its file is gone"):
        held.check()
