"""The supervisor beside a real trainer: it sees the end, acts by the rules, and proves that it helped."""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from resident_lab import Lab, wait_for  # type: ignore[import-not-found]

from dflash_ops.contracts import Budgets, Event, Limits, Policy, Snapshot
from dflash_ops.errors import JobBusy
from dflash_ops.resident import again, attempts, daemon, journal, lease, proc
from dflash_ops.resident.effects import ResidentEffects

SAVING = Path(__file__).parent / "saving.py"
ACT = Policy(mode="act", budgets=Budgets(backoff_s=0.2, backoff_cap_s=1.0))


def begin(one: Lab, policy: Policy = ACT, **changes: Any) -> None:
    env = {"CONTROL": str(one.control), "SAVE": str(one.root / "checkpoints"), **changes.pop("env", {})}
    one.start(argv=(sys.executable, "-u", str(SAVING)), env=env, policy=policy, **changes)


def past(step: int, attempt: int) -> Callable[[Snapshot], bool]:
    return lambda s: bool(s.attempt == attempt and s.progress and s.progress.step and s.progress.step > step)


def story(one: Lab) -> list[tuple[str, Any]]:
    """What the supervisor wrote down, in short."""
    words = {
        "diagnosed": lambda e: e.data["kind"],
        "action_intended": lambda e: e.data["decision"]["action"],
        "action_done": lambda e: e.data["attempt"],
        "action_failed": lambda e: e.data["error"],
        "action_outcome": lambda e: e.data["outcome"],
        "held": lambda e: e.data["kind"],
    }
    return [(e.event, words[e.event](e)) for e in one.events() if e.event in words]


def came(one: Lab, event: str, count: int = 1) -> list[Event]:
    return list(wait_for(lambda: found if len(found := one.events(event)) >= count else None, f"{count} x {event}"))


def a_pass(one: Lab) -> dict[str, Any]:
    """What a pass of ours decides, once no pass of the loop holds the lease."""
    answer = wait_for(lambda: said if (said := one.run("repair")).rc == 0 else None, "a pass")
    return dict(answer.json["decision"])


def test_a_killed_trainer_is_started_again_and_that_is_proven(one: Lab) -> None:
    (one.control / "at25-kill").touch()
    begin(one)
    one.until(past(25, 2), "steps beyond the one at which it was killed")
    came(one, "progress")
    assert story(one)[-3:] == [("action_intended", "restart"), ("action_done", 2), ("action_outcome", "verified")]
    (intended,) = one.events("action_intended")
    decision = intended.data["decision"]
    assert decision["reason"]
    assert decision["evidence"]
    assert "start attempt 2: " in decision["command"]
    started = one.events("attempt_started")[-1]
    assert (started.actor, started.data["decision"]) == ("supervisor", decision["id"])


def test_observing_says_what_it_would_do_and_does_nothing(one: Lab) -> None:
    (one.control / "at5-kill").touch()
    begin(one, Policy())
    came(one, "diagnosed")
    said = came(one, "proposed")[0].data
    assert said["action"] == "restart"
    assert "start attempt 2: " in said["text"]
    wait_for(lambda: (one.layout.run / "repair.json").exists(), "the pass")
    assert a_pass(one)["verdict"] == "propose"
    assert story(one) == [("diagnosed", "host_oom_sigkill")]
    assert len(one.events("attempt_started")) == 1


def test_a_crash_loop_ends_after_two_restarts_and_is_told(one: Lab) -> None:
    (one.control / "always-kill").write_text("12")
    begin(one, replace(ACT, ladders={"host_oom_sigkill": ("restart",)}))
    (held,) = came(one, "held")
    assert story(one).count(("action_intended", "restart")) == 2
    assert [e.attempt for e in one.events("attempt_started")] == [1, 2, 3]
    assert held.data["text"]
    assert any(e.data["fingerprint"] == held.data["fingerprint"] for e in came(one, "told"))
    assert a_pass(one)["verdict"] == "hold"
    assert len(one.events("attempt_started")) == 3


