"""What an operator would see decided, failure by failure: ladders, stop rule, budget, undo, stacks, policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from supervise_support import PLAYBOOKS, T0, TABLE, Book, crashed

from dflash_ops.contracts import (
    Budgets,
    Decision,
    EvidenceLine,
    Finding,
    Outcome,
    Policy,
    Remedy,
    RemedyTable,
    State,
    Verdict,
    Way,
)
from dflash_ops.supervise.decide import decide
from dflash_ops.supervise.notice import held, notice
from dflash_ops.supervise.problem import CONDITIONS
from dflash_ops.supervise.situation import CheckpointSeen, Situation
from dflash_ops.triage.predicates import PREDICATES

ACT = Policy("act")
FX = "fx_dynamo_conflict"


class Job:
    """A job's life in a few words: `crash` gives what is decided, and does it."""

    def __init__(self, policy: Policy = ACT) -> None:
        self.book, self.policy, self.now, self.attempt = Book(), policy, T0, 1
        self.book.add("attempt_started", self.now, 1, by="operator")

    def look(self, situation: Situation) -> Decision:
        situation = replace(situation, t=self.now, since=min(situation.since, self.now), attempt=self.attempt)
        for note in notice(situation, PLAYBOOKS, self.book.ledger, self.now):
            self.book.add(note.event, self.now, note.attempt, **note.data)
        assert notice(situation, PLAYBOOKS, self.book.ledger, self.now) == (), "each thing is said once"
        return decide(situation, PLAYBOOKS, self.book.ledger, self.policy, self.now, lambda: 0.5)

    def do(self, decision: Decision) -> None:
        self.book.intend(decision, self.now)
        if decision.starts:
            self.attempt += 1
            self.book.add("attempt_started", self.now, self.attempt)
        self.book.add("action_done", self.now, decision.attempt, id=decision.id, attempt=self.attempt)

    def crash(self, kind: str, *, step: int | None = None, wait: float = 400.0, **more: Any) -> Decision:
        self.now += wait
        since = more.pop("since", self.now - wait / 2)
        decision = self.look(crashed(kind, since, step=step, **more))
        if decision.verdict is Verdict.ACT:
            self.do(decision)
        elif (note := held(decision)) is not None:
            self.book.add(note.event, self.now, note.attempt, **note.data)
        return decision

    def steps(self, step: int) -> Decision:
        self.now += 30
        return self.look(replace(crashed(FX), state=State.STEPPING, diagnosis=None, rc=None, step=step))

    @property
    def outcomes(self) -> list[tuple[str, str]]:
        return [(self.action(e.data["id"]), e.data["outcome"]) for e in self.book.events if e.event == "action_outcome"]

    def action(self, id: str) -> str:
        decisions = [e.data["decision"] for e in self.book.events if e.event == "action_intended"]
        return next(d["action"] for d in decisions if d["id"] == id)


def test_a_decision_says_all_that_an_operator_asks_for() -> None:
    decision = Job().crash("host_oom_sigkill", step=120, rc=None, signal="SIGKILL")
    assert (decision.verdict, decision.action, decision.grade) == (Verdict.ACT, "restart", "A")
    assert EvidenceLine("the line of host_oom_sigkill", 7, "log") in decision.evidence
    assert any("SIGKILL" in e.text for e in decision.evidence)
    assert decision.reason.startswith("host_oom_sigkill struck at step 120; restart is the first step")
    assert decision.command == "start attempt 2: python3 train.py"
    assert decision.verify is not None
    assert (decision.verify.past_step, decision.verify.text) == (120, "a step beyond 120")
    assert "nothing to take back" in decision.undo


def test_two_restarts_of_a_fingerprint_and_no_third_also_before_step_one() -> None:
    job = Job(Policy("act", ladders={"segfault": ("restart",)}))
    assert job.crash("segfault").action == "restart"
    assert job.crash("segfault").action == "restart"
    third = job.crash("segfault")
    assert (third.verdict, third.notify) == (Verdict.HOLD, True)
    assert "before the first step" in third.reason
    assert "did not help" in third.reason
    again = job.crash("segfault")
    assert (again.verdict, again.notify) == (Verdict.HOLD, False), "a person is told once"


