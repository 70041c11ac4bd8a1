"""The first half of a rebalance: what runs, what was measured of it, what every other split would do. Changes nothing.

The rule here: what is not known is said or refused; a number that was measured somewhere else is never taken for this
run's.
"""

from __future__ import annotations

import json
import posixpath
import shlex
import statistics
import time
from collections.abc import Mapping
from typing import Any

from dflash_ops import balance
from dflash_ops.balance import (
    Memory,
    Row,
    Split,
    StageRates,
    feasible,
    judge_memory,
    memory_from_check,
    plan,
    predict,
    worth,
)
from dflash_ops.contracts import LIVE_STATES, JobSpec, Snapshot, State, from_dict, to_dict
from dflash_ops.deploy import spec as job_specs
from dflash_ops.deploy.decide import describe
from dflash_ops.deploy.operation import Operation
from dflash_ops.errors import DflashError, JobBusy, PreflightError, StateError, UsageError
from dflash_ops.fleet import rebalance_choice as choice
from dflash_ops.fleet.rebalance_choice import Devices
from dflash_ops.fleet.rebalance_judge import pace_of
from dflash_ops.fleet.rebalance_result import Asked, Result
from dflash_ops.hosts.base import Host
from dflash_ops.inventory import Job
from dflash_ops.resident.preflight import Request
from dflash_ops.view.stages import Stages
from dflash_ops.view.text import counted, duration

ASK_S = 60.0
CHECK_S = 600.0

#: Records whose pace is the one before: what the run did a day ago says little of it now.
RECENT = 60

#: Looks, and seconds between them, for a lease that somebody holds.
LOOKS, AGAIN_S = 3, 2.0

#: Where ring and averages lie unless the config says otherwise, and the question how much room is there, and for the
#: target's config.json (`$1` folder, `$2` file): a number or an empty line, then the file.
RING_DIR = "/dev/shm"
THERE = 'set -- "$1" "$2" $(df -P -B1 -- "$1" 2>/dev/null | tail -n 1); printf "%s\\n" "$6"; cat -- "$2" 2>/dev/null; :'

#: Seconds of a restart where no earlier one tells.
RESTART_S = 300.0


