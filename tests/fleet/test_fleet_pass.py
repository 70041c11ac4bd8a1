"""One pass over many jobs: all at one time, what is away holds up nothing, and what is shown of them. No real clock."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from schemas import valid  # type: ignore[import-not-found]

from dflash_ops.cli.fleet import STATES
from dflash_ops.cli.main import run
from dflash_ops.contracts import Progress, Snapshot, State, dumps
from dflash_ops.errors import DeadlineExceeded, HostUnreachable, UsageError
from dflash_ops.fleet import ask
from dflash_ops.fleet.ask import LANES, Answer, Asking, Waiting
from dflash_ops.fleet.jobs import Filters, machine_of
from dflash_ops.hosts.base import Completed
from dflash_ops.hosts.fake import FakeHost
from dflash_ops.inventory import load

#: Seconds that only a failing test waits.
LONG = 60.0


def asking(items: list[Any], work: Callable[[Any], Any], **more: Any) -> Asking[Any, Any]:
    more.setdefault("machine", str)
    return Asking(items, work, name=str, **more)


def answers(events: Asking[Any, Any]) -> list[Answer[Any]]:
    return [event for event in events if isinstance(event, Answer)]


def test_two_hundred_machines_are_all_asked_at_one_time() -> None:
    everyone = threading.Barrier(200, timeout=LONG)

    def work(item: int) -> int:
        everyone.wait()
        return item

    assert sorted(a.ended.value for a in answers(asking(list(range(200)), work))) == list(range(200))


def test_what_hangs_delays_nobody_and_is_given_up_when_its_time_is_over() -> None:
    """20 of 200 never answer, whatever deadline they were given; the clock stands until the others are known."""
    hangs, known, given_up = threading.Event(), [], []

    def work(item: int) -> int:
        if item % 10 == 0:
            hangs.wait(LONG)
        if item % 10 == 1:
            raise HostUnreachable("no route", f"host {item}")
        return item

    events = asking(list(range(200)), work, give_up_s=20.0, clock=lambda: 30.0 if len(known) == 180 else 0.0)
    for event in events:
        if isinstance(event, Answer):
            (given_up if isinstance(event.ended.error, DeadlineExceeded) else known).append(event)
            assert not given_up or len(known) == 180
    hangs.set()
    assert [a.index for a in given_up] == list(range(0, 200, 10))
    assert sum(isinstance(a.ended.error, HostUnreachable) for a in known) == 20
    assert "no answer within 20 s" in str(given_up[0].ended.error)


def test_one_machine_is_asked_a_few_questions_at_a_time_and_a_hung_container_holds_one_place_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ask, "TICK_S", 0.05)
    go, hang = threading.Event(), threading.Event()

    def work(item: int) -> int:
        assert (hang if item == 0 else go).wait(LONG)
        return item

    got: list[int] = []
    for event in asking(list(range(100)), work, machine=lambda item: "proxmox"):
        if isinstance(event, Waiting):
            assert len(event.items) <= LANES
            if len(event.items) == LANES:
                go.set()
        else:
            assert event.ended.error is None
            got.append(event.index)
            if len(got) == 99:
                hang.set()
    assert go.is_set()
    assert got[-1] == 0
    assert sorted(got) == list(range(100))


def test_again_and_again_but_never_twice_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `every` one that was given up is asked again only after its thread has come back."""
    monkeypatch.setattr(ask, "TICK_S", 0.01)
    release, calls, now = threading.Event(), {"quick": 0, "stuck": 0}, [0.0]

    def work(item: str) -> int:
        calls[item] += 1
        if item == "stuck" and calls[item] == 1:
            release.wait(LONG)
        return calls[item]

    events = asking(["quick", "stuck"], work, every=10.0, give_up_s=5.0, clock=lambda: now[0])
    seen: list[tuple[str, Any]] = []
    for event in events:
        if isinstance(event, Waiting):
            now[0] += 1.0
            continue
        name = ("quick", "stuck")[event.index]
        seen.append((name, event.ended.value))
        now[0] += 5.0
        if len(seen) == 6:
            assert calls["stuck"] == 1
            release.set()
        if name == "stuck" and event.ended.value is not None:
            events.stop()
    assert seen[0] == ("quick", 1)
    assert ("stuck", None) in seen[1:3]
    assert seen[-1] == ("stuck", 2)
    quick = [value for name, value in seen if name == "quick"]
    assert quick == list(range(1, len(quick) + 1))