def test_a_hang_is_looked_at_before_it_is_ended(one: Lab) -> None:
    (one.control / "at15-hang").touch()
    begin(one, limits=Limits(step_s=3.0), grace_s=1.0)
    one.until(past(15, 2), "steps beyond the hang", 60)
    came(one, "progress")
    (stacks,) = (one.layout.attempt(1).path / "evidence").glob("stacks-*.txt")
    assert "in waits_for_ever" in stacks.read_text()
    actions = [v for k, v in story(one) if k == "action_intended"]
    assert actions[0] == "dump_stacks"
    assert len(actions) == 2
    assert one.events("stop_requested")[0].actor == "supervisor"


def test_a_cut_checkpoint_is_set_aside_and_the_one_before_is_taken(one: Lab) -> None:
    (one.control / "at35-kill").touch()
    begin(one, Policy())
    came(one, "diagnosed")
    folder = one.root / "checkpoints"
    newest = max(folder.iterdir())
    (newest / "w").write_bytes(b"cut")
    begin(one)
    one.until(past(35, 3), "steps beyond the damaged checkpoint", 60)
    came(one, "progress")
    assert ("action_intended", "resume_earlier") in story(one)
    (aside,) = one.ok("checkpoints", "list")["aside"]
    assert Path(aside["path"], newest.name, "w").read_bytes() == b"cut"
    assert b"event=resumed step=20" in one.run("logs", "--attempt", "3", "--lines", "-1").out


def test_a_persons_stop_is_the_end_also_while_it_waits(one: Lab) -> None:
    (one.control / "always-kill").write_text("5")
    slow = Budgets(backoff_s=60.0, backoff_cap_s=60.0)
    begin(one, replace(ACT, budgets=slow, ladders={"host_oom_sigkill": ("restart",)}))
    wait_for(lambda: len(one.events("action_done")) == 1, "the first restart")
    one.until(lambda s: s.attempt == 2 and s.state.value == "crashed", "it crashes again")
    wait_for(lambda: json.loads((one.layout.run / "repair.json").read_text())["not_before"], "the pause")
    said = one.ok("stop", "--reason", "enough")
    assert said["already"]
    (one.layout.run / "repair.json").unlink()  # as if its time had come
    passed = a_pass(one)
    assert (passed["verdict"], passed["reason"]) == (
        "none", "a person stopped this job: only a person starts it again"
    )  # fmt: skip
    assert len(one.events("attempt_started")) == 2


def test_ctrl_c_and_a_stop_are_never_a_crash(one: Lab) -> None:
    begin(one)
    one.stepping()
    proc.send(one.wrapper(), signal.SIGINT)
    one.until(lambda s: s.state.value == "stopped", "the end")
    assert a_pass(one)["verdict"] == "none"
    begin(one)
    one.until(past(1, 2), "steps")
    one.ok("stop")
    assert a_pass(one)["verdict"] == "none"
    assert len(one.events("attempt_started")) == 2