def test_progress_resets_the_counts_but_only_beyond_the_step_where_it_failed() -> None:
    job = Job(Policy("act", ladders={"segfault": ("restart",)}))
    job.crash("segfault", step=120)
    job.steps(90)
    job.crash("segfault", step=100)
    job.steps(110)
    assert job.crash("segfault", step=110).verdict is Verdict.HOLD
    job = Job(Policy("act", ladders={"segfault": ("restart",)}))
    for step in (120, 150, 190, 230):
        assert job.crash("segfault", step=step).action == "restart"
        assert "beyond" not in job.steps(step + 10).reason
    assert job.outcomes == [("restart", "verified")] * 4


def test_the_ladder_of_the_fx_crash_goes_on_to_the_next_hypothesis() -> None:
    allow = (f"{FX}:loss_reentrant", f"{FX}:workers_processes")
    job = Job(Policy("act", allow, ladders={FX: ("loss_reentrant", "workers_processes")}))
    first = job.crash(FX, step=5)
    assert (first.action, first.drop) == ("loss_reentrant", ())
    assert "loss.reentrant=true" in first.command
    second = job.crash(FX, step=5)
    assert job.outcomes == [("loss_reentrant", "useless")]
    assert second.action == "workers_processes"
    assert first.layer is not None
    assert second.drop == (first.layer.id,), "what did not help is taken back"
    assert "--processes" in second.command
    assert "loss.reentrant" not in second.command
    assert job.steps(6).verdict is Verdict.NONE
    assert job.outcomes[-1] == ("workers_processes", "verified")
    assert [x.action for x in job.book.ledger.layers] == ["workers_processes"], "what helped stays"


def test_what_made_it_worse_is_undone_and_the_next_hypothesis_is_tried() -> None:
    kind = "activation_checkpoint_mismatch"
    job = Job(Policy("act", (f"{kind}:loss_reentrant", f"{kind}:loss_fused")))
    first = job.crash(kind, step=50)
    assert first.action == "loss_reentrant"
    second = job.crash("reentrant_no_grad_input", step=None)
    assert job.outcomes == [("loss_reentrant", "worse")]
    assert (second.action, second.kind, second.drop) == ("loss_fused", kind, (first.id,))
    assert "which brought reentrant_no_grad_input" in second.reason
    assert second.layer is not None
    assert [x.id for x in job.book.ledger.layers] == [second.layer.id]


def test_what_made_it_worse_is_undone_even_where_no_hypothesis_is_left() -> None:
    kind = "activation_checkpoint_mismatch"
    job = Job(Policy("act", (f"{kind}:loss_reentrant",)))
    first = job.crash(kind, step=50)
    second = job.crash("reentrant_no_grad_input")
    assert (second.verdict, second.action, second.drop) == (Verdict.ACT, "undo_overlay", (first.id,))
    assert job.book.ledger.layers == ()
    third = job.crash(kind, step=50)
    assert third.verdict is Verdict.HOLD
    assert "loss_reentrant: it was tried and did not help" in third.reason


def test_a_failure_from_outside_is_not_the_changes_fault() -> None:
    kind = "activation_checkpoint_mismatch"
    job = Job(Policy("act", (f"{kind}:loss_reentrant",)))
    first = job.crash(kind, step=50)
    other = job.crash("host_oom_sigkill", step=20, signal="SIGKILL", rc=None)
    assert job.outcomes == [("loss_reentrant", "changed")]
    assert (other.action, other.drop) == ("restart", ())
    assert "loss.reentrant=true" in other.command, "the change stays until it is known to be useless"
    assert [x.id for x in job.book.ledger.layers] == [first.id]


@pytest.mark.parametrize("kind", ["device_side_assert", "shape_mismatch", "keyboard_interrupt", "permission_denied"])
def test_grade_n_never_runs_whatever_the_policy_says(kind: str) -> None:
    decision = Job(Policy("act", (f"{kind}:tell", f"{kind}:hold"))).crash(kind, step=3)
    assert (decision.verdict, decision.action, decision.notify) == (Verdict.HOLD, "", True)


def test_grade_b_needs_its_line_and_says_which() -> None:
    decision = Job().crash("nan_loss", step=90, checkpoints=_two(True, True))
    assert decision.verdict is Verdict.HOLD
    assert 'allow = ["nan_loss:resume_earlier"]' in decision.reason
    policy = Policy("act", ("nan_loss:resume_earlier",))
    allowed = Job(policy).crash("nan_loss", step=90, checkpoints=_two(True, True))
    assert (allowed.action, allowed.params["step"]) == ("resume_earlier", 50)
    newest = Job(policy).crash("nan_loss", step=130, checkpoints=_two(True, None))
    assert newest.params["step"] == 100, "saved before it went wrong"