def test_where_all_were_given_up_it_goes_on_and_asks_again_who_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exporter of one job whose machine hangs does not end."""
    monkeypatch.setattr(ask, "TICK_S", 0.01)
    release, calls, now = threading.Event(), [0], [0.0]

    def work(item: str) -> int:
        calls[0] += 1
        if calls[0] == 1:
            release.wait(LONG)
        return calls[0]

    events, seen = asking(["stuck"], work, every=1.0, give_up_s=5.0, clock=lambda: now[0]), []
    for event in events:
        now[0] += 1.0
        if isinstance(event, Answer):
            seen.append(event.ended.value)
        elif seen:  # it was given up, and there is nobody else to wait for
            release.set()
        if len(seen) == 2:
            events.stop()
    assert seen == [None, 2]


class Fleet:
    """An inventory, and a FakeHost for each of its hosts."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "inventory.toml"
        self.hosts: dict[str, FakeHost] = {}

    def write(self, text: str) -> None:
        self.file.write_text(text)

    def host(self, name: str) -> FakeHost:
        return self.hosts.setdefault(name, FakeHost(name))

    def sees(self, host: str, root: str, state: State, since: float = 60.0, **more: Any) -> None:
        snapshot = Snapshot("x", 1000.0, state, 1000.0 - since, attempt=1, **more)
        self.host(host).answer("sh", "-c", ..., stdout=f"1000 file\n{dumps(snapshot)}\n")


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    monkeypatch.setenv("DFLASH_INVENTORY", str(made.file))
    monkeypatch.setattr("dflash_ops.hosts.factory.Hosts._make", lambda hosts, name: made.host(name))
    yield made


@pytest.fixture
def five(fleet: Fleet) -> Fleet:
    """Five jobs on four hosts, two of them containers of one Proxmox host; `big` runs on two nodes."""
    hosts = '[hosts.prox]\nkind = "ssh"\naddress = "192.0.2.6"\n'
    hosts += "".join(f'[hosts.ct{n}]\nkind = "lxc"\nvia = "prox"\nid = {200 + n}\n' for n in (1, 2))
    hosts += "".join(f'[hosts.{n}]\nkind = "ssh"\naddress = "192.0.2.{7 + k}"\n' for k, n in enumerate(("old", "gpu")))
    jobs = "".join(
        f'[jobs.{n}]\nhost = "{h}"\nroot = "/srv/{n}"\nsession = "{n}"\ncommand = ["true"]\n'
        for n, h in (("main", "ct1"), ("side", "ct2"), ("late", "old"), ("dead", "gpu"))
    )
    big = '[jobs.big]\nroot = "/srv/big"\nsession = "big"\ncommand = ["true"]\nrendezvous = "192.0.2.11:29400"\n'
    big += '[[jobs.big.nodes]]\nhost = "ct1"\n'
    big += '[[jobs.big.nodes]]\nhost = "ct2"\n'
    fleet.write(hosts + jobs + big)
    fleet.sees("ct1", "/srv", State.STEPPING, progress=Progress(t=1000.0, step=5, total=9, loss=1.5, eta_s=90.0))
    fleet.sees("ct2", "/srv", State.STEPPING, progress=Progress(t=1000.0, step=4, total=9, loss=1.5, eta_s=30.0))
    fleet.sees("old", "/srv", State.CRASHED)
    fleet.host("gpu").answer("sh", "-c", ..., error=HostUnreachable("no route", "host gpu"))
    return fleet


