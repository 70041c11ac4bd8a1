"""The kernel's log and the memory events: the real question to this machine's shell, with a dmesg of the test."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dflash_ops.collect import kernel
from dflash_ops.collect.kernel import KernelHost, fetch, kernel_host
from dflash_ops.contracts.evidence import Evidence, Part, decode, encode
from dflash_ops.errors import ContractError, InventoryError, UsageError
from dflash_ops.hosts.fake import FakeHost
from dflash_ops.hosts.local import LocalHost
from dflash_ops.inventory import load

DATA = Path(__file__).resolve().parents[1] / "data/contracts"
KILL = "Memory cgroup out of memory: Killed process 4242 (python3) total-vm:9000kB, anon-rss:8000kB"


class Tools:
    """dmesg and journalctl as the machine of a test has them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        self.write("journalctl", "exit 0")

    def write(self, name: str, body: str) -> None:
        file = self.folder / name
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)

    def dmesg(self, *rows: tuple[float, str]) -> None:
        """Lines of so many seconds ago."""
        up = time.monotonic()
        lines = "\n".join(f"[{up - ago:12.6f}] {text}" for ago, text in rows)
        (self.folder / "said").write_text(lines + "\n")
        self.write("dmesg", f"cat {self.folder}/said")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    return Tools(tmp_path, monkeypatch)


def ran(start: float, end: float | None, progressed: float | None = None) -> Evidence:
    """An attempt that began and ended so many seconds ago (None: it runs)."""
    now = time.time()
    ended = None if end is None else now - end
    return Evidence(
        1,
        end is None,
        now,
        (),
        started=now - start,
        ended=ended,
        progressed=None if progressed is None else now - progressed,
    )


def log(tools: Tools, evidence: Evidence, container: int | None = None) -> Part:
    return fetch(KernelHost(LocalHost(), container), evidence)[0]


def test_only_the_attempts_time_counts(tools: Tools) -> None:
    tools.dmesg((5000, "too early"), (3590, "just begun"), (1000, "NVRM: Xid 79"), (500, "after its end"))
    part = log(tools, ran(3600, 950))
    assert part.status == "ok"
    said = part.data.decode()
    assert [row.split("] ", 1)[1] for row in said.splitlines()] == ["just begun", "NVRM: Xid 79"]
    at = time.strptime(said.splitlines()[1][1:25], "%a %b %d %H:%M:%S %Y")
    assert abs(time.mktime(at) - time.mktime(time.gmtime(time.time() - 1000))) <= 3, "the time of day, UTC"


def test_an_oom_kill_of_another_container_and_one_that_was_outlived_are_left_out_and_said(tools: Tools) -> None:
    other = "oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/lxc/300,task_memcg=/lxc/300/ns,task=python3,pid=4242,uid=0"
    ours = other.replace("/lxc/300", "/lxc/200")
    tools.dmesg((900, other), (900, KILL))
    part = log(tools, ran(3600, 850), container=200)
    assert (part.status, part.data) == ("ok", b"")
    assert "2 lines left out" in part.note
    tools.dmesg((900, ours), (900, KILL))
    assert log(tools, ran(3600, 850), container=200).data.count(b"\n") == 2
    assert log(tools, ran(3600, 850, progressed=860), container=200).data.count(b"\n") == 2, "progress a moment later"
    assert log(tools, ran(3600, 10, progressed=20), container=200).data == b"", "it trained on for 14 minutes"


def test_a_log_that_may_not_be_read_is_missing_and_never_empty(tools: Tools) -> None:
    tools.write("dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1")
    part = log(tools, ran(3600, 10))
    assert part.status == "missing"
    assert "Operation not permitted" in part.note
    tools.write("journalctl", "echo '-- No entries --'")
    assert log(tools, ran(3600, 10)).status == "missing"
    tools.write("dmesg", "exit 0")
    assert log(tools, ran(3600, 10)).status == "missing", "an empty ring is no kernel's"
    up = time.monotonic()
    tools.write("journalctl", f"echo '[{up - 100:.6f}] kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off'")
    part = log(tools, ran(3600, 10))
    assert part.status == "ok"
    assert b"Xid" in part.data