def test_a_living_run_goes_back_to_before_its_loss_was_lost_and_its_own_steps_prove_nothing() -> None:
    job = Job(Policy("act", ("nan_loss:resume_earlier",)))

    def living(step: int, *findings: Finding, **more: Any) -> Situation:
        plain = crashed(FX, checkpoints=_two(None, True), stacks=STACKS)
        return replace(plain, state=State.STEPPING, diagnosis=None, rc=None, step=step, findings=findings, **more)

    lost = Finding("nan_loss", "the loss is nan at step 130", T0, numbers={"last_good_step": 70.0})
    unknown = job.look(living(130, replace(lost, numbers={})))
    assert (unknown.verdict, "not known" in unknown.reason) == (Verdict.HOLD, True)
    decision = job.look(living(130, lost))
    assert (decision.action, decision.params["step"]) == ("resume_earlier", 50), "that of step 100 holds what is lost"
    job.do(decision)
    job.now += 30
    job.look(living(140, nan=True))
    assert job.outcomes == []
    job.look(living(141))
    assert job.outcomes == [("resume_earlier", "verified")]


def test_a_diagnosis_cannot_promote_or_invent_a_step() -> None:
    forged = crashed("cuda_oom")
    assert forged.diagnosis is not None
    remedies = (Remedy("smaller_anchors", "A", "go", limit=9), Remedy("gpu_reset", "A", "go"))
    decision = Job().look(replace(forged, diagnosis=replace(forged.diagnosis, remedies=remedies)))
    assert decision.action not in ("smaller_anchors", "gpu_reset")


# -- checkpoints


def _two(newest: bool | None, older: bool | None) -> tuple[CheckpointSeen, ...]:
    return (CheckpointSeen(100, "c/step-100", newest), CheckpointSeen(50, "c/step-50", older))


def test_a_damaged_checkpoint_goes_aside_for_an_older_one_that_verifies() -> None:
    decision = Job().crash("corrupted_checkpoint", checkpoints=_two(False, True))
    assert (decision.action, decision.params) == ("resume_earlier", {"checkpoint": "c/step-50", "step": 50})
    assert "move checkpoints newer than step 50 to checkpoints.aside/" in decision.command
    assert "restore" in decision.undo


def test_the_newest_that_verifies_has_newer_ones_set_aside_and_says_so() -> None:
    policy = Policy("act", (f"{FX}:resume_latest",), ladders={FX: ("resume_latest",)})
    decision = Job(policy).crash(FX, checkpoints=_two(False, True))
    assert (decision.action, decision.params["step"]) == ("resume_latest", 50)
    assert "move checkpoints newer than step 50 to checkpoints.aside/" in decision.command
    assert "restore" in decision.undo


def test_all_checkpoints_damaged_begin_anew_only_where_that_is_allowed() -> None:
    held_ = Job().crash("corrupted_checkpoint", checkpoints=_two(False, False))
    assert held_.verdict is Verdict.HOLD
    assert "no older checkpoint verifies" in held_.reason
    policy = Policy("act", ("corrupted_checkpoint:fresh_start_aside",))
    fresh = Job(policy).crash("corrupted_checkpoint", checkpoints=_two(False, False))
    assert fresh.action == "fresh_start_aside"
    assert "move all checkpoints to checkpoints.aside/" in fresh.command
    unknown = Job(policy).crash("corrupted_checkpoint", checkpoints=_two(False, None))
    assert unknown.verdict is Verdict.HOLD, "nobody looked whether the older one is whole"
    whole = Job(policy).crash("corrupted_checkpoint", checkpoints=_two(True, True))
    assert whole.verdict is Verdict.HOLD, "what is damaged is another file"


# -- hangs


def hung(job: Job, **more: Any) -> Decision:
    job.now += 400
    decision = job.look(replace(crashed(FX), state=State.HUNG, diagnosis=None, since=job.now - 9, step=7, **more))
    if decision.verdict is Verdict.ACT:
        job.do(decision)
    return decision


STACKS = "".join(
    f"==== drafter{n} pid {n} state S (sleeping) by py-spy ====\n    {f} (a.py:3)\n"
    for n, f in enumerate(("wait", "wait", "save"))
)


