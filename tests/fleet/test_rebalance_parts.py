"""The pure parts of a rebalance, and its settling over links that fail: no machine, no trainer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from dflash_ops.balance import Plan, Prediction, Row, Split, Verdict, judge_memory
from dflash_ops.client import Seen
from dflash_ops.contracts import ExitRecord, JobSpec, Progress, Snapshot, State, to_dict
from dflash_ops.errors import ConnectionLost, DflashError, JobBusy, StartError, UsageError
from dflash_ops.fleet import rebalance_choice as choice
from dflash_ops.fleet.rebalance_choice import Devices
from dflash_ops.fleet.rebalance_judge import Settling, pace_of, settling, worse
from dflash_ops.fleet.rebalance_result import Asked
from dflash_ops.fleet.rebalance_turn import Settled, Turning
from dflash_ops.hosts.fake import FakeHost
from dflash_ops.inventory import Job, Trainer
from dflash_ops.view.rebalance import Shown, render
from dflash_ops.view.stages import Silent

GPUS = Devices(tuple(f"cuda:{n}" for n in range(6)), ("cuda:6", "cuda:7"))


# -- devices


def test_a_split_moves_as_few_devices_as_it_can() -> None:
    five = choice.choose(choice.pool(GPUS, None), Split(5, 3))
    assert five == Devices(GPUS.target[:5], ("cuda:5", "cuda:6", "cuda:7"))
    less = choice.choose(choice.pool(GPUS, None), Split(3, 2))
    assert less == Devices(GPUS.target[:3], ("cuda:6", "cuda:7"))  # the rest lies idle
    now = Devices(("cuda:0",), ("cuda:3",))
    assert choice.pool(now, ["cuda:3", "cuda:2", "cuda:0", "cuda:1"]) == ("cuda:0", "cuda:2", "cuda:1", "cuda:3")
    assert choice.pool(now, ["cuda:1", "cuda:2"]) == ("cuda:1", "cuda:2")  # neither of its own may be used


def test_drafters_of_two_kinds_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot average"):
        choice.choose(("cuda:0", "cuda:1", "cpu"), Split(1, 2))
    with pytest.raises(UsageError, match="0 targets"):
        choice.choose(("cpu",), Split(0, 1))
    assert choice.choose(("cpu",), Split(0, 1), features=True) == Devices((), ("cpu",))


def spec(**more: Any) -> JobSpec:
    toml = '[workers]\ntarget_devices = ["cpu"]\ndrafter_devices = ["cpu"]\nthreads = 2\n\n[train]\nlr = 1e-3\n'
    base = JobSpec(
        "j", "/r", "s", ("python3", "-m", "trainer", "run"), "c", files={"run.toml": toml, "playbooks.json": "{}"}
    )
    return replace(base, **more)


def test_only_the_devices_of_the_job_change() -> None:
    before = spec(env={"A": "1", "TOKEN": ""}, secret_env=("TOKEN",), release="abc", decision="d-1", nofile=7)
    after = choice.with_devices(
        before, Devices(("cpu", "cpu"), ("cpu",)), {"TOKEN": "x"}, reason="why", actor="ada", watch_s=9.0
    )
    config = choice.config_of(after)
    assert config["workers"] == {"target_devices": ["cpu", "cpu"], "drafter_devices": ["cpu"], "threads": 2}
    assert config["train"] == {"lr": 1e-3}
    assert after.remedies.values["workers.target_devices"] == ["cpu", "cpu"]  # what leaves a device out reads this
    assert (after.release, after.files["playbooks.json"], after.nofile) == ("abc", "{}", 7)
    assert (after.env["TOKEN"], after.actor, after.decision, after.watch_s) == ("x", "ada", "", 9.0)
    with pytest.raises(UsageError, match="TOKEN"):
        choice.with_devices(before, GPUS, {}, reason="", actor="", watch_s=0)


def test_a_run_whose_devices_the_supervisor_changed_is_refused() -> None:
    changed = spec(argv=(*spec().argv, "--set", 'workers.target_devices=["cpu"]'))
    with pytest.raises(UsageError, match="supervisor changed"):
        choice.devices_of(changed, choice.config_of(changed))
    with pytest.raises(UsageError, match="not the bundled trainer"):
        choice.config_of(spec(files={}))


# -- pace


def records(rates: Sequence[float], *, seconds: float = 2.0, first: int = 10, each: int = 10) -> list[dict[str, Any]]:
    return [
        {"t": 100.0 + seconds * i, "step": first + each * i, "block_tok_s": rate, "ctx_tok_s": 2 * rate}
        for i, rate in enumerate(rates)
    ]


def test_the_pace_is_that_of_whole_intervals_behind_the_warm_up() -> None:
    found = pace_of(records([1.0, 1.0, 100.0, 104.0, 96.0, 100.0]), after_step=20)
    assert (found.block_tok_s, found.ctx_tok_s, found.intervals, found.steps) == (100.0, 200.0, 4, 40)
    assert 90 < found.low < 100 < found.high < 110
    with pytest.raises(UsageError, match="2 whole intervals"):
        pace_of(records([1.0, 1.0, 1.0]))
    again = [*records([50.0] * 4), *records([50.0] * 4)]  # drafters that started anew: their steps came twice
    assert pace_of(again).intervals == 6
    broken = [{"t": None}, {"step": "x"}, *records([70.0] * 5), {"t": 1.0, "step": 2, "block_tok_s": float("nan")}]
    assert pace_of(broken).block_tok_s == 70.0


@pytest.mark.parametrize(
    ("before", "after", "is_worse"),
    [
        ([100.0] * 6, [99.0] * 6, False),  # within 2 %, however narrow the intervals
        ([100.0] * 6, [95.0] * 6, True),
        ([100.0, 60.0, 140.0, 100.0, 80.0, 120.0], [90.0] * 6, False),  # the pace before says no more than that
        ([100.0] * 6, [95.0, 60.0, 130.0, 95.0, 70.0, 120.0], False),
        ([100.0] * 6, [120.0] * 6, False),
    ],
)
def test_worse_is_beyond_both_intervals(before: list[float], after: list[float], is_worse: bool) -> None:
    assert worse(pace_of(records(before)), pace_of(records(after))) is is_worse


def test_settling_counts_steps_by_the_trainers_config() -> None:
    assert settling({}, 100, None, None) == Settling(100, 50, 100)
    assert settling({"train": {"average_every": 3, "log_every": 4}}, 0, None, None) == Settling(0, 8, 21)
    assert settling({}, 0, 5, 1).measure == 40  # fewer would be no progress lines
    plan = Settling(100, 50, 100)
    assert [plan.text(s) for s in (None, 120, 170, 400)] == [
        "settling: 0 of 50 steps", "settling: 20 of 50 steps", "measuring: 20 of 100 steps",
        "measuring: 100 of 100 steps",
    ]  # fmt: skip


# -- settling, over links that fail


def seen(attempt: int, state: State, step: int | None = None, **more: Any) -> Seen:
    now = time.time()
    progress = Progress(now, step=step) if step is not None else None
    return Seen(Snapshot("j", now, state, now, attempt=attempt, progress=progress, **more), now)


class Told(Turning):
    """Settling of attempt 2, heard from a client that says what the test has; a link that fails is an error in it."""

    lost_s, pauses = 1.0, (0.01,)

    def __init__(self, *news: Seen | DflashError, newest: str = "ada") -> None:
        job = Job("j", "h", "/r", "s", "/r/c", trainer=Trainer(("cpu",), ("cpu",)))
        asked = Asked(split=Split(2, 1), limit_s=3.0)
        self.fake = FakeHost()
        super().__init__(self.fake, job, asked, Silent(), python="python3", environ={})
        self.news: Iterator[Seen | DflashError] = iter(news)
        self.__dict__["client"] = SimpleNamespace(seen=self._next, follow=self._follow, job=job, logs=lambda **_: [])
        self.actor = newest

    def _next(self, **_: Any) -> Seen:
        one = next(self.news, ConnectionLost("gone", "h"))
        if isinstance(one, DflashError):
            raise one
        return one

    def _follow(self, **_: Any) -> Iterator[Seen]:
        while True:
            time.sleep(0.02)
            yield self._next()

    def pace(self) -> dict[str, Any]:
        return {"newest": {"attempt": 3, "spec": {"actor": self.actor}}}

    def settled(self) -> Settled:
        return self.settle(2, Settling(100, 10, 20))


class Looked(Told):
    """A look at attempt 3, whose journal there cannot be read."""

    def pace(self) -> dict[str, Any]:
        ran = {"attempt": 3, "spec": to_dict(spec())}
        return {
            "newest": ran, "snapshot": None, "now": 1000.0,
            "events": [], "events_note": "the journal cannot be read: x",
            "measured": {**ran, "alive": True, "records": records([1.0]), "damaged": 0},
        }  # fmt: skip


def test_a_change_that_may_have_been_begun_is_said() -> None:
    looked = Looked()
    looked.look()
    assert looked.result.notes == [
        "whether a change of the split was begun before is not known: the journal cannot be read: x"
    ]


GONE = ConnectionLost("the link is gone", "h")
WARMING = seen(2, State.STEPPING, 105)


def test_enough_steps_end_it_and_a_link_that_comes_back_costs_nothing() -> None:
    steps = [seen(1, State.STOPPED), seen(2, State.LOADING), WARMING, GONE, GONE, seen(2, State.SLOW, 120)]
    assert Told(*steps, seen(2, State.STEPPING, 130)).settled() == Settled()


def test_a_link_that_stays_away_says_what_to_type() -> None:
    with pytest.raises(ConnectionLost, match="the link was gone") as lost:
        Told(WARMING, GONE).settled()
    assert "dflash-ops rebalance j --targets 2 --drafters 1" in lost.value.next


def test_time_is_limited() -> None:
    told = Told(*[WARMING] * 10_000)
    told.asked = replace(told.asked, limit_s=0.3)
    assert "did not come" in told.settled().short


def test_what_fails_is_told_apart_from_what_somebody_did() -> None:
    exit = ExitRecord(2, 4, None, 1.0, 2.0)
    crashed = Told(WARMING, seen(2, State.CRASHED, exit=exit)).settled()
    assert crashed.rc == 4
    assert crashed.failed is not None
    hung = Told(WARMING, seen(2, State.HUNG)).settled()
    assert hung.failed is not None
    assert "hangs" in hung.failed.what
    replaced = Told(WARMING, seen(3, State.LOADING), newest="supervisor of j").settled()
    assert replaced.failed is not None
    assert "supervisor started attempt 3" in replaced.failed.what
    with pytest.raises(JobBusy, match="attempt 3 was started meanwhile by ada"):
        Told(WARMING, seen(3, State.LOADING)).settled()
    with pytest.raises(StartError, match="stopped by somebody"):
        Told(WARMING, seen(2, State.STOPPED)).settled()
    assert "finished" in Told(WARMING, seen(2, State.FINISHED)).settled().short


# -- the table


def test_the_table_fits_80_columns_and_says_why_a_split_is_refused() -> None:
    def row(targets: int, rate: float | None) -> Row:
        split = Split(targets, 8 - targets)
        found = (
            Prediction(split, rate, rate, rate * 0.9, rate * 1.1, 0.71, 1.0, 0.4, 777600.0, "drafters", "why")
            if rate
            else None
        )
        return Row(
            split, found, None if rate else "0 drafters: nobody would train", Verdict("unknown", "memory is not known")
        )

    table = Plan(8, Split(6, 2), (row(8, None), row(6, 13500.0), row(5, 19500.0)), Split(5, 3))
    shown = Shown("dflash", "gpu", Split(6, 2), table.rows, table.best, Split(5, 3), 13400.0, "The drafters limit.")
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(shown))
    text = console.export_text()
    for line in (
        "  6+2 now",
        "19.5 17.6-21.4",
        "9 d 0 h",
        "best, asked",
        "8+0 is refused: 0 drafters",
        "13.4 block Ktok/s",
    ):
        assert line in text
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text


# -- memory

GIB = 1 << 30
#: Qwen3.6-27B as far as its shape counts here.
TARGET = {
    "text_config": {
        "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24, "num_key_value_heads": 4,
        "head_dim": 256, "vocab_size": 248320,
    }
}  # fmt: skip
NEEDS = {
    "target_bytes_per_worker": 54 * GIB, "drafter_bytes_per_worker": 20 * GIB, "drafter_parameters": 10**9,
    "ring_bytes": 8 * GIB, "average_bytes": 20 * GIB, "targets": 6, "readers": 0, "drafters": 2,
}  # fmt: skip


def memory(total: int, room: int | None, target: dict[str, Any] | None) -> Verdict:
    """What is said of 5+3, of eight cards with so much memory and a ring.dir with so much room."""
    turning = Told()
    turning.config, turning.devices = {"target": {"path": "target"}, "data": {"batch_size": 1}}, GPUS
    turning.said = {"gpus": [{"index": n, "total": total, "used": 0} for n in range(8)], "launcher": 7}
    answer = f"{room if room is not None else ''}\n{json.dumps(target) if target is not None else ''}"
    turning.fake.answer("sh", "-c", lambda _: True, "sh", "/dev/shm", "/r/target/config.json", stdout=answer)
    return judge_memory(Split(5, 3), turning.memory_of(NEEDS))


def test_a_split_fits_only_where_cards_and_the_memory_of_the_ring_are_known() -> None:
    assert memory(140 * GIB, 100 * GIB, TARGET).state == "fits"
    assert memory(140 * GIB, 0, TARGET).state == "fits", "what runs gives its own ring and averages back"
    small = memory(40 * GIB, 100 * GIB, TARGET)
    assert (small.state, "a target needs" in small.text) == ("no", True)
    blind = memory(140 * GIB, None, None)
    assert blind.state == "unknown"
    assert "what a target needs to work in" in blind.text
    assert "host memory for ring and averages" in blind.text
