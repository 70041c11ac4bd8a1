"""GPUs in the snapshot: what nvidia-smi tells, what it does not, and that nobody ever waits for it."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from smi import Smi, card

from dflash_ops.contracts import GpuInfo, Process
from dflash_ops.resident import beside, cards, proc
from dflash_ops.resident.cards import Cards
from dflash_ops.supervise import nvidia

Told = tuple[tuple[GpuInfo, ...], str]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def smi(tmp_path: Path) -> Smi:
    return Smi(tmp_path / "bin")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def asker(smi: Smi, clock: Clock) -> Iterator[Cards]:
    made = Cards(clock, lambda _: str(smi.program))
    yield made
    pid = made._beside.pid
    made.close()
    end = time.monotonic() + 10
    while pid is not None and (left := proc.stat(pid)) is not None and not left.dead:
        assert time.monotonic() < end, "it outlived its asker"
        time.sleep(0.02)


def until(asker: Cards, true: Callable[[Told], bool], launcher: Process | None = None) -> Told:
    """Look again and again, as the loop does; a look that waits for anything fails."""
    end = time.monotonic() + 20
    while True:
        begun = time.monotonic()
        told = asker.look(launcher, often=True)
        assert time.monotonic() - begun < 5, "it waited"  # the stand-in hangs for ever
        if true(told):
            return told
        assert time.monotonic() < end, told
        time.sleep(0.02)


def known(told: Told) -> bool:
    return bool(told[0]) and told[0][0].holders is not None


def test_a_card_with_all_its_numbers(smi: Smi, asker: Cards) -> None:
    smi.cards[1] = card(
        1, **{"clocks_event_reasons.active": "0x0000000000000424", "ecc.errors.corrected.volatile.total": "3"}
    )
    smi.holders = [("GPU-1", 4_000_001, "60000", "[Not Found]"), ("GPU-1", os.getpid(), "500", "/opt/a, b/tool")]
    smi.write()
    (first, second), note = until(asker, known)
    assert first == GpuInfo(
        0, "NVIDIA H200", "GPU-0", 0.97, 61440 << 20, 143771 << 20, 64.0, 612.4, 700.0, (), 0, 0, ()
    )
    assert (second.throttle, second.ecc_corrected) == (("sw_power_cap", "sw_thermal_slowdown", "0x400"), 3)
    assert [(h.bytes, h.name, h.worker) for h in second.holders or ()] == [
        (60000 << 20, "[Not Found]", None),
        (500 << 20, "tool", None),
    ]
    # the driver counts processes of another machine, and of this one only the number is the same
    assert "1 of 2 processes" in note
    assert "cannot be seen from here" in note


@pytest.mark.parametrize(
    "missing", ["[N/A]", "[Not Supported]", "[Unknown Error]", "ERR!", "", "[GPU requires reset]", "nan", "-1"]
)
def test_what_a_card_does_not_tell_is_not_zero(missing: str) -> None:
    columns = nvidia.ask_cards()[0].partition("=")[2].split(",")
    text = ", ".join("7" if c == "index" else missing for c in columns)
    assert nvidia.read_cards(text).gpus == (
        GpuInfo(7, name=missing if missing in ("nan", "-1") else "", uuid=missing if missing in ("nan", "-1") else ""),
    )


def test_columns_that_are_missing_and_lines_that_are_none() -> None:
    read = nvidia.read_cards("0, A\n\nUnable to determine the device handle: GPU is lost\n 3 , B, u, 5\nx, y\n")
    assert [(g.index, g.name, g.util) for g in read.gpus] == [(0, "A", None), (3, "B", 0.05)]
    assert read.words == "Unable to determine the device handle: GPU is lost; x, y"
    assert nvidia.read_holders("GPU-0, x, 1, p\nGPU-0\nGPU-0, 5\n")["GPU-0"][0].bytes is None


@pytest.mark.parametrize(
    ("unknown", "throttle"),
    [
        (["clocks_event_reasons.active"], ("hw_slowdown",)),
        (["clocks_event_reasons.active", "clocks_throttle_reasons.active"], None),
    ],
)
def test_an_older_driver_is_asked_in_its_own_words(
    smi: Smi, asker: Cards, clock: Clock, unknown: list[str], throttle: tuple[str, ...] | None
) -> None:
    smi.cards = [card(0, **{"clocks_throttle_reasons.active": "0x0000000000000009"})]
    smi.unknown = unknown
    smi.write()
    (only,), note = until(asker, known)
    assert (only.throttle, only.util, note) == (throttle, 0.97, "")
    calls = len(smi.asked())
    clock.now += cards.OFTEN_S
    until(asker, lambda _: len(smi.asked()) == calls + 1)  # it is not asked for the newer word again


def test_workers_of_the_attempt_are_known_by_name(smi: Smi, asker: Cards) -> None:
    words = "'-m', 'trainer.worker_main', 'target', 'target0', '0'"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(60)', {words}])"
    launcher = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, env={**os.environ, "RANK": "3"})
    try:
        me = proc.of(launcher.pid)
        end = time.monotonic() + 10
        while not (family := proc.family(me)) and time.monotonic() < end:
            time.sleep(0.02)
        (worker,) = family
        while "trainer.worker_main" not in Path(f"/proc/{worker.pid}/cmdline").read_text():  # before its exec
            assert time.monotonic() < end
        smi.holders = [
            ("GPU-0", worker.pid, "9", "python3"),
            ("GPU-0", launcher.pid, "2", "python3"),
            ("GPU-1", os.getpid(), "[N/A]", "/usr/bin/other"),
        ]
        smi.write()
        gpus, note = until(asker, known, me)
        assert [h.worker for h in gpus[0].holders or ()] == ["target0", "launcher"]
        (other,) = gpus[1].holders or ()
        assert (other.worker, other.bytes, other.pid) == (None, None, os.getpid())
        assert other.name == Path("/proc/self/comm").read_text().strip()
        assert note == ""
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()


def test_a_rank_of_a_foreign_trainer(smi: Smi, asker: Cards) -> None:
    rank = subprocess.Popen(["sleep", "60"], start_new_session=True, env={"RANK": "3"})
    try:
        me = proc.me()
        smi.holders = [("GPU-0", rank.pid, "9", "sleep")]
        smi.write()
        gpus, _ = until(asker, known, me)
        assert [h.worker for h in gpus[0].holders or ()] == ["rank 3"]
    finally:
        rank.kill()
        rank.wait()


def test_a_driver_that_hangs_is_said_and_left_alone(smi: Smi, clock: Clock, asker: Cards) -> None:
    until(asker, known)
    smi.does = "hang"
    smi.write()
    clock.now += cards.OFTEN_S
    until(asker, lambda _: len(smi.asked()) == 3)
    clock.now += 12
    gpus, note = asker.look(None, often=True)
    assert len(gpus) == 2
    assert "has not answered for 12 s" in note
    clock.now += 10
    _, note = until(asker, lambda told: "did not answer within" in told[1])  # it ignores TERM
    clock.now += 1
    assert asker.look(None, often=True)[0], "22 s are not too old yet"
    assert len(smi.asked()) == 3
    clock.now += 2 * cards.OLD_S
    gpus, note = until(asker, lambda _: len(smi.asked()) == 4)
    assert gpus == ()
    assert "nvidia-smi" in note
    smi.does = ""
    smi.write()
    clock.now += 25
    until(asker, lambda told: "did not answer" in told[1])
    clock.now += cards.SELDOM_S + 1
    until(asker, known)


def test_one_that_cannot_be_killed_is_not_joined_by_another(
    smi: Smi, clock: Clock, asker: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside.os, "killpg", lambda *_: None)  # a process in uninterruptible sleep
    smi.does = "hang"
    smi.write()
    until(asker, lambda _: len(smi.asked()) == 1)
    clock.now += 1000
    for _ in range(5):
        gpus, note = asker.look(None, often=True)
    assert gpus == ()
    assert "1000 s and cannot be killed" in note
    assert len(smi.asked()) == 1
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("fail", "nvidia-smi failed with 18: Failed to initialize NVML: Driver/library version mismatch"),
        ("none", "nvidia-smi failed with 6: No devices were found"),
        ("flood", "nvidia-smi says more than 256 KiB"),
    ],
)
def test_why_there_are_no_cards(smi: Smi, asker: Cards, does: str, said: str) -> None:
    smi.does = does
    smi.write()
    assert until(asker, lambda told: told[1] != "not asked yet") == ((), said)


def test_garbage_is_no_card_worth_a_number(smi: Smi, asker: Cards) -> None:
    smi.does = "garbage"
    smi.write()
    gpus, note = until(asker, lambda told: told[1] != "not asked yet")
    assert all(
        value is None
        for g in gpus
        for k, value in dataclasses.asdict(g).items()
        if k not in ("index", "name", "uuid", "holders")
    )
    assert len(note) < 400


def test_a_question_of_who_holds_memory_that_hangs_costs_no_number(smi: Smi, clock: Clock, asker: Cards) -> None:
    smi.does = "hang on holders"
    smi.write()
    gpus, _ = until(asker, lambda told: bool(told[0]))
    assert (gpus[0].util, gpus[0].holders) == (0.97, None)
    clock.now += cards.PATIENCE_S + 1
    gpus, _ = until(asker, lambda told: "who holds memory" in told[1])
    assert gpus[0].util == 0.97


def test_without_nvidia_smi_it_is_said(clock: Clock) -> None:
    assert Cards(clock, lambda _: None).look(None, often=True) == ((), cards.ABSENT)
    gone = Cards(clock, lambda _: "/nowhere/nvidia-smi")
    assert gone.look(None, often=True) == ((), "nvidia-smi cannot be run: No such file or directory")


def test_it_is_asked_every_few_seconds_where_somebody_watches_else_seldom(smi: Smi, clock: Clock, asker: Cards) -> None:
    until(asker, known)
    for _ in range(20):
        asker.look(None, often=True)
    assert len(smi.asked()) == 2
    clock.now += cards.OFTEN_S
    asker.look(None, often=False)
    assert asker._beside.pid is None, "nobody watches"
    until(asker, lambda _: asker._beside.pid is None and len(smi.asked()) == 3)
    assert known(asker.look(None, often=True)), "who holds memory is still known"
    clock.now += cards.HELD_S
    until(asker, lambda _: asker._beside.pid is None and len(smi.asked()) == 5)
    clock.now += cards.SELDOM_S
    asker.look(None, often=False)
    assert asker._beside.pid is not None


def test_a_loop_that_is_killed_leaves_no_question_behind(smi: Smi) -> None:
    smi.does = "hang"
    smi.write()
    code = (
        "import sys, time\nfrom dflash_ops.resident.beside import Beside\nbeside = Beside(60)\n"
        "assert beside.begin([sys.argv[1], '--query-gpu=index']) is None\nprint(beside.pid, flush=True)\ntime.sleep(60)"
    )
    loop = subprocess.Popen([sys.executable, "-c", code, str(smi.program)], stdout=subprocess.PIPE)
    assert loop.stdout is not None
    asked = proc.of(int(loop.stdout.readline()))
    loop.kill()
    loop.wait()
    end = time.monotonic() + 10
    while proc.alive(asked):
        assert time.monotonic() < end
        time.sleep(0.02)