def test_stacks_are_dumped_before_a_hung_attempt_is_ended_and_the_odd_worker_is_named() -> None:
    job = Job()
    first = hung(job)
    assert (first.verdict, first.action, first.starts) == (Verdict.ACT, "dump_stacks", False)
    second = hung(job, stacks=STACKS)
    assert (second.action, second.ends_first) == ("restart", True)
    assert any("drafter2 stands in save" in e.text for e in second.evidence)
    assert second.command.startswith("end attempt 1: TERM to its recorded launcher")
    assert hung(job).action == "dump_stacks", "the next attempt's stacks are another thing"


def test_a_dump_that_could_not_be_had_does_not_block_for_ever() -> None:
    job = Job()
    assert hung(job).action == "dump_stacks"
    assert hung(job).action == "restart"


def test_nan_in_a_living_run_needs_permission_and_looks_first() -> None:
    nan = (Finding("nan_loss", "the loss is nan at step 9", T0, numbers={"last_good_step": 80.0}),)
    alive = replace(
        crashed(FX), state=State.STEPPING, diagnosis=None, step=90, findings=nan, checkpoints=_two(True, True)
    )
    job = Job(Policy("act", ("nan_loss:resume_earlier",)))
    assert job.look(alive).action == "dump_stacks"
    done = job.look(replace(alive, stacks=STACKS))
    assert (done.action, done.ends_first) == ("resume_earlier", True)
    assert Job().look(replace(alive, stacks=STACKS)).verdict is Verdict.HOLD


# -- when nothing may be done


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"missing": ("exit.json",)}, "partial: exit.json"),
        ({"lease": False}, "lease is not ours"),
        ({"lease_expires": T0 - 1}, "lease has run out"),
        ({"state": State.UNREACHABLE}, "unreachable"),
        ({"state": State.UNKNOWN}, "unknown"),
        ({"state": State.FINISHED}, "finished"),
        ({"state": State.STOPPED}, "stopped"),
        ({"requested": "INT"}, "a person stopped"),
        ({"attempt": None}, "nothing was ever started"),
        ({"diagnosis": None}, "not diagnosed yet"),
        ({"t": T0 - 30}, "30 s old"),
        ({"t": T0 + 30}, "from the future"),
        ({"since": T0 + 30}, "from the future"),
    ],
)
def test_nothing_is_done(change: dict[str, Any], words: str) -> None:
    fine = crashed("segfault")
    book = Book()
    assert decide(fine, PLAYBOOKS, book.ledger, ACT, T0).verdict is Verdict.ACT
    decision = decide(replace(fine, **change), PLAYBOOKS, book.ledger, ACT, T0)
    assert decision.verdict is Verdict.NONE
    assert words in decision.reason


def test_after_an_operators_stop_only_a_person_starts_it_again() -> None:
    job = Job()
    job.book.add("stop_requested", T0, 1, by="operator ada@desk")
    assert job.crash("segfault").verdict is Verdict.NONE
    job.book.add("attempt_started", job.now, 2, by="operator ada@desk")
    job.attempt = 2
    assert job.crash("segfault").verdict is Verdict.ACT


def test_ctrl_c_is_an_operators_stop_and_our_own_ending_is_not() -> None:
    job = Job()
    job.book.add("attempt_exited", T0, 1, by="resident", state="stopped", requested="INT", step=3)
    assert job.book.ledger.stopped
    job = Job()
    hung(job)
    seen = replace(crashed(FX), state=State.HUNG, diagnosis=None, stacks=STACKS)
    job.book.intend(decision := job.look(seen), job.now)
    assert decision.ends_first
    job.book.add("attempt_exited", job.now, 1, by="resident", state="stopped", requested="TERM", step=3)
    assert not job.book.ledger.stopped


def test_a_quiet_kind_is_neither_acted_on_nor_told() -> None:
    decision = Job(Policy("act", quiet=("segfault",))).crash("segfault")
    assert (decision.verdict, decision.notify) == (Verdict.NONE, False)


def test_observing_says_what_it_would_do() -> None:
    decision = Job(Policy("observe")).crash("segfault", step=4)
    assert (decision.verdict, decision.action) == (Verdict.PROPOSE, "restart")
    assert decision.command == "start attempt 2: python3 train.py"
    assert "only observes" in decision.reason