def table(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_trouble_first_a_job_of_two_nodes_is_one_row_and_all_are_one_sentence(
    five: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", "--all"]) == 5
    said = capsys.readouterr()
    assert said.err == "dead on gpu: no route (host gpu)\n"
    rows = [line.split() for line in said.out.splitlines()]
    assert [row[0] for row in rows] == ["job", "late", "dead", "main", "side", "big", "5"]
    assert rows[5][1:3] == ["2", "nodes"]
    assert " ".join(rows[-1]) == "5 jobs: 3 stepping, 1 crashed, 1 unreachable"
    assert run(["status", "--nodes"]) == 5
    assert [row[0] for row in table(capsys)] == ["job", "late", "dead", "main", "side", "big", "node", "node", "5"]
    assert run(["status", "--job", "b*"]) == 0  # the only one opens by itself
    assert [row[:3] for row in table(capsys)[2:4]] == [["node", "0", "ct1"], ["node", "1", "ct2"]]
    assert run(["status", "--sort", "eta"]) == 5
    assert [row[0] for row in table(capsys)][1:4] == ["side", "main", "big"]


@pytest.mark.parametrize(
    ("options", "shown", "asked"),
    [
        (["--state", "crashed,unreachable"], ["late", "dead"], 5),
        (["--host", "prox"], ["main", "side", "big"], 3),
        (["--host", "192.0.2.8,ct2"], ["side", "dead", "big"], 3),
        (["--job", "*a*", "--state", "stepping"], ["main"], 3),
    ],
)
def test_filters(
    options: list[str], shown: list[str], asked: int, five: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(["status", "--json", *options])
    said = json.loads(capsys.readouterr().out)
    valid("status", said)
    assert [job["job"] for job in said["jobs"]] == shown
    assert said["asked"] == asked
    away = "dead" in shown or "--state" in options
    assert code == (5 if away else 0)
    assert run(["status", *options]) == code
    rows = table(capsys)
    assert {row[0] for row in rows[1:-1]} - {"node"} == set(shown)
    assert rows[-1][0] == str(len(shown))


def test_what_fits_nothing_says_so(five: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--state", "hung,slow", "--host", "ct*"]) == 0
    assert capsys.readouterr().out == "no job is hung or slow; 3 asked: 3 stepping\n"
    assert run(["status", "--state", "hung", "--json"]) == 5  # the one that is away may be
    said = json.loads(capsys.readouterr().out)
    valid("status", said)
    assert (said["jobs"], said["asked"], said["filters"]["state"]) == ([], 5, ["hung"])
    for options, word in (
        (["--host", "nowhere*"], "no job fits --host nowhere*"),
        (["--job", "x", "--host", "gpu"], "no job fits --host gpu and --job x"),
        (["--state", "craashed"], "did you mean 'crashed'?"),
        (["--state", ","], "--state needs a value"),
        (["--sort", "name", "--watch"], "--sort and --watch exclude each other"),
        (["--nodes", "--watch"], "--nodes and --watch exclude each other"),
        (["--sort", "truoble"], "did you mean 'trouble'?"),
        (["--deadline", "0"], "--deadline"),
    ):
        calls = sum(len(host.calls) for host in five.hosts.values())
        assert run(["status", *options]) == 2
        assert word in capsys.readouterr().err
        assert sum(len(host.calls) for host in five.hosts.values()) == calls  # nobody was asked


def test_the_shell_offers_all_states() -> None:
    assert set(STATES) == {state.value for state in State}


def test_the_deadline_is_each_machines_own(five: Fleet) -> None:
    assert run(["status", "--deadline", "3"]) == 5
    assert {call.deadline for host in five.hosts.values() for call in host.calls} == {3.0}
    loaded = load(five.file)
    assert {machine_of(loaded, loaded.job(name).parts[0]) for name in ("main", "side", "big")} == {"prox"}
    with pytest.raises(UsageError):
        Filters.of(host=" , ")


class Slow(FakeHost):
    """Answers only when the others have, which `status` must show meanwhile."""

    free = threading.Event()

    def run(self, argv: Any, **more: Any) -> Completed:
        assert self.free.wait(LONG)
        return super().run(argv, **more)


def test_a_terminal_shows_what_is_known_and_who_is_waited_for(
    five: Fleet, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from dflash_ops.cli import fleet as shown

    five.hosts["old"] = slow = Slow("old")
    five.sees("old", "/srv", State.CRASHED)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(shown, "_PATIENCE_S", 0.0)
    drawn = shown._Screen.draw

    def draw(self: Any, known: list[Any], waiting: Any) -> None:
        drawn(self, known, waiting)
        if len(known) == 4 and waiting:
            slow.free.set()

    monkeypatch.setattr(shown._Screen, "draw", draw)
    try:
        assert run(["status"]) == 5
    finally:
        slow.free.set()
    out = capsys.readouterr().out
    waiting = out.index("waiting for old (")
    assert "main" in out[waiting:]
    assert "5 jobs: 3 stepping, 1 crashed, 1 unreachable" in out[out.index("late") :]
