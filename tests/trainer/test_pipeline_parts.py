"""The pipeline's small parts: ring, channel, masters, averaging, progress lines, worker logs."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest
import torch
from pipeline_support import REPO
from ports import free_port
from torch import nn

from trainer import channel
from trainer.channel import Channel, Peer, PeerGone
from trainer.data import Sample
from trainer.errors import ConfigError, NonFiniteError, TrainerError, tell, write_error_file
from trainer.optimizer import Masters
from trainer.progress import Meter, Output, WorkerTimes
from trainer.ring import ALIGN, Ring, RingLayout, create_ring
from trainer.stopwatch import Stopwatch
from trainer.target_worker import fill_tokens
from trainer.workers import Worker

LAYOUT = RingLayout(slots=3, batch=2, length=7, width=5, dtype="bfloat16")


# ---- ring


def test_slots_are_aligned_and_apart_and_shared(tmp_path: Path) -> None:
    descriptor = create_ring(LAYOUT, str(tmp_path))
    assert list(tmp_path.iterdir()) == []  # no name, so nothing to leave behind
    assert os.fstat(descriptor).st_size == LAYOUT.total_bytes
    assert LAYOUT.slot_bytes % ALIGN == 0
    ours, theirs = Ring(descriptor, LAYOUT, pin=False), Ring(descriptor, LAYOUT, pin=False)
    os.close(descriptor)
    for number in range(3):
        for length in (7, 3):
            slot = ours.slot(number, length)
            for tensor in (slot.lengths, slot.input_ids, slot.loss_mask, slot.features):
                assert tensor.data_ptr() % ALIGN == ours.slot(0, 7).lengths.data_ptr() % ALIGN
                tensor.fill_(number + 1)
    for number in range(3):
        slot = theirs.slot(number, 3)
        for tensor in (slot.lengths, slot.input_ids, slot.loss_mask, slot.features):
            assert (tensor == number + 1).all()
        assert slot.features.shape == (2, 3, 5)
        assert slot.features.dtype == torch.bfloat16


def test_a_slot_forgets_the_batch_before(tmp_path: Path) -> None:
    descriptor = create_ring(LAYOUT, str(tmp_path))
    slot = Ring(descriptor, LAYOUT, pin=False).slot(1, 7)
    os.close(descriptor)
    fill_tokens(slot, [Sample(0, [9] * 7, [1] * 7), Sample(1, [8] * 7, [1] * 7)])
    fill_tokens(slot, [Sample(2, [5, 6], [0, 1])])
    assert slot.lengths.tolist() == [2, 0]
    assert slot.input_ids.tolist() == [[5, 6, 0, 0, 0, 0, 0], [0] * 7]
    assert slot.loss_mask.tolist() == [[0, 1, 0, 0, 0, 0, 0], [0] * 7]


def test_a_file_system_without_nameless_files_does_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    descriptor = create_ring(LAYOUT, str(tmp_path))
    assert os.fstat(descriptor).st_size == LAYOUT.total_bytes
    assert list(tmp_path.iterdir()) == []
    os.close(descriptor)
    with pytest.raises(ConfigError, match="ring cannot be made"):
        create_ring(LAYOUT, str(tmp_path / "absent"))


# ---- channel


def test_messages_and_a_descriptor_cross_and_death_is_end_of_file(tmp_path: Path) -> None:
    server, name = channel.listen()
    worker = Channel(name, os.getppid())
    connection, _ = server.accept()
    assert channel.peer_pid(connection) == os.getpid()
    peer = Peer(connection)
    assert peer.receive() == []
    worker.send({"k": "hello", "text": "zwei\nZeilen"})
    worker.send({"k": "ready"})
    assert peer.receive() == [{"k": "hello", "text": "zwei\nZeilen"}, {"k": "ready"}]
    file = tmp_path / "f"
    file.write_text("shared")
    with file.open("rb") as opened:
        peer.send_with_descriptors({"k": "setup"}, [opened.fileno()])
    peer.send({"k": "train"})
    assert worker.receive() == {"k": "setup"}
    with os.fdopen(worker.take_descriptor()) as got:
        assert got.read() == "shared"
    assert worker.receive() == {"k": "train"}
    big = {"k": "fill", "samples": list(range(400_000))}
    peer.send(big)
    assert peer.pending  # more than the socket takes: kept, not waited for
    answer: list[Any] = []
    while not answer:
        peer.flush()
        while peer.pending and b"\n" not in worker._in:
            worker._in += worker._read()
            peer.flush()
        answer.append(worker.receive())
    assert answer == [big]
    worker.socket.close()
    assert peer.receive() == []
    assert peer.closed
    peer.send({"k": "nobody"})  # is no error: the loop learns of the death by reading
    other = Channel(name, os.getppid())
    accepted, _ = server.accept()
    accepted.close()
    with pytest.raises(PeerGone):
        other.receive()
    server.close()
    other.socket.close()


def test_what_is_no_message_is_refused() -> None:
    server, name = channel.listen()
    worker = Channel(name, os.getppid())
    connection, _ = server.accept()
    peer = Peer(connection)
    for wrong in (b"{\n", b"[]\n"):
        worker.socket.sendall(wrong)
        with pytest.raises(TrainerError, match="a message is no"):
            peer.receive()
    for end in (server, worker.socket, connection):
        end.close()


# ---- masters


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.ones(2, 2))
        self.norm = nn.Parameter(torch.ones(2))


def test_norms_do_not_decay_and_moments_are_there_before_the_first_step() -> None:
    masters = Masters(Net(), weight_decay=0.5, fused=False)
    assert set(masters.parameters) == {"wide", "norm"}
    for kind in ("exp_avg", "exp_avg_sq"):
        for name, parameter in masters.parameters.items():
            assert torch.equal(masters.tensor(kind, name), torch.zeros_like(parameter))
    for parameter in masters.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    assert masters.step(lr=0.1, clip=1.0) == 0.0
    assert torch.allclose(masters.parameters["wide"], torch.full((2, 2), 0.95))
    assert torch.equal(masters.parameters["norm"], torch.ones(2))


def test_a_gradient_that_is_not_finite_steps_nothing() -> None:
    masters = Masters(Net(), weight_decay=0.5, fused=False)
    for parameter in masters.parameters.values():
        parameter.grad = torch.full_like(parameter, float("nan"))
    assert masters.step(lr=0.1, clip=1.0) != masters.step(lr=0.1, clip=1.0)
    assert all(torch.equal(p, torch.ones_like(p)) for p in masters.parameters.values())


def test_masters_step_as_torch_adamw_does_and_go_on_from_loaded_state() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(2, 2, generator=generator) for _ in range(6)]
    one, two, reference = Net(), Net(), Net()
    adam = torch.optim.AdamW([reference.wide], lr=0.1, weight_decay=0.5)

    def step(masters: Masters, net: Net, gradient: torch.Tensor) -> None:
        net.wide.grad, net.norm.grad = gradient.clone(), torch.zeros(2)
        masters.step(lr=0.1, clip=1e9)

    first = Masters(one, 0.5, fused=False)
    for gradient in gradients:
        step(first, one, gradient)
        reference.wide.grad = gradient.clone()
        adam.step()
    assert torch.equal(one.wide, reference.wide)

    half, second = Masters(two, 0.5, fused=False), Masters(Net(), 0.5, fused=False)
    for gradient in gradients[:3]:
        step(half, two, gradient)
    for name, parameter in half.parameters.items():
        second.load("weight", name, parameter.data)
        for kind in ("exp_avg", "exp_avg_sq"):
            second.load(kind, name, half.tensor(kind, name))
    second.set_count(3)
    for gradient in gradients[3:]:
        second.parameters["wide"].grad = gradient.clone()
        second.parameters["norm"].grad = torch.zeros(2)
        second.step(lr=0.1, clip=1e9)
    assert torch.equal(second.parameters["wide"].data, one.wide.data)


AVERAGE = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
from trainer import averaging
averaging.PIECE = 5  # several pieces
rank, port, tokens = int(sys.argv[1]), int(sys.argv[2]), [float(x) for x in sys.argv[3].split(",")]
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
for weights in zip(tokens[::2], tokens[1::2]):
    tensors = [torch.full((2, 2), float(rank + 1)), torch.arange(4.0) * (rank + 1), torch.tensor(10.0 * rank)]
    total = averaging.average(tensors, weights[rank], torch.device("cpu"))
    print(total, *[t.flatten().tolist() for t in tensors])
dist.destroy_process_group()
"""