def test_what_is_proposed_and_that_a_budget_is_spent_are_told_once_each() -> None:
    job = Job(Policy("observe"))
    assert job.crash("segfault").notify
    assert not job.crash("segfault").notify
    job = Job(Policy("act", budgets=Budgets(attempts_per_hour=0)))
    assert "budget of 0" in job.crash("segfault").reason
    assert not job.crash("segfault").notify
    job.policy = Policy("act", ladders={"segfault": ()})
    assert job.crash("segfault").notify, "that nothing is left is another thing than an empty budget"


def test_an_adopted_session_cannot_be_started_again() -> None:
    decision = Job().crash("segfault", adopted=True)
    assert decision.verdict is Verdict.HOLD
    assert "adopted" in decision.reason


def test_an_error_that_no_playbook_names_is_for_a_person_unless_he_says_otherwise() -> None:
    assert Job().crash("unrecognised_error").verdict is Verdict.HOLD
    own = Policy("act", ("unrecognised_error:restart",), ladders={"unrecognised_error": ("restart",)})
    assert Job(own).crash("unrecognised_error").action == "restart"


def test_an_end_of_which_nothing_is_known_gets_one_restart_and_a_reboot_needs_permission() -> None:
    job = Job()
    first = job.crash("root_cause_not_shown", rc=None)
    assert (first.kind, first.action) == ("pane_dead_nostatus", "restart")
    assert any("nobody wrote down how" in e.text for e in first.evidence)
    assert job.crash("root_cause_not_shown", rc=None).verdict is Verdict.HOLD
    assert Job().crash("root_cause_not_shown", rc=1).verdict is Verdict.HOLD
    reboot = Job().crash("healthy", rc=None, rebooted=True)
    assert 'allow = ["host_rebooted:restart"]' in reboot.reason
    allowed = Job(Policy("act", ("host_rebooted:restart",))).crash("healthy", rc=None, rebooted=True)
    assert allowed.action == "restart"


def test_a_start_that_was_cut_short_is_no_failure_of_the_trainer_and_the_hours_budget_bounds_it() -> None:
    job = Job()
    said = [job.crash("root_cause_not_shown", rc=None, cut=True) for _ in range(6)]
    assert [d.verdict for d in said] == [Verdict.ACT] * 5 + [Verdict.HOLD]
    assert said[0].title == "the start of attempt 1 was cut short"
    assert "budget of 5" in said[5].reason


def test_the_dry_run_says_how_a_foreign_trainer_goes_on_and_that_it_begins_anew() -> None:
    table = RemedyTable({"restart": Way(args=("--resume",), env={"R": "1"})})
    assert Job().crash("segfault", table=table).command == "start attempt 2: R=1 python3 train.py --resume"
    policy = Policy("act", ("state_dict_size_mismatch:fresh_start_aside",))
    fresh = Job(policy).crash("state_dict_size_mismatch", table=table)
    assert fresh.command.endswith("start attempt 2: python3 train.py")


def test_a_ladder_of_one_fingerprint_goes_before_that_of_its_kind() -> None:
    policy = Policy("act", ladders={"segfault": ("tell",), "00000000000000ff": ("restart",)})
    assert Job(policy).crash("segfault").verdict is Verdict.HOLD
    assert Job(policy).crash("segfault", fingerprint="00000000000000ff").action == "restart"


# -- budget and pause


def test_the_pause_doubles_and_has_a_cap() -> None:
    job = Job()
    kinds = ["segfault", "host_oom_sigkill", "nccl_remote_error", "cudnn_error"]
    waits = []
    for kind in kinds:
        crash = job.now
        decision = job.crash(kind, wait=0.0)
        if decision.verdict is Verdict.WAIT:
            assert decision.not_before is not None
            job.now = decision.not_before
            decision = job.crash(kind, wait=0.0, since=crash)
        assert decision.verdict is Verdict.ACT
        waits.append(job.now - crash)
    # 5 s x 2^n from the second on, and half of the quarter that chance may add
    assert waits == pytest.approx([0.0, 5.625, 11.25, 22.5])
    capped = Job(Policy("act", budgets=Budgets(backoff_s=300.0, backoff_cap_s=310.0)))
    capped.crash("segfault", wait=0.0)
    late = capped.crash("host_oom_sigkill", wait=0.0)
    assert late.not_before == pytest.approx(capped.now + 310.0)


