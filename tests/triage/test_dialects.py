"""Progress lines of several dialects, and lines that only look like them."""
# ruff: noqa: E501 - lines of logs are as long as they are

from __future__ import annotations

import pytest

from dflash_ops.contracts.progress import ProgressPattern
from dflash_ops.triage.progress import Reader, read

LINES = {
    "dflash": ("dflash step=120/500 epoch=0.480 loss=2.3101 block_tok_s=13500", 120),
    "hf": ("{'loss': 1.2034, 'grad_norm': 0.51, 'learning_rate': 1e-05, 'epoch': 1.23}", 1.23),
    "tqdm": ("train:  12%|█▏        | 1,200/10,000 [00:10<01:30,  9.90it/s, loss=2.1]", 1200),
    "torchtitan": ("step:  1230  loss:  2.3012  grad_norm:  0.81  memory: 47.31GiB(59.81%)  tps: 7,012", 1230),
    "nanogpt": ("iter 310: loss 2.3051, time 310.20ms, mfu 41.20%", 310),
    "megatron": (
        " iteration     310/  500000 | consumed samples: 2480 | elapsed time per iteration (ms): 900.1 | lm loss: 2.3E+00 |",
        310,
    ),
}


@pytest.mark.parametrize("dialect", LINES)
def test_each_dialect_is_read_with_its_step(dialect: str) -> None:
    text, step = LINES[dialect]
    found = read(text)
    assert found is not None and (found.dialect, found.step) == (dialect, step)


def test_a_reader_remembers_the_dialect_of_a_shape_and_still_reads_each_number() -> None:
    reader = Reader()
    assert [getattr(reader.read(f"iter {n}: loss 2.3051, time 310.20ms"), "step", None) for n in (1, 2, 300)] == [
        1,
        2,
        300,
    ]


def test_a_jobs_own_pattern_comes_first() -> None:
    found = Reader(ProgressPattern(r"^>> (?P<step>\d+) done")).read(">> 71 done")
    assert found is not None and (found.dialect, found.step) == ("own", 71)


@pytest.mark.parametrize(
    "text",
    ["Training finished, exiting ...", "{'train_runtime': 912.1, 'epoch': 3.0}", "dflash event=finished step=500"],
)
def test_a_good_end_is_known(text: str) -> None:
    found = read(text)
    assert found is not None and found.done


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: shape mismatch at step 3 in loss",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, Timeout(ms)=600000)",
        "Loading checkpoint shards:  57%|█████▋    | 4/7 [00:40<00:29,  9.96s/it]",
        "dflash event=worker_exit worker=target0 life=0 exitcode=-9",
        "resuming from step-00000100",
        "x" * 3000,
        "",
    ],
)
def test_what_only_looks_like_progress_is_none(text: str) -> None:
    assert read(text) is None or Reader().read(text) is None
