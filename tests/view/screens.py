"""The recorded screens of the watch: each state and what else a person may meet.

python tests/view/screens.py          writes tests/data/screens/ anew; read what changed before it is committed
python tests/view/screens.py crashed  prints one
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.text import Text

from dflash_ops.contracts import (
    CheckpointInfo,
    DiskInfo,
    ErrorInfo,
    Event,
    ExitRecord,
    GpuHolder,
    GpuInfo,
    Progress,
    ResidentInfo,
    SessionInfo,
    Snapshot,
    StageInfo,
    State,
    WorkerShares,
)
from dflash_ops.view.nodes import NodeSeen
from dflash_ops.view.watch import ASCII, UNICODE, Choice, Link, Page, Pen, Place, Watched, frame
from dflash_ops.view.watch_seen import blind

FOLDER = Path(__file__).resolve().parents[1] / "data/screens"
NOW = 1_764_445_073.0
GIB = 1 << 30


def curve(low: float, high: float, bend: float = 40.0, wave: float = 0.03) -> tuple[float, ...]:
    """From `high` down to `low`, or up where `high` is the smaller one."""
    size = (high - low) * wave
    return tuple(low + (high - low) * math.exp(-i / bend) + size * math.sin(i * 1.7) for i in range(120))


def card(index: int) -> GpuInfo:
    worker, gib, util = (f"target{index}", 118, 0.97) if index < 5 else (f"drafter{index - 5}", 63, 0.91)
    return GpuInfo(
        index, "NVIDIA H200", f"GPU-{index:04d}", util, gib * GIB, 141 * GIB, 71.0 - index, 652.0 - 11 * index, 700.0,
        ("sw_power_cap",) if index == 2 else (), 0, 0, (GpuHolder(4200 + index, (gib - 1) * GIB, worker),),
    )  # fmt: skip


def cards(**changes: object) -> tuple[GpuInfo, ...]:
    return tuple(replace(card(i), **changes) for i in range(8))  # type: ignore[arg-type]


STEPPING = Snapshot(
    job="main", t=NOW - 0.4, state=State.STEPPING, since=NOW - 4040, detail="step 320 of 500", attempt=3, life=0,
    release="0a1b2c3d4e5f", started=NOW - 4073, stage=StageInfo("stepping"),
    progress=Progress(
        t=NOW - 1, step=320, total=500, epoch=1.28, loss=2.1101, acc=0.452, tau=3.21, block_tok_s=13500.0,
        ctx_tok_s=20100.0, lr=3.9e-4, ring_ready=3, ring_slots=8, eta_s=412.0,
    ),
    rates={
        "block_tok_s_median": 13400.0, "block_tok_s_mean": 12900.5, "ctx_tok_s_median": 20000.0,
        "ctx_tok_s_mean": 19100.0, "eta_error_s": 14.5,
    },
    workers={
        **{f"target{i}": WorkerShares(0.12, 0.78, 0.08, 0.02, life=int(i == 3)) for i in range(5)},
        **{f"drafter{i}": WorkerShares(wait=0.30, compute=0.60, copy=None, sync=0.10) for i in range(3)},
    },
    last_event=Event(7, NOW - 240, "checkpoint", data={"step": 300}),
    checkpoint=CheckpointInfo(300, "checkpoints/step-00000300", NOW - 240),
    session=SessionInfo("dflash", "dflash-ops", True),
    resident=ResidentInfo(True, 77, 1234, "abc"),
    gpus=tuple(card(i) for i in range(8)),
    disk=DiskInfo("/srv/main/checkpoints", 200 * GIB, 1024 * GIB, 90000.0),
    curves={
        "loss": curve(2.1, 6.4), "tau": curve(3.2, 1.1, 60), "block_tok_s": curve(13400, 12000, 5),
        "ctx_tok_s": curve(20000, 18000, 5),
    },
    deeds=(
        "2025-11-28T18:25:02Z CUDA out of memory (cuda_oom), attempt 2 at step 208: restart with a smaller batch",
        "2025-11-29T18:31:10Z verified: attempt 3 went beyond step 208",
    ),
)  # fmt: skip

EARLY = replace(
    STEPPING, state=State.LOADING, since=NOW - 41, detail="loading 3 of 8 (target2)", progress=None, curves={},
    stage=StageInfo("loading", 3, 8, "target2"), workers={}, rates={}, started=NOW - 41, checkpoint=None,
    last_event=None, deeds=(), gpus=cards(util=0.0, power_w=118.0, throttle=("gpu_idle",), mem_used=40 * GIB),
)  # fmt: skip


def seen(s: Snapshot, rank: int = 0, host: str = "192.0.2.7", ago: float = 0.0) -> NodeSeen:
    return NodeSeen(rank, host, "/srv/main", replace(s, t=s.t - ago), NOW)


def one(s: Snapshot, **more: object) -> Watched:
    return Watched(s.job, "192.0.2.7", (seen(s),), **more)  # type: ignore[arg-type]


def crashed() -> Watched:
    message = (
        "RuntimeError: CUDA error: an illegal memory access was encountered. CUDA kernel errors might be "
        "asynchronously reported at some other API call, so the stacktrace below might be incorrect. For debugging "
        "consider passing CUDA_LAUNCH_BLOCKING=1"
    )
    end = ExitRecord(3, 1, None, NOW - 75, 4000.0)
    return one(
        replace(
            STEPPING, state=State.CRASHED, since=NOW - 75, detail=f"drafter1 failed; {end.describe()}", exit=end,
            error=ErrorInfo("drafter1", message, NOW - 76), stage=StageInfo("stepping"),
        )
    )  # fmt: skip


def lost(s: Snapshot, seconds: float, tries: int) -> Watched:
    node = NodeSeen(0, "192.0.2.7", "/srv/main", replace(s, t=NOW - seconds - 1), NOW)
    link = Link(seconds, tries, "the connection was cut: nothing was heard for 12 s")
    return Watched(s.job, "192.0.2.7", (blind(node, seconds),), link=link)


def nodes() -> Watched:
    first = replace(STEPPING, job="big")
    other = replace(first, progress=replace(STEPPING.progress, block_tok_s=6100.0), deeds=())  # type: ignore[type-var]
    stuck = replace(other, state=State.HUNG, since=NOW - 320, detail="no step for 320 s (limit 300 s)")
    found = (seen(first), seen(other, 1, "192.0.2.8"), seen(stuck, 2, "192.0.2.9"))
    return Watched("big", "192.0.2.7, 192.0.2.8, 192.0.2.9", found, several=True)


def many(count: int = 7) -> list[Watched]:
    names = ("main", "ablation-lr", "日本語 🚀 run", "nightly-27b", "foreign", "small\x1b[31m", "old")
    foreign = Progress(NOW, step=77, rate=12.5, loss=0.5)
    jobs = [
        one(replace(STEPPING, job=names[0])),
        one(replace(EARLY, job=names[1])),
        one(replace(STEPPING, job=names[2], state=State.SLOW, detail="38 s a step, median 21 s")),
        replace(crashed(), name=names[3], nodes=(seen(replace(crashed().nodes[0].snapshot, job=names[3])),)),
        one(Snapshot(names[4], NOW - 0.4, State.STEPPING, NOW - 300, attempt=1, progress=foreign)),
        replace(lost(replace(STEPPING, job=names[5]), 72.0, 6), name=names[5]),
        Watched(names[6], "192.0.2.99"),
    ]
    return [jobs[n % 7] if n < 7 else replace(jobs[n % 7], name=f"{names[n % 7]}-{n}") for n in range(count)]


HUNG = replace(STEPPING, state=State.HUNG, since=NOW - 325, detail="no step for 325 s while stepping (limit 300 s)")
FINISHED = replace(
    STEPPING, state=State.FINISHED, since=NOW - 600, detail="exit code 0 (finished)",
    exit=ExitRecord(3, 0, None, NOW - 600, 5400.0), gpus=cards(util=0.0, mem_used=0, power_w=80.0, holders=()),
    progress=replace(STEPPING.progress, step=500, epoch=2.0, eta_s=0.0),  # type: ignore[type-var]
)  # fmt: skip
STOPPED = replace(
    STEPPING, state=State.STOPPED, since=NOW - 60, detail="",
    exit=ExitRecord(3, 3, None, NOW - 60, 4000.0, requested="stop"),
)  # fmt: skip
COMPILING = replace(
    EARLY, state=State.COMPILING, detail="compiling 4 of 12 (drafter0)", stage=StageInfo("compiling", 4, 12, "drafter0")
)
WARM = replace(
    EARLY, state=State.STEPPING, detail="the first step is awaited", stage=StageInfo("stepping", 1, 1, "drafters")
)
UNKNOWN = Snapshot("main", NOW, State.UNKNOWN, NOW, "never deployed: dflash-ops deploy main")
NEVER = Watched("main", "192.0.2.7", link=Link(640.0, 55, "no answer from 192.0.2.7 port 22 within 10 s"))
NAN = replace(
    STEPPING, progress=replace(STEPPING.progress, loss=math.nan, tau=1.0),  # type: ignore[type-var]
    curves={**STEPPING.curves, "loss": (*curve(2.1, 6.4)[:100], *[math.nan] * 20)},
    warnings=("the loss is not finite since step 300", "drafter1 waits for 92 % of its time"),
)  # fmt: skip
BARE = replace(
    STEPPING,
    gpus=(
        GpuInfo(0, "NVIDIA GeForce RTX 3090", mem_used=GIB, mem_total=24 * GIB),
        GpuInfo(1, util=1.0, mem_used=23 * GIB, mem_total=24 * GIB, temp_c=92.0, power_w=350.0, power_limit_w=350.0,
                throttle=("hw_thermal_slowdown", "sw_power_cap"), ecc_corrected=12, ecc_uncorrected=2,
                holders=(GpuHolder(977, None, None, "[Not Found]"), GpuHolder(12, 5 * GIB, None, "python3"))),
    ),
    disk=DiskInfo("/srv/main", 3 * GIB, 1024 * GIB, 1800.0), workers={}, curves={},
)  # fmt: skip
LOG = Page(
    "main: log, last 400 lines", [Text(f"dflash step={n}/500 loss=2.{n:04d} tau=3.1") for n in range(200)], scroll=None
)

JOB, JOBS = Choice(Place.JOB), Choice(Place.JOBS, 3)


@dataclass(frozen=True)
class Scene:
    jobs: Callable[[], list[Watched]]
    choice: Choice = JOB
    width: int = 80
    height: int = 24
    pen: Pen = UNICODE

    def lines(self) -> list[Text]:
        return frame(self.jobs(), self.choice, self.width, self.height, self.pen)

    def text(self) -> str:
        return "".join(line.plain.rstrip() + "\n" for line in self.lines())


def _job(s: Snapshot | Watched) -> Callable[[], list[Watched]]:
    return lambda: [s if isinstance(s, Watched) else one(s)]


_STATES: dict[str, Snapshot | Watched] = {
    "loading": EARLY, "compiling": COMPILING, "stepping": STEPPING, "hung": HUNG, "crashed": crashed(),
    "slow": replace(STEPPING, state=State.SLOW, since=NOW - 90, detail="38 s a step, median 21 s"),
    "finished": FINISHED, "stopped": STOPPED, "unknown": UNKNOWN, "unreachable": lost(STEPPING, 72.0, 6),
}  # fmt: skip

SCENES: dict[str, Scene] = {
    **{name: Scene(_job(s)) for name, s in _STATES.items()},
    "warm-up": Scene(_job(WARM)),
    "never_reached": Scene(_job(NEVER)),
    "asking": Scene(_job(Watched("main", "192.0.2.7"))),
    "nan": Scene(_job(NAN)),
    "na": Scene(_job(BARE)),
    "paused": Scene(_job(STEPPING), replace(JOB, paused_s=75.0)),
    "nodes": Scene(lambda: [nodes()]),
    "jobs": Scene(many, JOBS),
    "jobs_lost": Scene(many, replace(JOBS, chosen=5)),
    "jobs_40": Scene(lambda: many(40), replace(JOBS, chosen=25)),
    "help": Scene(_job(STEPPING), Choice(Place.HELP)),
    "log": Scene(_job(STEPPING), Choice(Place.PAGE, page=LOG)),
    "reading": Scene(_job(STEPPING), Choice(Place.PAGE, page=Page("main: triage", reading_s=7.0))),
    "stepping_ascii": Scene(_job(STEPPING), pen=ASCII),
    "jobs_ascii": Scene(many, JOBS, pen=ASCII),
    "no_keys": Scene(_job(STEPPING), replace(JOB, keys=False)),
    "stepping_120x40": Scene(_job(STEPPING), width=120, height=40),
    "stepping_40x10": Scene(_job(STEPPING), width=40, height=10),
    "crashed_40x10": Scene(_job(crashed()), width=40, height=10),
    "stepping_200x60": Scene(_job(STEPPING), width=200, height=60),
    "crashed_200x60": Scene(_job(crashed()), width=200, height=60),
    "loading_200x60": Scene(_job(EARLY), width=200, height=60),
    "nodes_200x60": Scene(lambda: [nodes()], width=200, height=60),
    "jobs_200x60": Scene(many, JOBS, width=200, height=60),
}  # fmt: skip


def main(names: list[str]) -> None:
    for name in names:
        print(SCENES[name].text())
    if not names:
        FOLDER.mkdir(exist_ok=True)
        for old in FOLDER.glob("*.txt"):
            if old.stem not in SCENES:
                old.unlink()
        for name, scene in SCENES.items():
            (FOLDER / f"{name}.txt").write_text(scene.text(), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