def test_five_attempts_an_hour_without_progress_then_a_person_is_told_and_an_hour_passes() -> None:
    job = Job()
    kinds = ["segfault", "host_oom_sigkill", "nccl_remote_error", "cudnn_error", "process_abort", "cuda_device_busy"]
    begun = job.now + 400
    for kind in kinds[:5]:
        assert job.crash(kind).verdict is Verdict.ACT
    sixth = job.crash(kinds[5])
    assert (sixth.verdict, sixth.notify, sixth.action) == (Verdict.HOLD, True, "wait_memory")
    assert "budget of 5" in sixth.reason
    assert sixth.not_before == begun + 3600
    assert job.crash(kinds[5], wait=3600.0).verdict is Verdict.ACT


def test_a_clock_that_jumped_forward_and_back_neither_blocks_nor_frees_for_ever() -> None:
    job = Job()
    job.now += 1e6
    job.crash("segfault")
    job.now -= 1e6
    decision = job.crash("host_oom_sigkill", wait=0.0)
    assert decision.verdict is Verdict.WAIT
    assert decision.not_before is not None
    assert decision.not_before <= job.now + 10
    job.now += 10
    assert job.look(crashed("host_oom_sigkill", job.now - 10)).verdict is Verdict.ACT


# -- a supervisor that was killed


def test_an_action_that_was_announced_is_finished_not_repeated() -> None:
    job = Job()
    job.now += 10
    situation = crashed("segfault", job.now, step=3)
    first = job.look(situation)
    job.book.intend(first, job.now)
    job.now += 5
    second = job.look(situation)
    assert (second.id, second.resumes, second.verdict) == (first.id, True, Verdict.ACT)
    job.book.intend(second, job.now)
    assert sum(e.event == "action_intended" for e in job.book.events) == 1
    job.now += 2000
    third = job.look(situation)
    assert job.outcomes == [("restart", "interrupted")]
    assert third.verdict is Verdict.HOLD, "an announcement counts, whether it was done or not"


def test_a_resumed_change_of_config_is_the_same_change() -> None:
    kind = "activation_checkpoint_mismatch"
    job = Job(Policy("act", (f"{kind}:loss_reentrant",)))
    first = job.look(crashed(kind, T0, step=3))
    job.book.intend(first, T0)
    second = job.look(crashed(kind, T0, step=3))
    assert second.resumes
    assert second.layer == first.layer


def test_what_is_done_from_outside_is_not_done_inside() -> None:
    decision = Job(Policy("act", ("ct_down:start_container",))).crash("ct_down")
    assert decision.verdict is Verdict.HOLD
    assert "from outside" in decision.reason


def test_a_worker_that_never_says_how_gets_a_reason() -> None:
    kind = "activation_checkpoint_mismatch"
    allow = (f"{kind}:loss_reentrant",)
    table = RemedyTable(reasons={"loss_reentrant": "this trainer has one loss only"})
    decision = Job(Policy("act", allow)).crash(kind, table=table)
    assert "loss_reentrant: this trainer has one loss only" in decision.skipped
    assert decision.verdict is Verdict.HOLD
    assert TABLE.ways


def test_outcomes_are_all_reachable_words() -> None:
    assert {o.value for o in Outcome} == {
        "intended", "done", "failed", "interrupted", "useless", "changed", "worse", "verified",
    }  # fmt: skip


def test_every_condition_of_a_step_that_may_run_by_itself_is_one_that_code_knows() -> None:
    unknown = {
        (kind.id, remedy.when)
        for kind in PLAYBOOKS.kinds.values()
        for remedy in kind.remedies
        if remedy.grade == "A" and remedy.when and remedy.when not in CONDITIONS and remedy.when not in PREDICATES
    }
    assert unknown == set()


def test_an_xid_of_the_hardware_is_no_case_for_a_restart() -> None:
    contained = crashed("gpu_ecc_error", step=3)
    assert contained.diagnosis is not None
    assert Job().look(contained).action == "restart"
    line = EvidenceLine("NVRM: Xid (PCI:0000:18:00): 48, pid=41, Double Bit ECC Error", 3, "kernel")
    bad = replace(contained, diagnosis=replace(contained.diagnosis, evidence=(line,)))
    assert Job().look(bad).verdict is Verdict.HOLD
    text = "NVRM: Xid (PCI:0000:63:00): 94, pid=48, name=python3, Contained: SM (0x1)."
    contained = replace(contained, diagnosis=replace(contained.diagnosis, evidence=(replace(line, text=text),)))
    assert Job().look(contained).action == "restart", "neither bus nor pid is an Xid"
