"""The last average in memory, what a checkpoint is made of it, and how often drafters may start from it."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer.averages import AverageMemory, Averages
from trainer.checkpoint import KEEP, MOMENTS, WEIGHTS, Store, list_checkpoints, verify
from trainer.cli import main
from trainer.errors import CheckpointError, ConfigError, TrainerError
from trainer.optimizer import Masters
from trainer.plan_record import Audit, PlanRecord, replay
from trainer.restarts import Restarts
from trainer.saver import save
from trainer.state_layout import HEADER, Kept, StateLayout
from trainer.tensor_files import load_checkpoint, moments_file

SHAPES = {"wide": (3, 5), "norm": (5,)}
STATE = {"batches": 7, "plan": {"base": {}}, "data": {"sha256": ""}, "drafter": {}}


class Net(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.full((3, 5), fill))
        self.norm = nn.Parameter(torch.full((5,), fill + 0.5))


def masters(fill: float) -> Masters:
    made = Masters(Net(fill), 0.0, fused=False)
    for kind, more in (("exp_avg", 0.25), ("exp_avg_sq", 0.125)):
        for name in SHAPES:
            made.tensor(kind, name).fill_(fill + more)
    return made


def equal(one: Masters, other: Masters, kinds: tuple[str, ...] = ("weight", "exp_avg", "exp_avg_sq")) -> bool:
    return all(torch.equal(one.tensor(k, n), other.tensor(k, n)) for k in kinds for n in SHAPES)


def write(averages: Averages, fills: list[float], step: int, *, commit: bool = True) -> None:
    """All drafters write; the launcher commits."""
    buffer, sums = averages.begin(), {}
    for rank, fill in enumerate(fills):
        memory = AverageMemory(averages.descriptor, averages.layout, rank, pin=False)
        sums |= memory.write(buffer, masters(fill))
    if commit:
        averages.keep(step, 2 * step, [sums[str(i)] for i in range(len(sums))])


def read(averages: Averages, rank: int = 0) -> tuple[Kept, Masters]:
    assert averages.current is not None
    into = masters(0.0)
    memory = AverageMemory(averages.descriptor, averages.layout, rank, pin=False)
    return memory.read(averages.current.buffer, into), into


def test_what_counts_is_the_last_commit_whatever_is_written_beside_it(tmp_path: Path) -> None:
    averages = Averages(StateLayout(SHAPES), str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    for step in (1, 2, 3):
        write(averages, [float(step), -1.0], step)  # drafter 1 has nothing of its own to write
        kept, found = read(averages, rank=1)
        assert (kept.step, kept.batches) == (step, 2 * step)
        assert equal(found, masters(float(step)))
    write(averages, [9.0], 4, commit=False)  # and then a drafter died
    kept, found = read(averages)
    assert kept.step == 3
    assert equal(found, masters(3.0))
    averages.close()


def test_a_buffer_that_was_never_committed_or_is_damaged_is_refused(tmp_path: Path) -> None:
    layout = StateLayout(SHAPES)
    averages = Averages(layout, str(tmp_path))
    memory = AverageMemory(averages.descriptor, layout, 0, pin=False)
    write(averages, [1.0], 1, commit=False)
    with pytest.raises(TrainerError, match="never committed"):
        memory.read(0, masters(0.0))
    write(averages, [1.0], 1)
    for offset, size in layout.regions(0):
        at = offset + size - 3
        before = os.pread(averages.descriptor, 1, at)
        os.pwrite(averages.descriptor, bytes([before[0] ^ 4]), at)
        with pytest.raises(TrainerError, match="sum of its"):
            memory.read(0, masters(0.0))
        beside = Store(tmp_path / "checkpoints", 3)
        with pytest.raises(TrainerError, match="damaged"):
            save(averages.descriptor, layout, 0, beside.begin(1, {"step": 1, **STATE}))
        beside.close()
        os.pwrite(averages.descriptor, before, at)
    assert list_checkpoints(tmp_path / "checkpoints") == []
    os.pwrite(averages.descriptor, b"{nonsense".ljust(HEADER, b"\0"), 0)
    with pytest.raises(TrainerError, match="cannot be used"):
        memory.read(0, masters(0.0))
    averages.close()


def test_numbers_that_are_not_finite_are_not_kept(tmp_path: Path) -> None:
    averages = Averages(StateLayout(SHAPES), str(tmp_path))
    write(averages, [1.0], 1)
    bad = masters(2.0)
    bad.tensor("exp_avg_sq", "norm")[3] = float("inf")
    with pytest.raises(ValueError, match=r"exp_avg_sq\.norm"):
        AverageMemory(averages.descriptor, averages.layout, 0, pin=False).write(averages.begin(), bad)
    assert equal(read(averages)[1], masters(1.0))
    averages.close()


def test_too_little_room_says_how_much_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"averages cannot be made: .* bytes are free there, \d+ bytes are needed"):
        Averages(StateLayout({"huge": (1 << 40,)}), "/dev/shm")


def test_local_moments_stay_each_drafters_own_and_are_averaged_for_another_number(tmp_path: Path) -> None:
    layout = StateLayout(SHAPES, moment_sets=2)
    averages = Averages(layout, str(tmp_path))
    write(averages, [1.0, 3.0], 5)
    own = read(averages, rank=1)[1]
    assert equal(own, masters(1.0), ("weight",))
    assert equal(own, masters(3.0), ("exp_avg", "exp_avg_sq"))
    store = Store(tmp_path / "checkpoints", 3)
    beside = store.begin(5, {"step": 5, **STATE})
    assert averages.current is not None
    save(averages.descriptor, layout, averages.current.buffer, beside)
    path = store.claim(5)
    store.publish(beside, path)
    store.close()
    assert verify(path).step == 5
    assert {p.name for p in path.glob("*.safetensors")} == {WEIGHTS, MOMENTS, "moments-1.safetensors"}
    from safetensors.torch import load_file

    assert torch.equal(load_file(str(path / WEIGHTS))["norm"], masters(1.0).tensor("weight", "norm"))
    for rank, sets, moments in ((1, 2, 3.0), (0, 2, 1.0), (0, 1, 2.0), (2, 3, 2.0)):
        into = masters(0.0)
        load_checkpoint(path, into, rank, sets)
        assert equal(into, masters(1.0), ("weight",))
        assert equal(into, masters(moments), ("exp_avg", "exp_avg_sq")), (rank, sets)
    (path / moments_file(1)).unlink()
    with pytest.raises(CheckpointError, match="moments-1"):
        verify(path)
    averages.close()


def checkpoint(store: Store, averages: Averages, step: int) -> Path:
    write(averages, [float(step)], step)
    beside = store.begin(step, {"step": step, **STATE})
    assert averages.current is not None
    save(averages.descriptor, averages.layout, averages.current.buffer, beside)
    path = store.claim(step)
    store.publish(beside, path)
    return path


def test_keep_every_keeps_and_verify_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoints"
    averages = Averages(StateLayout(SHAPES), str(tmp_path))
    store = Store(folder, keep_last=2, keep_every=100)
    for step in (40, 80, 120, 160, 200, 240, 280):
        checkpoint(store, averages, step)
    store.close()
    averages.close()
    assert [int(p.name[5:]) for p in list_checkpoints(folder)] == [120, 200, 240, 280]
    assert (folder / "step-00000120" / KEEP).exists()

    def call(*extra: str) -> tuple[int, str]:
        code = main(["verify", "--checkpoints", str(folder), *extra])
        return code, "".join(capsys.readouterr())

    assert call()[0] == 0
    assert call("--all")[1].endswith("4 checkpoints, all whole\n")
    bad = folder / "step-00000200" / MOMENTS
    raw = bytearray(bad.read_bytes())
    raw[-1] ^= 1
    bad.write_bytes(raw)
    assert call("--step", "240")[0] == 0
    code, said = call("--all", "--json")
    answer = json.loads(said)
    assert (code, answer["ok"], [c["ok"] for c in answer["checkpoints"]]) == (5, False, [True, False, True, True])
    assert answer["checkpoints"][1]["where"] == str(bad)
    code, said = call("--step", "200")
    assert code == 5
    assert f"NOT whole: {MOMENTS} does not have the hash" in said
    assert call("--step", "7")[0] == 5
    folder = tmp_path / "absent"
    assert call()[0] == 2
    folder.mkdir()
    assert call() == (
        5,
        f"error: there is no checkpoint in it\n  where: {folder}\n  next:  give a run's checkpoints folder\n",
    )


def test_lines_that_a_full_disk_does_not_take_wait_in_their_order(tmp_path: Path) -> None:
    record = PlanRecord(tmp_path)
    record.commit(1, 1)
    size = (tmp_path / "plan.jsonl").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 9, hard))
    try:
        record.commit(2, 2)
        record.rollback(2, "x")
        with pytest.raises(OSError, match="too large"):
            record.checkpoint(3, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    record.commit(4, 4)
    record.close()
    told = [json.loads(line) for line in (tmp_path / "plan.jsonl").read_text().splitlines()]
    assert [(e["k"], e["step"]) for e in told] == [
        ("commit", 1),
        ("commit", 2),
        ("rollback", 2),
        ("checkpoint", 3),
        ("commit", 4),
    ]


def test_a_rollback_takes_back_what_the_audit_had_counted() -> None:
    def judged(*entries: dict[str, Any]) -> Audit:
        return replay([("1", [{"k": "begin", "from_step": 0, "accepted": [[0, 3]]}, *entries])], Audit())

    def ack(*samples: int) -> dict[str, Any]:
        return {"k": "ack", "epoch": 0, "samples": list(samples)}

    commit = {"k": "commit", "step": 1, "checkpoint": None}
    back = {"k": "rollback", "step": 1, "cause": "x"}
    saved = {"k": "checkpoint", "step": 1, "path": "c"}
    over, end = {"k": "epoch", "epoch": 0}, {"k": "commit", "step": 2, "checkpoint": None}
    result = judged(ack(0, 1), commit, ack(2), saved, back, ack(2), ack(3), over, end)
    assert result.ok
    assert (result.rolled_back, result.provisional) == (1, 2)
    assert not judged(ack(0, 1), commit, ack(2), ack(2), ack(3), over, end).ok  # the same without it
    assert not judged(ack(0, 1), back).ok  # to a step that was never committed
    assert not judged(ack(0, 1), saved).ok


def test_a_fault_that_comes_again_and_a_budget_end_it() -> None:
    restarts = Restarts(budget=3)
    assert restarts.refusal("drafter1 was killed by SIGSEGV", from_outside=False) == ""
    assert "same fault twice" in restarts.refusal("drafter0 was killed by SIGSEGV", from_outside=False)
    restarts.progress()
    assert restarts.refusal("drafter0 was killed by SIGSEGV", from_outside=False) == ""
    for _ in range(2):
        assert restarts.refusal("drafter0 was killed by SIGKILL", from_outside=True) == ""
    assert "drafter_restarts = 3" in restarts.refusal("drafter0 was killed by SIGKILL", from_outside=True)
    assert Restarts(budget=0).refusal("x", from_outside=True)