class Looking(Operation):
    """What is there, and what could be (see `Operation` for the other arguments).

    After `look`: `said` (resident/pace.py), `snapshot`, `spec`, `config` and `devices` of the newest attempt, `now`
    (its split), and `records` of the measured one.
    """

    def __init__(
        self, host: Host, job: Job, asked: Asked, stages: Stages, *, python: str, environ: Mapping[str, str]
    ) -> None:
        super().__init__(host, job, stages, python=python, environ=environ)
        self.asked = asked
        self.result = Result(job.name, host.name, asked.plan, asked.auto, asked=asked.split)
        self.said: dict[str, Any] = {}
        self.snapshot: Snapshot | None = None
        self.records: list[dict[str, Any]] = []
        self.spec: JobSpec
        self.config: dict[str, Any] = {}
        self.devices = Devices((), ())
        self.attempt = 0
        self.rates: StageRates | None = None

    @property
    def now(self) -> Split:
        return self.devices.split

    @property
    def features(self) -> bool:
        return choice.has_features(self.config)

    @property
    def typed(self) -> str:
        """The job as a shell takes it."""
        return shlex.quote(self.job.name)

    def note(self, text: str) -> None:
        """A line for people, kept for `--json`."""
        self.result.notes.append(text)
        self.stages.note(text)

    # -- what is there

    def pace(self) -> dict[str, Any]:
        """resident/pace.py, in one command, installed or not."""
        return self.ask("pace", {"root": self.job.root}, deadline=ASK_S)

    def look(self) -> None:
        """What runs, and its records.

        Raises:
            PreflightError: nothing was ever started, or nothing of it was measured.
            UsageError: what runs is not the bundled trainer. StateError: its records are damaged.
        """
        self.secrets = self.job.secrets(self.environ)
        with self.stages.stage("look", f"asking {self.host.name} what runs and how fast") as stage:
            self.said = said = self.pace()
            newest = said["newest"]
            if newest is None:
                raise PreflightError(
                    f"job {self.job.name} was never started: nothing is measured", self.where, self._deploy("")
                )
            self.attempt = int(newest["attempt"])
            if newest["spec"] is None:
                raise StateError(
                    f"the job of attempt {self.attempt} is not there whole",
                    f"{self.where}/run/attempts",
                    "deploy again",
                )
            self.spec = from_dict(JobSpec, newest["spec"], "job.json")
            if said["snapshot"] is not None:
                self.snapshot = from_dict(Snapshot, said["snapshot"], "snapshot")
            self.config = choice.config_of(self.spec)
            self.devices = choice.devices_of(self.spec, self.config)
            self.result.current = self.now
            stage.done(f"{describe(self.snapshot, said['now'])}, {self.now} (targets + drafters)")
        if said["events_note"]:
            self.note(f"whether a change of the split was begun before is not known: {said['events_note']}")
        self._take_records()

    def _take_records(self) -> None:
        measured = self.said["measured"]
        where = f"{self.where}/run/attempts/{self.attempt}/metrics.jsonl"
        if measured is None:
            state = f" ({self.snapshot.state.value})" if self.snapshot is not None else ""
            raise PreflightError(
                f"attempt {self.attempt}{state} has told no pace yet, and neither has one before it",
                where,
                f"wait until it has made steps: dflash-ops status {self.typed}",
            )
        number, damaged = int(measured["attempt"]), int(measured["damaged"])
        if not measured["records"]:
            raise StateError(
                f"metrics.jsonl of attempt {number} is damaged: {counted(damaged, 'line')}, and none can be read",
                f"{self.where}/run/attempts/{number}/metrics.jsonl",
                "look at it; a new attempt writes another: dflash-ops deploy --replace --resume",
            )
        if damaged:
            self.note(f"left out of metrics.jsonl: {counted(damaged, 'line')} that cannot be read")
        if measured["spec"] is None:
            raise StateError(
                f"the job of attempt {number}, which was measured, is not there whole", self.where, "deploy again"
            )
        self.records = list(measured["records"])
        self.result.measured_at = number
        if number != self.attempt:
            self.config = choice.config_of(from_dict(JobSpec, measured["spec"], "job.json"))
            self.note(f"measured in attempt {number}: attempt {self.attempt} has told no pace yet")

    # -- what could be

    def measure(self) -> None:
        """Stage rates and the pace of what runs.

        Raises:
            PreflightError: too little was measured.
        """
        try:
            self.rates = balance.measure(self.records, self.config)
            self.result.before = pace_of(self.records[-RECENT:])
        except UsageError as error:
            raise PreflightError(
                f"too little was measured in attempt {self.result.measured_at}: {error.what}",
                f"{self.where}/run/attempts/{self.result.measured_at}/metrics.jsonl",
                error.next,
            ) from None
        self.result.exact = self.rates.exact
        self.result.restart_s = self.restart_s()

    def model(self, memory: Memory) -> None:
        """The table of all splits.

        Raises:
            UsageError: the devices are too few, or one is named twice.
        """
        assert self.rates is not None
        count = len(choice.pool(self.devices, self.asked.devices))
        self.result.table = plan(self.rates, count, self.now, memory)
        self.result.notes += self.result.table.notes
        asked = self.asked.split
        if asked is not None and self.row_of(asked) is None:
            self.result.extra = self.row(asked, memory)
        self.result.why = self._why()

    def row(self, split: Split, memory: Memory) -> Row:
        """One split that the table does not have: fewer devices than there are."""
        assert self.rates is not None
        refused = feasible(split, memory)
        found = None if refused else predict(self.rates, split)
        return Row(split, found, refused, judge_memory(split, memory))

    def row_of(self, split: Split) -> Row | None:
        return next((row for row in self.result.rows if row.split == split), None)

    def _why(self) -> str:
        """One sentence: which side limits what runs, and why."""
        row = self.row_of(self.now)
        return row.prediction.why if row is not None and row.prediction is not None else ""

    def judge_worth(self) -> None:
        """Whether going to the best split pays within the horizon: `result.worth`."""
        table, cost = self.result.table, self.result.restart_s
        assert table is not None
        self.result.worth = worth(table, self.now, cost if cost is not None else RESTART_S, self.asked.horizon_s)

    def restart_s(self) -> float:
        """Seconds without training that a restart costs: what earlier ones took, from the stop to the first record."""
        loads = [s["load_s"] for s in self.said["starts"] if s["load_s"] is not None]
        stops = [s["stop_s"] for s in self.said["starts"] if s["stop_s"] is not None]
        if not loads:
            self.note(f"what a restart costs is not known here: {duration(RESTART_S)} are assumed")
            return RESTART_S
        return float(statistics.median(loads) + (statistics.median(stops) if stops else 0.0))

    def memory(self) -> Memory:
        """What each kind of worker takes, as the trainer's own check says, and what the devices have."""
        with self.stages.stage("memory", "asking the trainer what a worker takes") as stage:
            name = choice.config_name(self.spec)
            # "fresh": what is asked needs no checkpoint, and hashing one would take minutes
            request = {**to_dict(self.request(self.spec, self.devices)), "begin": "fresh", "needs_only": name}
            found = self.memory_of(self.ask("preflight", request, deadline=CHECK_S)["needs"])
            known = found.target is not None and found.drafter is not None
            stage.done("known" if known else "not known: preflight judges it before a start")
        return found

    def memory_of(self, needs: Mapping[str, Any]) -> Memory:
        """From what the trainer's check says, of whatever split it was asked."""
        pool = choice.pool(self.devices, self.asked.devices)
        wanted = {int(d.partition(":")[2]) for d in pool if d.startswith("cuda:")}
        totals = {int(g["index"]): int(g["total"]) for g in self.said["gpus"]}
        sizes = [totals[n] for n in wanted if n in totals]
        whole = len(sizes) == len(wanted) == len(pool)
        target, room = self._there()
        if room is not None and self.said["launcher"] is not None:
            # What runs gives its own back before the other one takes it.
            room += sum(value for key in ("ring_bytes", "average_bytes") if isinstance(value := needs.get(key), int))
        return memory_from_check(
            needs,
            self.config,
            target,
            device=min(sizes) if whole and sizes else None,
            host=room,
            devices=len(pool),
        )

    def _there(self) -> tuple[Mapping[str, Any] | None, int | None]:
        """The target's config.json, and free bytes where ring and averages lie; None: not known."""
        path = str((self.config.get("target") or {}).get("path") or "")
        folder = str((self.config.get("ring") or {}).get("dir") or RING_DIR)
        file = f"{posixpath.join(self.job.root, path)}/config.json"
        done = self.host.run(["sh", "-c", THERE, "sh", folder, file], deadline=ASK_S)
        first, _, rest = done.text.partition("\n")
        try:
            found = json.loads(rest) if rest.strip() else None
        except (ValueError, RecursionError):
            found = None  # a hub id, or a damaged file: then what a target needs to work in is unknown
        return found if isinstance(found, dict) else None, int(first) if first.isdigit() else None

    def request(self, spec: JobSpec, devices: Devices) -> Request:
        """What preflight and gate are asked of a split."""
        return Request(
            spec=spec,
            interpreter=spec.argv[0],
            bundled=True,
            config_toml=spec.files.get("run.toml", "") or spec.files.get("run.json", ""),
            config_json=spec.files.get("run.json", ""),
            devices=devices.all,
            targets=len(devices.target),
            requires=dict(job_specs.REQUIRES),
            begin="resume",
            pid=self.said["launcher"],
            touch=not self.asked.plan,
        )

    def must_run(self) -> None:
        """Only a job that makes steps is rebalanced: there is something to compare with, and something to save.

        Raises:
            PreflightError: it does not. JobBusy: somebody else acts on it.
        """
        for _ in range(LOOKS):
            if self.said["lease"] is None:
                break
            time.sleep(AGAIN_S)  # a pass of the supervisor that only looks is over soon
            self.said = self.pace()
        switch, lease = self.said["switch"], self.said["lease"]
        if switch is not None and switch["alive"]:
            raise JobBusy(
                f"another change of the split is at work: {switch.get('phase')}",
                f"{self.where}/run/switch.json",
                f"wait until it is done: dflash-ops status {self.typed}",
            )
        if lease is not None:
            raise JobBusy(
                f"{lease['owner']} (pid {lease['pid']}) acts on this job",
                f"{self.where}/run/lease",
                f"wait until it is done (dflash-ops status {self.typed}), then try again",
            )
        state = self.snapshot.state if self.snapshot is not None else State.UNKNOWN
        if state in (State.STEPPING, State.SLOW) and self.result.measured_at == self.attempt:
            return
        if state in LIVE_STATES:
            raise PreflightError(
                f"attempt {self.attempt} is {state.value}: it has to make steps before anything can be compared",
                self.where,
                f"wait: dflash-ops status {self.typed} --watch"
                if state is not State.HUNG
                else f"dflash-ops triage --job {self.typed}",
            )
        cut = ""
        if (
            switch is not None
            and switch.get("phase") in ("stopping", "starting")
            and switch.get("attempt") == self.attempt
        ):
            cut = "; a change of its split was cut off after the stop"
        raise PreflightError(
            f"job {self.job.name} does not run (attempt {self.attempt} is {state.value}){cut}: nothing to stop, and "
            "nothing to compare with",
            self.where,
            self._deploy(" --resume" + self._gpus()),
        )

    def _gpus(self) -> str:
        """Options of deploy for the split that was asked for, where it can be meant."""
        if self.asked.split is None:
            return ""
        try:
            devices = choice.choose(
                choice.pool(self.devices, self.asked.devices), self.asked.split, features=self.features
            )
        except DflashError:
            return ""
        return f" --target-gpus {','.join(devices.target)} --drafter-gpus {','.join(devices.drafter)}"

    def _deploy(self, options: str) -> str:
        return f"dflash-ops deploy {self.typed}{options}"
