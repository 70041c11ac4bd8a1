"""Bytes to lines worth reading: any chunking gives the same, clean logs give nothing, memory does not grow."""
# ruff: noqa: E501 - lines of logs are as long as they are

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator

from dflash_ops.contracts.diagnosis import Diagnosis
from dflash_ops.triage import Source, Triage
from dflash_ops.triage.scan import BLOCK, Needles, Scan, fold

Say = Callable[..., Diagnosis]


def training(dialect: str, n: int, seed: int = 7) -> Iterator[str]:
    """Clean training output."""
    rnd = random.Random(seed)
    for i in range(n):
        loss = 2.3 + rnd.random()
        if dialect == "dflash":
            yield f"dflash step={i}/500000 epoch={i / 1000:.3f} loss={loss:.4f} acc={rnd.random():.4f} block_tok_s={rnd.randint(9000, 14000)} ring={i % 9}/8"
        elif dialect == "hf":
            yield f"{{'loss': {loss:.4f}, 'grad_norm': {rnd.random():.4f}, 'learning_rate': {rnd.random():.4e}, 'epoch': {i / 100:.2f}}}"
        elif dialect == "tqdm":
            yield f"train: {i % 100:3d}%|{'█' * (i % 50)}{' ' * (50 - i % 50)}| {i}/{n} [{i // 60:02d}:{i % 60:02d}<01:30,  9.41it/s, loss={loss:.3f}]"
        elif dialect == "torchtitan":
            yield f"[rank{i % 8}]:2026-11-29 16:24:{i % 60:02d},123 - root - INFO - step: {i:5d}  loss: {loss:7.4f}  grad_norm: 0.81  memory: 47.31GiB(59.81%)  tps: 7,012  mfu: 41.20%"
        else:
            yield f" iteration {i:8d}/  500000 | consumed samples: {i * 8:12d} | learning rate: {rnd.random():.6E} | lm loss: {loss:.6E} | number of nan iterations:   0 |"


def test_200_thousand_lines_of_clean_training_output_are_healthy(triage: Triage) -> None:
    for dialect in ("dflash", "hf", "tqdm", "torchtitan", "megatron"):
        text = "\n".join(training(dialect, 40_000)).encode()
        d = triage.diagnose([Source(dialect, text)])
        assert (d.kind, d.also, d.evidence) == ("healthy", (), ()), dialect
        assert d.facts["lines"] == 40_000
        assert d.facts["last_step"] is not None


def test_an_error_deep_inside_a_large_log_is_found_with_its_line_number(say: Say) -> None:
    lines = list(training("hf", 30_000))
    lines[17_000:] = [
        "Traceback (most recent call last):",
        '  File "/root/w.py", line 3, in f',
        "    g()",
        "OSError: [Errno 28] No space left on device",
    ]
    d = say("\n".join(lines))
    assert d.kind == "disk_full"
    assert d.evidence[0].number == 17_004


def test_what_stands_around_an_error_deep_inside_a_log_is_read_too(say: Say) -> None:
    quiet = [f"heartbeat {n} ok" for n in range(6_000)]
    error = ["OSError: [Errno 28] No space left on device"]
    steps = [f"step {n}/99000 loss 2.3" for n in range(100, 120)]
    later = [f"step {n}/99000 loss 2.3" for n in range(120, 140)]
    assert say("\n".join([*quiet, *steps, *error, *later, *quiet])).kind == "healthy", "the steps after it"
    again = steps[:5]  # steps that had been done before are no progress
    assert say("\n".join([*quiet, *later, *error, *again, *quiet])).kind == "disk_full", "the steps before it"


def test_any_chunking_gives_the_same_answer(triage: Triage) -> None:
    lines = list(training("torchtitan", 6_000))
    lines[4_000:4_000] = [
        "[rank3]: ValueError: x",
        "OSError: [Errno 28] No space left on device",
        "\x1b[31mred\x1b[0m \xff",
    ]
    data = "\n".join(lines).encode("latin-1", "replace")
    assert len(data) > 2 * BLOCK
    whole = triage.diagnose([Source("a", data)])
    rnd = random.Random(3)
    for size in (1 << 10, 7_777, BLOCK - 1, BLOCK, BLOCK + 1):
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        assert triage.diagnose([Source("a", iter(pieces))]) == whole, size
    cuts = sorted(rnd.randrange(len(data)) for _ in range(40))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert triage.diagnose([Source("a", iter(pieces))]) == whole


def test_memory_does_not_grow_with_the_input(triage: Triage) -> None:
    block = ("\n".join(training("torchtitan", 2_000)) + "\n").encode()

    def peak(times: int) -> int:
        tracemalloc.start()
        triage.diagnose([Source("a", (block for _ in range(times)))])
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    peak(2)
    assert peak(40) < peak(10) * 1.3 + 1_000_000


def test_a_line_without_end_is_read_in_pieces(triage: Triage) -> None:
    bars = b"".join(b"\r %d%%|##   | %d/100 [00:10<00:12, 4.4it/s]" % (i % 100, i % 100) for i in range(100_000))
    text = bars + b"\rOSError: [Errno 28] No space left on device" + b"\r" * 200_000 + b"x" * 3_000_000
    assert triage.diagnose([Source("a", text)]).kind == "disk_full"


def test_needles_are_found_where_they_stand_and_nowhere_else() -> None:
    literals = ["CUDA out of memory", "[Errno 28]", "CUBLAS_STATUS_ALLOC_FAILED", "Xid", "x"]
    needles = Needles(literals)
    for i, literal in enumerate(literals):
        assert i in needles.find(fold(f"12 some text {literal} more".encode()))
    assert needles.find(fold(b"a quiet line of training 12.3 loss")) == []
    assert 2 in needles.find(fold(b"z" * 10_000 + b" CUBLAS_STATUS_ALLOC_FAILED"))


def test_kept_lines_are_bounded_whatever_comes() -> None:
    scan = Scan(Needles(["Traceback (most recent"]))
    for n in range(60):
        scan.feed(b"".join(b"Traceback (most recent call last): %d\n" % (n * 1000 + i) for i in range(1_000)))
        scan.feed(b"".join(b"quiet %d\n" % i for i in range(500)))
    scan.close()
    assert 1_000 < len(scan.lines()) <= 26_000
    assert scan.total_lines == 90_000
