"""One fault brought about in a real, supervised trainer; what was seen, and how that differs from what was expected."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resident_lab import Lab, lab, wait_for  # type: ignore[import-not-found]

from dflash_ops.contracts import Budgets, Event, Policy, dumps
from dflash_ops.errors import ContractError, DflashError

FAULTY = Path(__file__).parent / "faulty.py"
#: Short pauses: what is tested is what is done, and in which order.
BUDGETS = Budgets(backoff_s=0.2, backoff_cap_s=1.0)
#: Seconds for one part of a fault: only a failing one takes that long, or a machine with ten times its work.
PATIENCE = 240.0


class Scene:
    """A fault's stage: a root with its own resident, tmux server and trainer.

    Args:
        one: the lab of tests/resident. opened: what is to be undone afterwards (mounts, sockets, groups).
    """

    def __init__(self, one: Lab, opened: ExitStack) -> None:
        self.one = one
        self.opened = opened
        self.notes: dict[str, Any] = {}

    @property
    def saves(self) -> Path:
        return Path(self.one.root) / "checkpoints"

    def start(self, policy: Policy, *, shell: str = "", **changes: Any) -> None:
        """Start the trainer. `shell`: what a shell does first, in whose limits the resident then lives."""
        argv = (sys.executable, "-u", str(FAULTY))
        env = {"CONTROL": str(self.one.control), "SAVE": str(self.saves), **changes.pop("env", {})}
        job = self.one.job(**{"argv": argv, "env": env, "policy": policy, "grace_s": 2.0, **changes})
        command = self.one.argv("start")
        if shell:
            command = ["sh", "-c", f'{shell}; exec "$@"', "sh", *command]
        said = subprocess.run(
            command,
            input=dumps(job).encode(),
            capture_output=True,
            timeout=60,
            check=False,
            start_new_session=bool(shell),
        )
        assert said.returncode == 0, (said.stdout, said.stderr)

    def events(self, name: str) -> list[Event]:
        return list(self.one.events(name))

    def came(self, event: str, count: int = 1) -> list[Event]:
        why = f"{count} x {event}"
        return list(wait_for(lambda: f if len(f := self.events(event)) >= count else None, why, PATIENCE))

    def steps(self, beyond: int = 0) -> None:
        """Until the newest attempt is past this step."""
        self.one.until(lambda s: s.progress and (s.progress.step or 0) > beyond, f"steps beyond {beyond}", PATIENCE)

    def attempts(self) -> int:
        return len(self.events("attempt_started"))

    def nothing_was_done(self) -> None:
        """Also not by a pass that is asked for now."""
        decision = self.one.ok("repair")["decision"]
        assert decision["verdict"] == "none", decision
        assert not self.events("action_intended"), story(self)
        assert self.attempts() == self.notes.get("attempts", 1), self.attempts()


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        name, cause: what it is called, and how it is caused.
        files: asks to the trainer (CONTROL): name, or name and text.
        state: what the supervisor saw first of it; for a fault that must change nothing, what it goes on seeing.
        kinds, actions: the diagnoses and the actions of the journal, in their order.
        outcome: `verified` (a later step proved it), `held` (a person was told), `none` (nothing was done).
        allow, ladders, quiet: of the job's policy. changes: of the job.
        before, during, after: what is done from outside: before the start, while it runs, once it has come out.
        short: one of those in `make test`. needs: why it cannot be shown here, or "".
        wired: instead of `before` to `after`: all that is done, to a job in a container of the lab (chaos.wired).
    """

    name: str
    cause: str
    kinds: tuple[str, ...]
    actions: tuple[str, ...]
    outcome: str = "verified"
    state: str = "crashed"
    files: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    ladders: dict[str, tuple[str, ...]] = field(default_factory=dict)
    changes: Callable[[Scene], dict[str, Any]] | None = None
    before: Callable[[Scene], None] | None = None
    during: Callable[[Scene], None] | None = None
    after: Callable[[Scene], None] | None = None
    short: bool = False
    needs: Callable[[], str] = lambda: ""
    wired: Callable[[Any], None] | None = None


@dataclass(frozen=True)
class Seen:
    """What came of a fault. `wrong`: how it differs from what was expected, "" where it does not."""

    state: str
    kinds: tuple[str, ...]
    actions: tuple[str, ...]
    outcome: str
    seconds: float
    wrong: str = ""
    skipped: str = ""