def test_lines_that_the_ring_has_lost_are_said(tools: Tools) -> None:
    tools.dmesg((1000, "eth0: link up"))
    assert "gone from its buffer" in log(tools, ran(min(3000.0, time.monotonic() - 100), 10)).note


def test_half_an_answer_is_an_error() -> None:
    host = FakeHost("proxmox").answer("sh", ..., rc=255, stdout="now 1\nup 2\n", stderr="Connection closed")
    with pytest.raises(ContractError, match="in part only: Connection closed"):
        fetch(KernelHost(host), ran(10, 5))


def test_a_containers_kernel_is_asked_of_the_host_it_goes_through(tmp_path: Path) -> None:
    """On the Proxmox host itself the way is local; the container's number is the script's second argument."""
    file = tmp_path / "inventory.toml"
    text = (
        'schema = 1\n[hosts.pve]\nkind = "{kind}"\n{address}\n[hosts.gpu]\nkind = "lxc"\nvia = "pve"\nid = 200\n'
        '[jobs.a]\nhost = "gpu"\nroot = "/srv/a"\ncommand = ["true"]\n'
    )
    file.write_text(text.format(kind="local", address=""))
    found = load(file)
    place = kernel_host(found, found.jobs["a"])
    assert (place.host.name, place.container) == ("pve", 200)
    memory = fetch(place, ran(60, 10))[1]
    assert memory.status == "missing", "no container 200 here"
    file.write_text(text.format(kind="ssh", address='address = "192.0.2.6"'))
    found = load(file)
    try:
        assert kernel_host(found, found.jobs["a"]).container == 200
    except UsageError:  # of a version that does not reach it: named as missing, and the rest is read
        log_part, memory = kernel.asked(found, found.jobs["a"], ran(60, 10))
        assert (log_part.status, memory.status) == ("missing", "missing")
        assert log_part.note == memory.note != ""


# -- the stream of `resident evidence`

WHOLE = Evidence(
    2,
    False,
    1764441100.5,
    (
        Part(
            "log", "log", bytes(range(256)) * 3 + b'\n{"end":true,"parts":1}\n', total=9000, first_line=70, note="cut"
        ),
        Part("exit.json", "exit_json", b"{}", total=2),
        Part("pane", "pane", status="missing", note="there is no tmux session toy"),
    ),
    started=1764441000.0,
    ended=1764441072.0,
    release="0123456789ab",
)


def test_any_bytes_survive_the_frame_and_any_cut_is_noticed() -> None:
    stream = b"".join(encode(WHOLE))
    assert decode(stream) == WHOLE
    for at in range(len(stream)):
        with pytest.raises(ContractError):
            decode(stream[:at])


def test_a_part_that_is_gone_whole_is_noticed() -> None:
    head, *parts, end = encode(WHOLE)
    assert len(parts) == 2 * len(WHOLE.parts)
    with pytest.raises(ContractError, match="ended early"):
        decode(b"".join([head, *parts[2:], end]))


@pytest.mark.parametrize("said", ["7", '""', '["a", 3]', '["a", ""]', '["a\\u0007"]', "true"])
def test_playbooks_of_the_inventory_that_cannot_be_folders(said: str, tmp_path: Path) -> None:
    file = tmp_path / "inventory.toml"
    file.write_text(f"schema = 1\nplaybooks = {said}\n")
    with pytest.raises(InventoryError) as caught:
        load(file)
    assert caught.value.line == 2
    assert caught.value.key.startswith("playbooks")
    assert caught.value.fix


def test_the_golden_stream_loads_for_ever() -> None:
    found = decode((DATA / "evidence.bin").read_bytes())
    assert found == WHOLE


def test_a_newer_form_is_refused() -> None:
    stream = b"".join(encode(WHOLE)).replace(b'"schema":1', b'"schema":2', 1)
    with pytest.raises(ContractError, match="schema 2"):
        decode(stream)
