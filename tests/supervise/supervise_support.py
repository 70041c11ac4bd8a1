"""Random but possible worlds for the supervisor: evidence of every kind, journals as a resident writes them.

The safety predicate here is written from the laws (and docs/supervise.md), on raw journal events and raw playbook
tables; it uses nothing of decide, fold or their parts.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_ops.contracts import (
    Budgets,
    Decision,
    Diagnosis,
    Event,
    EvidenceLine,
    Finding,
    Ledger,
    Policy,
    Remedy,
    RemedyTable,
    State,
    Verdict,
    Way,
    to_dict,
)
from dflash_ops.playbooks import load_documents
from dflash_ops.supervise.ledger import fold
from dflash_ops.supervise.situation import CheckpointSeen, Situation
from dflash_ops.triage.playbook import compile_playbooks

DOCUMENTS = load_documents([])
PLAYBOOKS = compile_playbooks(DOCUMENTS)
#: Raw tables: kind -> [(action, grade), ...].
RAW: dict[str, list[tuple[str, str]]] = {
    table["id"]: [(r["action"], r["grade"]) for r in table.get("remedy", ())]
    for document in DOCUMENTS
    for table in document["kind"]
}
KINDS = sorted(RAW)
BUSY_KINDS = sorted(k for k, steps in RAW.items() if any(g in "AB" for _, g in steps))
T0 = 1_764_441_000.0

TABLE = RemedyTable(
    ways={
        "loss_reentrant": Way(set={"loss.mode": "checkpoint", "loss.reentrant": True}),
        "loss_nonreentrant": Way(set={"loss.mode": "checkpoint", "loss.reentrant": False}),
        "loss_fused": Way(set={"loss.mode": "fused"}),
        "workers_processes": Way(args=("--processes",)),
        "compile_lock": Way(env={"ONE_LOCK": "1"}),
        "smaller_anchors": Way(scale={"loss.chunk": 0.5}),
        "exclude_device": Way(
            set={"workers.target_devices": "{target_devices}", "workers.drafter_devices": "{drafter_devices}"}
        ),
    },
    values={
        "loss.mode": "checkpoint",
        "loss.reentrant": False,
        "loss.chunk": 2048,
        "workers.target_devices": ["cuda:0", "cuda:1"],
        "workers.drafter_devices": ["cuda:2"],
    },
)


def crashed(kind: str, now: float = T0, *, attempt: int = 1, step: int | None = None, **more: Any) -> Situation:
    """An attempt that crashed of this kind; the fingerprint is the kind's, or `fingerprint`."""
    fingerprint = more.pop("fingerprint", f"{sum(map(ord, kind)):016x}")
    found = PLAYBOOKS.kinds.get(kind)
    diagnosis = Diagnosis(
        kind,
        title=found.title if found else kind,
        fingerprint=fingerprint,
        evidence=(EvidenceLine(f"the line of {kind}", 7, "log"),),
        remedies=found.remedies if found else (),
    )
    plain = Situation(
        t=now, lease=True, job="main", attempt=attempt, state=State.CRASHED, since=now, step=step, rc=1,
        diagnosis=diagnosis, table=TABLE, argv=("python3", "train.py"), nofile=(1024, 4096),
    )  # fmt: skip
    return replace(plain, **more)