def run(fault: Fault, pyz: Path) -> Seen:
    """Bring it about, wait for its end, compare."""
    if why := fault.needs():
        return Seen("", (), (), "skipped", 0.0, skipped=why)
    began = time.monotonic()
    seen, wrong = _wired(fault) if fault.wired is not None else _local(fault, pyz)
    for what, is_, expected in (
        ("state", seen.state, fault.state),
        ("diagnoses", seen.kinds, fault.kinds),
        ("actions", seen.actions, fault.actions),
        ("outcome", seen.outcome, fault.outcome),
    ):
        if is_ != expected and not wrong:
            wrong = f"{what}: expected {expected}, seen {is_}"
    return Seen(seen.state, seen.kinds, seen.actions, seen.outcome, time.monotonic() - began, wrong)


_FAILURES = (AssertionError, ContractError, DflashError, OSError, subprocess.SubprocessError)


def _local(fault: Fault, pyz: Path) -> tuple[Seen, str]:
    wrong = ""
    with _stage(pyz) as scene:
        try:
            _play(fault, scene)
        except _FAILURES as error:
            held = [(e.data.get("text"), e.data.get("reason")) for e in scene.events("held")]
            wrong = f"{type(error).__name__}: {error}; {story(scene)}; held: {held}"
        return story(scene), wrong


def _wired(fault: Fault) -> tuple[Seen, str]:
    from chaos.wired import play

    try:
        return play(fault), ""
    except (*_FAILURES, RuntimeError) as error:  # RuntimeError: the lab's own
        return Seen("", (), (), "open", 0.0), f"{type(error).__name__}: {error}"


@contextmanager
def _stage(pyz: Path) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="dflash-chaos-") as folder, ExitStack() as opened, ExitStack() as last:
        # Mounts and the like go once nobody lives there any more: `opened` is left after the lab.
        yield Scene(last.enter_context(lab(pyz, Path(folder))), opened)


def _play(fault: Fault, scene: Scene) -> None:
    for name in fault.files:
        file, _, text = name.partition(":")
        (scene.one.control / file).write_text(text)
    if fault.before is not None:
        fault.before(scene)
    policy = Policy("act", allow=fault.allow, budgets=BUDGETS, ladders=fault.ladders)
    scene.start(policy, **(fault.changes(scene) if fault.changes is not None else {}))
    if fault.during is not None:
        fault.during(scene)
    if fault.outcome == "verified":
        # Each action gets its word; the last one's is that it helped.
        wait_for(lambda: outcome_of(scene) == "verified" and _starts(scene) >= len(_repairs(fault)), "proof", PATIENCE)
    elif fault.outcome == "held":
        scene.came("held")
        count = scene.attempts()
        scene.came("told")
        # One more pass: the loop may hold the lease for a moment still.
        wait_for(lambda: scene.one.run("repair").rc == 0, "a pass after that", PATIENCE)
        assert scene.attempts() == count, "it was started again after it had said that a person has to look"
    else:
        scene.nothing_was_done()
    if fault.after is not None:
        fault.after(scene)


def _repairs(fault: Fault) -> list[str]:
    return [a for a in fault.actions if a != "dump_stacks"]


def _starts(scene: Scene) -> int:
    return len([e for e in scene.events("action_done") if e.data["attempt"] is not None])


def outcome_of(scene: Any) -> str:
    """The last word of the journal on how it came out."""
    said = [e for e in scene.one.events() if e.event in ("action_intended", "action_outcome", "held")]
    said = [e for e in said if e.event != "action_intended" or e.data["decision"]["action"] != "dump_stacks"]
    if not said:
        return "none"
    last = said[-1]
    return "held" if last.event == "held" else str(last.data["outcome"]) if last.event == "action_outcome" else "open"


def story(scene: Any) -> Seen:
    """What stands in the journal by now."""
    intended = [e.seq for e in scene.events("action_intended")][:1] or [float("inf")]
    states = [str(e.data["state"]) for e in scene.events("state") if e.seq < intended[0]]
    ended = [s for s in states if s in ("crashed", "hung", "stopped", "finished")]
    last = states[-1] if states else ""
    return Seen(
        ended[0] if ended else last,
        tuple(str(e.data["kind"]) for e in scene.events("diagnosed")),
        tuple(str(e.data["decision"]["action"]) for e in scene.events("action_intended")),
        outcome_of(scene),
        0.0,
    )
