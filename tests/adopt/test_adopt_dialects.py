"""Progress lines of other trainers, as they really print them."""

from __future__ import annotations

import pytest

from dflash_ops.contracts import Limits, ProgressPattern, State
from dflash_ops.supervise.adopted import Sight, judge, warnings
from dflash_ops.supervise.dialects import Said, read

#: text -> dialect, step, total, loss, rate
LINES = {
    "dflash step=120/500 epoch=0.480 loss=2.3101 acc=0.4120 tau=2.91 block_tok_s=13500 ctx_tok_s=20100 ring=3/8": (
        "dflash", 120, 500, 2.3101, None),
    "  3%|▎         | 120/4000 [01:02<33:20,  1.94it/s]": ("tqdm", 120, 4000, None, 1.94),
    " 12%|█▏        | 1234/10000 [1:02:03<7:20:00,  4.00s/it, loss=2.31]": ("tqdm", 1234, 10000, 2.31, 0.25),
    "Training:  50%|#####     | 5/10 [00:05<00:05,  1.00s/step]": ("tqdm", 5, 10, None, 1.0),
    "Epoch 1/3:   4%|4         | 40/1000 [00:10<04:00, ?it/s]": ("tqdm", 40, 1000, None, None),
    "100%|##########| 1.50k/1.50k [00:10<00:00, 150it/s]": ("tqdm", 1500, 1500, None, 150.0),
    "[titan] 2025-03-01 10:00:00,123 - root - INFO - step: 10  loss:  7.1234  grad_norm:  1.20"
    "  memory: 40.66GiB(42.81%)  tps: 12,345  tflops: 61.20  mfu: 6.19%": ("torchtitan", 10, None, 7.1234, 12345.0),
    "[rank0]:2025-03-01 10:00:00,123 - root - INFO - step:  1  loss: 12.2721  memory: 1.0GiB(1%)  tps: 99": (
        "torchtitan", 1, None, 12.2721, 99.0),
    "iter 100: loss 3.4567, time 125.00ms, mfu 12.30%": ("nanogpt", 100, None, 3.4567, 8.0),
    "step 250: train loss 2.1000, val loss 2.2000": ("nanogpt", 250, None, 2.1, None),
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_each_dialect(line: str) -> None:
    dialect, step, total, loss, rate = LINES[line]
    said = read(["noise", line, "more noise 12/13"], 100.0)
    assert said.progress is not None
    assert said.dialect == dialect
    assert (said.progress.step, said.progress.total, said.progress.loss) == (step, total, loss)
    assert said.progress.rate == (pytest.approx(rate) if rate is not None else None)
    assert said.progress.t == 100.0


def test_hugging_face_tells_loss_and_step_on_different_lines() -> None:
    lines = [
        " 10%|█         | 10/100 [00:10<01:30,  1.00s/it]",
        "{'loss': 2.5, 'grad_norm': 1.25, 'learning_rate': 4.5e-05, 'epoch': 0.1}",
        " 11%|█         | 11/100 [00:11<01:29,  1.00s/it]",
        "{'loss': '2.4', 'grad_norm': '1.25', 'learning_rate': '4.4e-05', 'epoch': '0.11'}",
    ]
    said = read(lines, 5.0)
    assert said.progress is not None
    assert (said.progress.step, said.progress.total, said.progress.loss, said.progress.lr, said.progress.epoch) == (
        11, 100, 2.4, 4.4e-05, 0.11)  # fmt: skip
    assert said.progress.eta_s == 89.0
    assert not said.done
    ended = read(
        [*lines, "{'train_runtime': 100.0, 'train_samples_per_second': 1.0, 'train_loss': 2.0, 'epoch': 1.0}"], 5.0
    )
    assert ended.done


def test_a_bar_that_loads_is_no_step_and_an_evaluation_inside_is_none_either() -> None:
    said = read(["Loading checkpoint shards:  50%|#####     | 2/4 [00:05<00:05,  2.5s/it]"], 1.0)
    assert said.progress is None
    assert said.loading == "Loading checkpoint shards 2/4"
    for inner in (
        " 50%|#####     | 5/10 [00:05<00:05,  1.0it/s]",
        "Evaluating:  50%|#####     | 5/10 [00:05<00:05,  1.0it/s]",
    ):
        said = read([" 10%|█         | 10/100 [00:10<01:30,  1.00s/it]", inner], 1.0)
        assert said.progress is not None
        assert (said.progress.step, said.progress.total) == (10, 100)


def test_a_bar_redrawn_with_carriage_returns_counts_its_last_state() -> None:
    said = read(["\r".join(f" {n}%|#    | {n}/100 [00:{n:02d}<01:00,  1.00it/s]" for n in range(1, 9))], 1.0)
    assert said.progress is not None
    assert said.progress.step == 8


def test_the_jobs_own_pattern_comes_first() -> None:
    pattern = ProgressPattern(r"update (?P<step>\d+) nll (?P<loss>\S+)")
    said = read(["update 7 nll 1.5", "noise"], 1.0, pattern)
    assert said.dialect == "pattern"
    assert said.progress is not None
    assert (said.progress.step, said.progress.loss) == (7, 1.5)


@pytest.mark.parametrize(
    "line",
    [
        "epoch 3 of 10",
        "12/13 tests passed",
        "100% |",
        "step: many loss: few",
        "iter one",
        "|12/13|",
        "{'a': 1}",
        "50%|",
    ],
)
def test_what_is_no_progress_is_none(line: str) -> None:
    assert read([line], 1.0).progress is None


TRACE = [
    "Traceback (most recent call last):",
    '  File "train.py", line 10, in <module>',
    "    main()",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
]


def test_the_first_error_after_the_last_step_counts() -> None:
    ranks = [f"[rank{r}]: {line}" for r in (1, 0) for line in [*TRACE[:-1], f"RuntimeError: of rank {r}"]]
    said = read(["iter 5: loss 1.0, time 1.0ms, mfu 0%", *ranks], 1.0)
    assert said.error == "RuntimeError: of rank 1"
    assert read([*TRACE, "iter 6: loss 1.0, time 1.0ms, mfu 0%"], 1.0).error == ""
    stop = [*TRACE[:-1], "KeyboardInterrupt"]
    assert read(stop, 1.0).interrupted
    assert read(stop, 1.0).error == ""


def sight(said: Said, **changes: object) -> Sight:
    values: dict[str, object] = {"now": 1000.0, "alive": True, "output_t": 999.0, "started": 10.0, **changes}
    return Sight(said, **values)  # type: ignore[arg-type]


STEPS = read(["iter 5: loss 1.0, time 1.0ms, mfu 0%"], 999.0)
BAD = read(["iter 5: loss 1.0, time 1.0ms, mfu 0%", *TRACE], 999.0)
LAST = read(["100%|##########| 10/10 [00:10<00:00, 1.0it/s]"], 999.0)
NONE = Said()


@pytest.mark.parametrize(
    ("seen", "state", "word"),
    [
        (sight(STEPS), State.STEPPING, "step 5"),
        (sight(NONE), State.LOADING, "no step"),
        (sight(STEPS, output_t=600.0), State.HUNG, "400 s"),
        (sight(NONE, output_t=600.0), State.LOADING, ""),
        (sight(STEPS, output_t=None), State.STEPPING, ""),
        (sight(BAD), State.STEPPING, ""),  # it lives: a traceback that was caught is none of our business
        (sight(BAD, alive=False), State.CRASHED, "OutOfMemoryError"),
        (sight(STEPS, alive=False), State.UNKNOWN, "nothing in the pane tells"),
        (sight(LAST, alive=False), State.FINISHED, "10 of 10"),
        (sight(STEPS, alive=False, pane_dead=True, pane_status=9), State.CRASHED, "exit code 9"),
        (sight(STEPS, alive=False, pane_dead=True, pane_status=0), State.FINISHED, ""),
        (sight(STEPS, alive=False, pane_dead=True), State.UNKNOWN, ""),
        (sight(STEPS, alive=False, stop_requested=True), State.STOPPED, ""),
        (sight(NONE, alive=None), State.UNKNOWN, "only a shell"),
        (sight(NONE, alive=None, session=False), State.UNKNOWN, "gone"),
        (sight(STEPS, session=False), State.STEPPING, ""),
        (sight(STEPS, alive=False, session=False), State.UNKNOWN, ""),
    ],
)
def test_states(seen: Sight, state: State, word: str) -> None:
    found, detail = judge(seen, Limits())
    assert found is state
    assert word in detail


def test_warnings() -> None:
    assert "session is gone" in warnings(sight(STEPS, session=False))[0]
    assert "traceback" in warnings(sight(BAD))[0]
    assert "does not answer" in warnings(sight(STEPS, session=None))[0]
    assert warnings(sight(STEPS)) == ()