class Book:
    """A journal in memory, folded as it is written."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ledger = Ledger()

    def add(self, event: str, at: float, number: int | None = None, by: str = "supervisor", **data: Any) -> Event:
        done = Event(len(self.events) + 1, at, event, by, number, data)
        self.events.append(done)
        self.ledger = fold(self.ledger, done)
        return done

    def intend(self, decision: Decision, t: float) -> None:
        if not decision.resumes:
            self.add("action_intended", t, decision.attempt, decision=to_dict(decision))


# -- random worlds


def policies(rng: random.Random) -> Policy:
    allow = [
        f"{kind}:{action}" for kind in BUSY_KINDS for action, grade in RAW[kind] if grade == "B" and rng.random() < 0.4
    ]
    if rng.random() < 0.3:
        allow += ["unrecognised_error:restart", "cuda_oom:loss_reentrant", "device_side_assert:restart"]
    ladders: dict[str, tuple[str, ...]] = {}
    if rng.random() < 0.3:
        kind = rng.choice(KINDS)
        ladders[kind] = tuple(rng.choices(ACTIONS, k=rng.randrange(4)))
        allow += [f"{kind}:{a}" for a in ladders[kind] if rng.random() < 0.5]
    return Policy(
        rng.choice(["act", "act", "act", "observe"]),
        tuple(allow),
        Budgets(rng.choice([5, 5, 3, 1, 0]), rng.choice([5.0, 20.0]), rng.choice([600.0, 60.0])),
        tuple(rng.sample(KINDS, 3)) if rng.random() < 0.2 else (),
        ladders,
    )


ACTIONS = sorted({a for steps in RAW.values() for a, _ in steps} | {"workers_processes", "rollback_release"})
_STATES = list(State)


def diagnoses(rng: random.Random) -> Diagnosis | None:
    if rng.random() < 0.04:
        return None
    kind = rng.choice(BUSY_KINDS) if rng.random() < 0.7 else rng.choice([*KINDS, "unrecognised_error", "healthy"])
    found = PLAYBOOKS.kinds.get(kind)
    remedies = list(found.remedies) if found else []
    if rng.random() < 0.15:
        # A diagnosis that promotes, reorders or invents steps must not be believed.
        rng.shuffle(remedies)
        remedies = [replace(r, grade="A", limit=9) for r in remedies]
        remedies.insert(0, Remedy(rng.choice([*ACTIONS, "gpu_reset", "rm"]), "A", "go on", "rm -rf /", limit=50))
    fingerprint = rng.choice(["", "aa", "bb", "cc", f"{rng.randrange(5):016x}"])
    return Diagnosis(kind, fingerprint=fingerprint, remedies=tuple(remedies), evidence=(EvidenceLine("a line"),))


def situations(rng: random.Random, now: float, attempt: int | None, step: int | None) -> Situation:
    """Anything that could be seen, mostly of a crash that may be acted on, with every fault now and then."""
    fault = rng.random
    state = State.CRASHED if fault() < 0.7 else State.HUNG if fault() < 0.4 else rng.choice(_STATES)
    finding = (Finding("nan_loss", "loss is nan", now),) if fault() < 0.05 else ()
    seen = tuple(
        CheckpointSeen(s, f"checkpoints/step-{s}", rng.choice([True, True, False, None]))
        for s in sorted(rng.sample(range(200), rng.randrange(4)), reverse=True)
    )
    return Situation(
        t=now - rng.choice([0, 1, 5, 9]) if fault() > 0.05 else now + rng.choice([-11.0, -500.0, 3.0, 60.0]),
        lease=fault() > 0.05,
        lease_expires=rng.choice([None, now + 30]) if fault() > 0.03 else now - 1,
        missing=() if fault() > 0.05 else ("nvidia-smi",),
        side="inside" if fault() > 0.1 else "outside",
        job="main",
        attempt=attempt,
        state=state,
        since=now - rng.choice([0, 3, 30, 700, 4000]) if fault() > 0.02 else now + 50,
        step=step,
        resumed_step=rng.choice([None, 0, 50]),
        rc=rng.choice([None, 1, 2, 4]),
        signal=rng.choice([None, "SIGKILL"]),
        cut=fault() < 0.05,
        requested=rng.choice(["", "", "", "", "", "", "", "stop", "INT", "TERM"]),
        diagnosis=diagnoses(rng),
        findings=finding,
        stacks="==== target0 pid 3 state S (sleeping) by py-spy ====\n    f (a.py:3)\n" if fault() < 0.4 else None,
        stacks_failed="no py-spy" if fault() < 0.1 else "",
        left=(41,) if fault() < 0.1 else (),
        checkpoints=seen,
        table=TABLE if fault() < 0.9 else RemedyTable(),
        argv=("python3", "train.py"),
        adopted=fault() < 0.05,
        device=rng.choice(["", "cuda:1", "cuda:9"]),
        previous_release=rng.choice([None, "0a1b2c3d4e5f"]),
        nofile=rng.choice([None, (1024, 4096), (4096, 4096)]),
    )


# -- the laws, once more and independently

_ALWAYS_B = {
    "fresh_start_aside", "loss_reentrant", "loss_nonreentrant", "loss_fused", "workers_processes", "compile_lock",
    "smaller_anchors", "exclude_device", "rollback_release", "quarantine_sample", "disable_tracker", "start_container",
}  # fmt: skip
_NEVER = re.compile(r"reset|reboot|\brm\s|trust_remote_code|weights_only|chmod|chown|kill -9|pkill")
_OUTSIDE = {"start_container", "redeploy", "wait_lock"}
_NO_START = {"dump_stacks", "adopt_session", "wait_lock"}
_LIVE = {"loading", "compiling", "stepping", "slow", "hung"}


@dataclass
class Laws:
    """What was announced, as one reads it off the journal with a pencil."""

    stopped: bool = False
    intents: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    starts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    step_of: dict[str, int] = field(default_factory=dict)
    last_of: dict[str, int] = field(default_factory=dict)
    idle: list[float] = field(default_factory=list)
    furthest: int = -1
    dumped: set[int] = field(default_factory=set)
    ids: set[str] = field(default_factory=set)

    def read(self, event: Event) -> None:
        """One more event."""
        data, attempt = event.data, event.attempt
        ours = event.actor == "supervisor"
        if event.event == "stop_requested" and not ours:
            self.stopped = True
        elif event.event == "attempt_started" and not ours:
            self.stopped = False
        elif event.event == "diagnosed":
            key = data["fingerprint"]
            self.furthest = max(self.furthest, -1 if data["step"] is None else data["step"])
            at = self.furthest if data["step"] is None else data["step"]
            self.step_of[key] = max(at, self.step_of.get(key, -1))
            self.last_of[key] = max(attempt or 0, self.last_of.get(key, -1))
        elif event.event == "progress":
            for key in {k for k, _ in self.intents} | set(self.starts):
                if data["step"] > self.step_of.get(key, -1) and (attempt or 0) > self.last_of.get(key, -1):
                    self.starts.pop(key, None)
                    for pair in [p for p in self.intents if p[0] == key]:
                        del self.intents[pair]
            if data["step"] > self.furthest:
                self.idle = []
            self.furthest = max(self.furthest, data["step"])
        elif event.event == "action_intended":
            decision = data["decision"]
            self.ids.add(decision["id"])
            self.last_of[decision["fingerprint"]] = max(attempt or 0, self.last_of.get(decision["fingerprint"], -1))
            self.intents[decision["fingerprint"], decision["action"]] += 1
            if decision["action"] == "dump_stacks":
                self.dumped.add(attempt or 0)
            if decision["action"] not in _NO_START:
                self.starts[decision["fingerprint"]] += 1
                self.idle.append(event.t)

    def broken(self, d: Decision, s: Situation, policy: Policy, now: float) -> list[str]:
        """The laws that this decision breaks."""
        if d.verdict is not Verdict.ACT:
            return []
        kind, action, fp = d.kind, d.action, d.fingerprint
        again = d.id in self.ids
        layer = replace(d.layer, kind="") if d.layer is not None else None
        wrong = {
            "stale": now - s.t > 10 or s.t - now > 2,
            "partial": bool(s.missing),
            "no lease": not s.lease or (s.lease_expires is not None and s.lease_expires <= now),
            "blind or over": s.state.value in ("unknown", "unreachable", "finished", "stopped") or s.attempt is None,
            "stopped by a person": self.stopped or s.requested != "",
            "only observing": policy.mode != "act",
            "quiet": kind in policy.quiet,
            "side": (action in _OUTSIDE) != (s.side == "outside") and action != "dump_stacks",
            "adopted": s.adopted and action not in _NO_START,
            "no reason, evidence, undo or dry run": not (d.reason and d.evidence and d.undo and d.command),
            # What would be done, not the failure's name: `host_rebooted` is no order to reboot.
            "forbidden": bool(_NEVER.search(f"{d.command} {layer}".lower())),
            "healthy attempt": s.state.value in ("loading", "compiling")
            or (s.state.value in ("stepping", "slow") and not any(f.name == "nan_loss" for f in s.findings)),
        }
        if action != "dump_stacks":
            grades = [g for a, g in RAW.get(kind, ()) if a == action and g in "AB"]
            listed = min(grades, default="N")
            own = action in policy.ladders.get(fp, ()) or action in policy.ladders.get(kind, ())
            undoes = action == "undo_overlay" and bool(d.drop)
            need = "B" if action in _ALWAYS_B or listed != "A" else "A"
            wrong["not in the ladder"] = listed == "N" and not own and not undoes
            wrong["not allowed"] = need == "B" and f"{kind}:{action}" not in policy.allow and not undoes
            limit = 2 if action == "restart" else 1
            wrong["once too often"] = not again and self.intents[fp, action] >= limit
            wrong["not known to be asked for twice"] = again != d.resumes
        if action not in _NO_START:
            live = s.state.value in _LIVE
            idle = [*self.idle]
            if again and idle:
                idle.pop()
            wrong["a third start"] = not again and self.starts[fp] >= 2
            hour = [t for t in idle if t > now - 3600]
            wrong["budget"] = len(hour) >= min(5, policy.budgets.attempts_per_hour)
            least = min(policy.budgets.backoff_cap_s, policy.budgets.backoff_s * 2 ** (len(idle) - 1)) if idle else 0.0
            wrong["too soon"] = not again and bool(idle) and now < max(idle[-1], min(s.since, now)) + least - 1e-6
            wrong["killed without looking"] = (
                live and s.attempt not in self.dumped and not (s.stacks or s.stacks_failed)
            )
            wrong["started beside a living one"] = live and not d.ends_first
            wrong["no proof expected"] = d.verify is None
        return [name for name, holds in wrong.items() if holds]