def test_drafters_weigh_by_their_tokens_also_with_none() -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command, port = [sys.executable, "-c", AVERAGE], free_port()
    # 1 to 3; then one drafter without a token; then nobody has any
    both = [
        subprocess.Popen(
            [*command, str(rank), str(port), "1,3,0,7,0,0"],
            cwd=REPO,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    told = [process.communicate(timeout=90)[0].splitlines() for process in both]
    assert told[0] == told[1]
    assert told[0] == [
        "4.0 [1.75, 1.75, 1.75, 1.75] [0.0, 1.75, 3.5, 5.25] [7.5]",
        "7.0 [2.0, 2.0, 2.0, 2.0] [0.0, 2.0, 4.0, 6.0] [10.0]",
        "0.0 [1.5, 1.5, 1.5, 1.5] [0.0, 1.5, 3.0, 4.5] [5.0]",
    ]


# ---- progress


STATS = {
    "numerator": 30.0,
    "denominator": 10.0,
    "correct": 5,
    "positions": 20,
    "prefix_sum": 12,
    "prefix_count": 8,
    "block_tokens": 64,
    "context_tokens": 100,
    "grad_norm": 2.0,
    "empty": 0,
}


def test_a_record_is_weighted_by_what_was_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    meter = Meter(Output(), tmp_path / "metrics.jsonl")
    assert meter.start(10, list)
    assert not meter.start(11, list)
    meter.add(STATS, 4)
    meter.add({**STATS, "numerator": 10.0, "denominator": 30.0, "grad_norm": 4.0}, 4)
    assert not meter.due(11, 2)
    assert meter.due(12, 2)
    times = [WorkerTimes("target0", 1, {"wait": 1e9, "compute": 0.0})]
    record = {"step": 12, "total": 20, "epoch": 0.25, "lr": 1e-4, "ring": (3, 8), "samples": 8}
    meter.record(**record, workers=times)
    meter.record(**record, workers=times)  # nothing since: nothing said
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    entry = json.loads(line)
    assert entry["loss"] == 1.0  # (30 + 10) / (10 + 30)
    assert (entry["acc"], entry["tau"], entry["grad_norm"]) == (0.25, 2.5, 3.0)
    assert entry["workers"]["target0"] == {"wait": 1.0, "compute": 0.0, "copy": 0.0, "sync": 0.0, "life": 1}
    assert entry["life"] == 1
    assert entry["eta_s"] == pytest.approx(8 * 200 / (2 * entry["ctx_tok_s"]))
    out = capsys.readouterr().out
    assert out.startswith("dflash step=12/20 epoch=0.250 loss=1.0000 acc=0.2500 tau=2.50 block_tok_s=")
    assert " ring=3/8 lr=1.0000e-04 eta_s=0 life=1 shares=target0:100/0/0/0\n" in out


def test_what_one_node_tells_of_its_batches_is_all_that_another_one_adds(tmp_path: Path) -> None:
    entries: list[dict[str, Any]] = []
    ours, theirs = (Meter(Output(), tmp_path / f"{n}.jsonl", sinks=[entries.append]) for n in range(2))
    theirs.add({**STATS, "empty": 1}, 4)
    theirs.add(STATS, 3)
    for meter in (ours, theirs):
        meter.start(0, list)
    ours.add_others(theirs.sums)
    for meter in (theirs, ours):
        meter.record(step=1, total=2, epoch=0.5, lr=1e-4, ring=(0, 1), samples=7, workers=())
    told, added = entries
    assert added["empty"] == told["empty"] == 1
    same = ("loss", "acc", "tau", "grad_norm", "samples")
    assert [added[name] for name in same] == [told[name] for name in same]


def test_shares_of_an_interval_are_the_whole_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("trainer.progress.time.monotonic", lambda: now)
    meter = Meter(Output(), tmp_path / "metrics.jsonl")
    record: dict[str, Any] = {"total": 20, "epoch": 0.25, "lr": 1e-4, "ring": (3, 8), "samples": 8}

    def interval(until: float, step: int, life: int = 0, **seconds: float) -> dict[str, float]:
        nonlocal now
        now = until
        meter.add(STATS, 4)
        meter.record(**record, step=step, workers=[WorkerTimes("target1", life, seconds)])
        return json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["workers"]["target1"]

    # It filled the ring and waited before the first step, and both is no part of any interval.
    assert meter.start(0, lambda: [WorkerTimes("target1", 0, {"wait": 40.0, "compute": 30.0})])
    shares = interval(110.0, 10, wait=46.0, compute=34.0)
    assert shares == {"wait": 0.6, "compute": 0.4, "copy": 0.0, "sync": 0.0, "life": 0}
    # Of what was taken for computing before, a second was a copy: nothing is less than nothing, nothing more than all.
    shares = interval(120.0, 20, wait=55.0, compute=33.0, copy=2.0)
    assert shares == {"wait": 0.8182, "compute": 0.0, "copy": 0.1818, "sync": 0.0, "life": 0}
    # It died, and its next life has been there for six seconds.
    shares = interval(130.0, 30, life=1, wait=5.0, compute=1.0)
    assert shares == {"wait": 0.9, "compute": 0.1, "copy": 0.0, "sync": 0.0, "life": 1}
    shares = interval(133.0, 40, life=1, wait=6.0, compute=2.0, copy=1.0)
    assert shares == {"wait": 0.3334, "compute": 0.3333, "copy": 0.3333, "sync": 0.0, "life": 1}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == [
        "shares=target1:60/40/0/0",
        "shares=target1:82/0/18/0",
        "shares=target1:90/10/0/0",
        "shares=target1:34/33/33/0",
    ]


def test_a_worker_that_has_not_spoken_yet_is_accounted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr("trainer.workers.time.monotonic", lambda: now)
    worker = Worker("drafter0", "drafter", 0, "cpu", started_at=10.0)
    now = 14.0
    worker.ready, worker.ready_at = True, now
    worker.idle()
    now = 16.0
    worker.busy()
    now = 19.0
    assert worker.times() == {"wait": 6.0, "compute": 3.0, "copy": 0.0, "sync": 0.0}
    worker.heard({"wait": 2.0, "compute": 2.0, "copy": 1.0, "sync": 0.0})
    worker.idle()
    worker.busy("sync")
    now = 21.5
    assert worker.times() == {"wait": 6.0, "compute": 2.0, "copy": 1.0, "sync": 2.5}
    watch = Stopwatch(lambda: now)
    now = 24.0
    watch.lap("copy")
    now = 25.0
    watch.lap("wait")
    assert watch.seconds() == {"wait": 1.0, "compute": 0.0, "copy": 2.5, "sync": 0.0}


def test_lines_have_no_blanks_in_values(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output()
    output.event("bad_data", reason="no JSON:  at\nline 1", nothing=None, empty="")
    assert capsys.readouterr().out == "dflash event=bad_data reason=no_JSON:_at_line_1 empty=-\n"


def test_a_path_with_blanks_can_be_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("/srv/root t/100%/ä\u00a0\n\udcff/step-1")
    Output().event("checkpoint", step=1, path=path)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("dflash event=checkpoint step=1 path=/srv/root%20t/100%25/ä%C2%A0%0A%FF/")
    assert Path(os.fsdecode(unquote_to_bytes(line.partition("path=")[2]))) == path


# ---- errors


def test_the_first_error_file_stays(tmp_path: Path) -> None:
    file = tmp_path / "errors" / "target0" / "error.json"
    try:
        raise NonFiniteError("the loss is nan", "batch 3", "a smaller lr")
    except NonFiniteError as error:
        write_error_file(file, error)
        write_error_file(file, ValueError("later"))
        assert tell(error) == "error: the loss is nan\n  where: batch 3\n  next:  a smaller lr"
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "NonFiniteError: the loss is nan [batch 3] -> a smaller lr"
    assert "raise NonFiniteError" in message["extraInfo"]["py_callstack"]
    assert [p.name for p in file.parent.iterdir()] == ["error.json"]
