"""The exporter: names as documented, nothing old that looks new, scrapes that ask nobody and never hang."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dflash_ops.cli import exporter
from dflash_ops.cli.exporter import Looks
from dflash_ops.cli.main import run
from dflash_ops.contracts import (
    DiskInfo,
    Event,
    ExitRecord,
    GpuInfo,
    Progress,
    Snapshot,
    State,
    WorkerShares,
    dumps,
    to_dict,
)
from dflash_ops.errors import DflashError, HostUnreachable
from dflash_ops.hosts.base import Completed
from dflash_ops.hosts.factory import Hosts
from dflash_ops.hosts.fake import FakeHost
from dflash_ops.inventory import load
from dflash_ops.tell.exporter import ITSELF, Board, Server, address, write
from dflash_ops.tell.metrics import METRICS, OWN, Told

DOC = Path(__file__).resolve().parents[2] / "docs/exporter.md"
ODD = 'a "b"\\c'

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def series(text: str | bytes) -> Series:
    """All samples, without labels that are empty."""
    text = text if isinstance(text, str) else text.decode()
    return {
        (s.name, frozenset((k, v) for k, v in s.labels.items() if v)): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def value(found: Series, name: str, **labels: str) -> float | None:
    """Of the one sample of this name with these labels; None: there is none."""
    fits = [v for (n, own), v in found.items() if n == name and set(labels.items()) <= own]
    assert len(fits) <= 1, fits
    return fits[0] if fits else None


def stepping(**more: Any) -> Snapshot:
    progress = Progress(t=995.0, step=5, total=9, loss=1.5, tau=3.0, block_tok_s=13500.0, eta_s=60.0, ring_ready=2)
    return Snapshot("x", 999.0, State.STEPPING, 400.0, attempt=2, progress=progress, **more)


def test_the_page_has_all_names_and_labels_as_they_are() -> None:
    listed = {}
    for line in DOC.read_text().splitlines():
        if line.startswith("| `dflash_"):
            name, labels, text = (cell.strip() for cell in line.strip("|").split(" | "))
            names = () if labels == "-" else tuple(label.strip("`") for label in labels.split(", "))
            listed[name.strip("`")] = (names, text)
    told = {n + ("_total" if kind == "counter" else ""): (labels, text) for n, (kind, labels, text) in ITSELF.items()}
    told |= {m.name + ("_total" if m.kind == "counter" else ""): ((*OWN, *m.labels), m.help) for m in METRICS}
    assert listed == told


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeHost]:
    """A job with an odd name on `near`, and `other` on `far`."""
    hosts = {"near": FakeHost("near"), "far": FakeHost("far")}
    odd = '"a \\"b\\"\\\\c"'
    (tmp_path / "inventory.toml").write_text(
        f'[hosts.near]\nkind = "local"\n[hosts.far]\nkind = "ssh"\naddress = "192.0.2.7"\n'
        f'[jobs.{odd}]\nhost = "near"\nroot = "/srv/a"\nsession = "a"\ncommand = ["true"]\n'
        f'[jobs.other]\nhost = "far"\nroot = "/srv/b"\nsession = "b"\ncommand = ["true"]\n'
    )
    monkeypatch.setenv("DFLASH_INVENTORY", str(tmp_path / "inventory.toml"))
    monkeypatch.setattr("dflash_ops.hosts.factory.Hosts._make", lambda self, name: hosts[name])
    return hosts


def says(host: FakeHost, snapshot: Snapshot) -> None:
    host.answer("sh", "-c", ..., stdout=f"1000 file\n{json.dumps(json.loads(dumps(snapshot)))}\n")


def test_one_pass_of_a_job_that_steps_and_of_one_that_is_away(
    two: dict[str, FakeHost], capsys: pytest.CaptureFixture[str]
) -> None:
    failed = Event(7, 900.0, "attempt_started", "supervisor 12", 2, {})
    card = GpuInfo(0, "H", "GPU-1", util=0.5, temp_c=None, throttle=("sw_thermal_slowdown",), ecc_corrected=3)
    workers = {"target0": WorkerShares(wait=0.25, compute=None), "\ud800\n": WorkerShares(life=2)}
    disk = DiskInfo("/srv", 10**400, 10**12)
    says(two["near"], stepping(workers=workers, gpus=(card,), disk=disk, last_event=failed))
    events = {"schema": 1, "kind": "journal", "events": [to_dict(failed)], "torn_lines": 0}
    two["near"].answer("python3", ..., stdout=dumps(events))
    two["far"].answer(..., error=HostUnreachable("no route", "host far"))
    assert run(["exporter", "--once"]) == 0
    found = series(capsys.readouterr().out)
    mine = {"job": ODD}
    assert value(found, "dflash_up", **mine) == 1
    assert value(found, "dflash_up", job="other", host="far") == 0
    of_other = {name for name, labels in found if ("job", "other") in labels}
    assert of_other == {"dflash_up", "dflash_look_seconds", "dflash_look_age_seconds"}
    assert [value(found, "dflash_state", state=s, **mine) for s in ("stepping", "crashed")] == [1, 0]
    expected = {
        "dflash_state_seconds": 600.0, "dflash_attempt": 2, "dflash_step": 5, "dflash_loss": 1.5, "dflash_tau": 3.0,
        "dflash_block_tokens_per_second": 13500.0, "dflash_eta_seconds": 60.0, "dflash_ring_ready_slots": 2,
        "dflash_progress_age_seconds": 5.0, "dflash_restarts_total": 1, "dflash_gpu_utilization_ratio": 0.5,
        "dflash_disk_total_bytes": 1e12,
    }  # fmt: skip
    assert {name: value(found, name, **mine) for name in expected} == expected
    for unknown in ("dflash_epoch", "dflash_gpu_temperature_celsius", "dflash_disk_free_bytes", "dflash_exit_code"):
        assert value(found, unknown, **mine) is None
    assert value(found, "dflash_worker_share_ratio", worker="target0", share="wait") == 0.25
    assert value(found, "dflash_worker_share_ratio", worker="target0", share="compute") is None
    assert value(found, "dflash_worker_life", worker="?\n") == 2
    assert value(found, "dflash_gpu_throttled", gpu="0", reason="sw_thermal_slowdown") == 1
    assert value(found, "dflash_gpu_ecc_errors_total", gpu="0", kind="corrected") == 3
    assert value(found, "dflash_exporter_errors_total", type="HostUnreachable") == 1
    assert value(found, "dflash_exporter_looks_total", result="ok") == 1


def test_of_an_attempt_that_has_ended_no_rate_is_told_as_if_it_went_on(
    two: dict[str, FakeHost], capsys: pytest.CaptureFixture[str]
) -> None:
    ended = ExitRecord(2, 3, None, 990.0, 10.0)
    says(two["near"], stepping(exit=ended, workers={"target0": WorkerShares(wait=0.5)}))
    two["far"].answer("sh", "-c", ..., stdout="nonsense", rc=0)
    assert run(["exporter", "--once", "--all"]) == 0
    found = series(capsys.readouterr().out)
    assert value(found, "dflash_exit_code") == 3
    assert value(found, "dflash_step") == 5
    for gone in ("dflash_block_tokens_per_second", "dflash_eta_seconds", "dflash_worker_share_ratio"):
        assert value(found, gone) is None
    assert value(found, "dflash_up", job="other") == 0  # it answers nonsense: not asked
    assert value(found, "dflash_exporter_errors_total", type="CommandFailed") == 1


def test_a_journal_is_read_where_it_has_grown_and_not_too_often(
    two: dict[str, FakeHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(tmp_path / "inventory.toml")
    part, host = loaded.job(ODD), two["near"]
    looks = Looks(loaded, Hosts(loaded), [part], Board(1, 45.0), 5.0)

    def looked(seq: int) -> tuple[int, int]:
        """Restarts that are told, and journals that were read."""
        started = Event(seq, 900.0, "attempt_started", "supervisor", seq, {})
        says(host, stepping(last_event=started))
        events = [to_dict(replace(started, seq=n)) for n in range(1, seq + 1)]
        host.answer("python3", ..., stdout=dumps({"schema": 1, "events": events, "torn_lines": 0}))
        told = looks.look(part)
        assert told.history is not None
        return told.history.restarts, sum(call.argv[0] == "python3" for call in host.calls)

    assert [looked(1), looked(1), looked(2)] == [(1, 1), (1, 1), (1, 1)]
    monkeypatch.setattr(exporter, "_JOURNAL_S", 0.0)
    assert [looked(2), looked(2), looked(3)] == [(2, 2), (2, 2), (3, 3)]
    host.answer("python3", ..., stdout="nonsense")  # what was known stays
    says(host, stepping(last_event=Event(9, 900.0, "note", "operator", 1, {})))
    told = looks.look(part)
    assert told.history is not None
    assert told.history.restarts == 3


def test_what_was_seen_too_long_ago_is_not_told() -> None:
    now = [0.0]
    board = Board(2, 45.0, clock=lambda: now[0], wall=lambda: 1e9)
    assert value(series(board.text()), "dflash_up") is None  # nobody was asked yet
    board.put(0, Told("a", "h", "", stepping(), 1000.0))
    board.put(1, Told("b", "h", "", stepping(), 1000.0))
    now[0] = 45.0
    assert value(series(board.text()), "dflash_up", job="a") == 1
    board.put(1, Told("b", "h", "", stepping(), 1000.0))
    now[0] = 45.5
    found = series(board.text())
    assert value(found, "dflash_up", job="a") == 0
    assert value(found, "dflash_look_age_seconds", job="a") == 45.5
    assert value(found, "dflash_loss", job="a") is None
    assert value(found, "dflash_loss", job="b") == 1.5


@contextlib.contextmanager
def served(board: Board) -> Iterator[Server]:
    server = Server(board, "127.0.0.1", 0)
    try:
        yield server
    finally:
        server.close()


def test_a_scrape_is_answered_whatever_other_clients_do() -> None:
    board = Board(1, 45.0)
    board.put(0, Told("a", "h", "", stepping(), 1000.0))
    with served(board) as server, contextlib.ExitStack() as clients:
        for _ in range(10):  # they ask for half a line and stay
            silent = clients.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            silent.sendall(b"GET /met")
        with urllib.request.urlopen(server.url, timeout=30) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert value(series(answer.read()), "dflash_step", job="a") == 5
        head = urllib.request.Request(server.url, method="HEAD")
        assert urllib.request.urlopen(head, timeout=30).read() == b""
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.url + "/no", timeout=30)
        with pytest.raises(DflashError, match="is in use") as refused:
            Server(board, "127.0.0.1", server.port)
        assert refused.value.exit_code == 1


def test_a_scrape_asks_nobody_while_a_machine_hangs(
    two: dict[str, FakeHost], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free, known = threading.Event(), threading.Event()
    servers: list[Server] = []

    class Hangs(FakeHost):
        def run(self, argv: Any, **more: Any) -> Completed:
            assert free.wait(60)
            raise HostUnreachable("no route", "host far")

    two["far"] = Hangs("far")
    says(two["near"], stepping())
    made, put = Server.__init__, Board.put

    def init(self: Server, board: Board, host: str, port: int) -> None:
        made(self, board, host, port)
        servers.append(self)

    def noted(self: Board, index: int, told: Told, error: DflashError | None = None) -> None:
        put(self, index, told, error)
        known.set()

    monkeypatch.setattr(Server, "__init__", init)
    monkeypatch.setattr(Board, "put", noted)
    from dflash_ops.fleet.ask import Asking

    passes: list[Asking[Any, Any]] = []
    begun = Asking.__iter__
    monkeypatch.setattr(Asking, "__iter__", lambda self: (passes.append(self), begun(self))[1])
    codes: list[int] = []
    options = ["exporter", "--listen", "127.0.0.1:0", "--every", "3600"]
    serving = threading.Thread(target=lambda: codes.append(run(options)))
    serving.start()
    try:
        assert known.wait(60)
        before = len(two["near"].calls)
        for _ in range(3):
            found = series(urllib.request.urlopen(servers[0].url, timeout=30).read())
            assert value(found, "dflash_up", job=ODD) == 1
            assert value(found, "dflash_up", job="other") is None  # not known yet, and nobody waits for it
        assert len(two["near"].calls) == before
    finally:
        free.set()
        passes[0].stop()
        serving.join(60)
    assert codes == [0]


@pytest.mark.parametrize("text", ["", "here", "127.0.0.1:", "127.0.0.1:99999", "::1:9400", "127.0.0.1:-1", "a:b:1"])
def test_addresses_that_are_none(text: str, two: dict[str, FakeHost], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["exporter", "--listen", text]) == 2
    assert "is no address to listen at" in capsys.readouterr().err


def test_addresses() -> None:
    assert address("9400") == ("127.0.0.1", 9400)
    assert address(":9400") == ("", 9400)
    assert address("[::1]:9400") == ("::1", 9400)


def test_a_file_for_node_exporter(
    two: dict[str, FakeHost], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    says(two["near"], stepping())
    says(two["far"], stepping())
    path = tmp_path / "dflash.prom"
    assert run(["exporter", "--once", "--textfile", str(path)]) == 0
    assert capsys.readouterr().out == ""
    assert value(series(path.read_bytes()), "dflash_step", job="other") == 5
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    os.mkfifo(tmp_path / "pipe.prom")
    (tmp_path / "folder.prom").mkdir()
    for bad, word in (
        (["--textfile", str(tmp_path / "dflash.txt")], "ends in .prom"),
        (["--textfile", str(tmp_path / "pipe.prom")], "no ordinary file"),
        (["--textfile", str(tmp_path / "folder.prom")], "is a folder"),
        (["--textfile", "a" * 300 + ".prom"], "File name too long"),
        (["--textfile", str(tmp_path / "no/dflash.prom")], "there is no folder"),
        (["--listen", ":1"], "leave one of them out"),
        (["--listen", "192.0.2.1:9400"], "leave one"),
        (["nobody"], "nobody"),
    ):
        assert run(["exporter", "--once", *bad]) == 2
        assert word in capsys.readouterr().err
    assert run(["exporter", "--listen", "192.0.2.1:9400"]) == 2
    assert "cannot listen there" in capsys.readouterr().err
    kept = path.read_bytes()
    (tmp_path / "full.prom").mkdir()
    with pytest.raises(DflashError, match="cannot be written"):
        write(Board(0, 1.0), tmp_path / "full.prom")
    assert path.read_bytes() == kept
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert run(["exporter"]) == 1
    assert "pip install 'dflash-ops[exporter]'" in capsys.readouterr().err