def test_a_stop_while_what_is_left_ends_keeps_the_start_from_outside_away(
    one: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.start()
    one.stepping()
    proc.send(one.launcher(), signal.SIGKILL)
    one.until(lambda s: s.state.value == "crashed", "the crash")
    end = ResidentEffects.end

    def slow(self: ResidentEffects, attempt: int, seconds: float) -> None:
        end(self, attempt, seconds)
        journal.append(
            one.layout.journal, "stop_requested", actor="operator", attempt=attempt, data={"reason": "enough"}
        )

    monkeypatch.setattr(ResidentEffects, "end", slow)
    wait_for(lambda: lease.holder(one.layout) is None, "the loop's pass")
    with pytest.raises(JobBusy, match="a person stopped this job"):
        again.again(one.root, {"attempt": 1, "decision": "d", "reason": "r"}, {})
    assert len(one.events("attempt_started")) == 1


def test_secrets_come_through_a_restart_and_are_written_nowhere(one: Lab) -> None:
    (one.control / "at5-kill").touch()
    secret = "hunter2-" + secrets.token_hex(8)
    begin(one, env={"TOKEN": secret}, secret_env=("TOKEN",))
    one.until(past(5, 2), "steps")
    assert f"TOKEN={secret}".encode() in Path(f"/proc/{one.launcher(2).pid}/environ").read_bytes()
    for path in one.root.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path


@pytest.mark.timeout(300)  # a pass that was killed is begun again after a growing pause
def test_killed_at_any_moment_it_starts_once_and_goes_on(one: Lab) -> None:
    """The loop and its passes are killed again and again; the trainer crashes meanwhile."""
    for at in (10, 60, 110):
        (one.control / f"at{at}-kill").touch()
    begin(one)
    rng, kills, end = random.Random(7), 25, time.monotonic() + 250
    while not ((now := one.snapshot()).progress and (now.progress.step or 0) > 110 and now.state.value == "stepping"):
        assert time.monotonic() < end, story(one)
        time.sleep(rng.uniform(0.1, 2.5))
        if kills <= 0:  # one round may end several at once
            continue
        for process in proc.every():
            line = Path(f"/proc/{process.pid}/cmdline")
            with contextlib.suppress(OSError):
                if str(one.root) in (words := line.read_text()) and ("\0loop\0" in words or "\0repair\0" in words):
                    kills -= proc.send(process.process, signal.SIGKILL)
    # A start that was killed half-way is an attempt that never ran; none ran beside another.
    found = [attempts.read(one.layout, n) for n in attempts.numbers(one.layout)]
    ran = [a for a in found if a.start is not None]
    assert len(ran) == 4
    assert len(found) <= 7
    assert [a.number for a in ran if a.launcher_alive] == [ran[-1].number]
    ends = [a.exit.t for a in ran[:-1] if a.exit is not None and a.start is not None]
    begins = [a.start.t for a in ran[1:] if a.start is not None]
    assert all(end <= begin for end, begin in zip(ends, begins, strict=True))


def test_two_supervisors_never_both_act(one: Lab) -> None:
    begin(one, Policy())
    one.stepping()
    held = lease.take(one.layout, "another")
    assert held is not None
    refused = one.run("repair")
    assert (refused.rc, refused.error["type"]) == (4, "JobBusy")
    held.release()
    assert a_pass(one)["verdict"] == "none"


def test_a_killed_loop_comes_back_by_itself(one: Lab) -> None:
    begin(one, Policy())
    one.stepping()
    before = set()
    for _ in range(3):
        record = wait_for(
            lambda: r if (r := daemon.running(one.layout)) and r.process not in before else None, "a loop"
        )
        before.add(record.process)
        proc.send(record.process, signal.SIGKILL)  # and nobody asks for the job meanwhile
    wait_for(lambda: (r := daemon.running(one.layout)) and r.process not in before, "another loop")
    one.ok("stop")


def test_the_loop_dies_while_its_pass_acts_and_the_next_one_sees_that_it_helped(one: Lab) -> None:
    begin(one)
    one.until(past(5, 1), "steps")
    before = wait_for(lambda: daemon.running(one.layout), "a loop").process
    proc.send(one.launcher(), signal.SIGKILL)

    def acting() -> Any:
        lines = [(p.process, Path(f"/proc/{p.pid}/cmdline")) for p in proc.every()]
        with contextlib.suppress(OSError):
            return next((p for p, f in lines if str(one.root) in (w := f.read_text()) and "\0repair\0" in w), None)

    found = wait_for(acting, "the pass")
    wait_for(lambda: one.events("action_intended"), "its word")
    proc.send(found, signal.SIGSTOP)
    proc.send(before, signal.SIGKILL)
    wait_for(lambda: (r := daemon.running(one.layout)) and r.process != before, "another loop")
    time.sleep(1.5)  # it has read what was written so far, and finds the lease taken
    proc.send(found, signal.SIGCONT)
    wait_for(lambda: ("action_outcome", "verified") in story(one), "the proof, by the loop that came later")
    assert len(one.events("attempt_started")) == 2
