"""The run this tool was born from: what its pane and its log say."""
# ruff: noqa: E501 - lines of logs are as long as they are

from __future__ import annotations

from collections.abc import Callable

from dflash_ops.contracts.diagnosis import Diagnosis

Say = Callable[..., Diagnosis]

# the pane as it was seen: 80 columns, the last 15 lines of the capture
PANE = """\
e 1790, in _call_impl
    return forward_call(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/root/dflash_model.py", line 760, in forward
    noise_embedding = layer(
                      ^^^^^^
  File "/root/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", lin
e 1779, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/root/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", lin
e 179
"""

LOG = """\
torch 2.13.0+cu128, python 3.12.3, 8 devices: 6 targets, 2 drafters
step 4100/98000 loss 2.3312 13.5 Ktok/s
Exception in thread Thread-9 (drafter_loop):
Traceback (most recent call last):
  File "/usr/lib/python3.12/threading.py", line 1075, in _bootstrap_inner
    self.run()
  File "/usr/lib/python3.12/threading.py", line 1012, in run
    self._target(*self._args, **self._kwargs)
  File "/root/train_dflash.py", line 402, in drafter_loop
    loss = drafter(batch)
  File "/root/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1790, in _call_impl
    return forward_call(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/root/dflash_model.py", line 760, in forward
    noise_embedding = layer(
                      ^^^^^^
  File "/root/venv/lib/python3.12/site-packages/torch/_dynamo/eval_frame.py", line 1210, in compile_wrapper
    raise RuntimeError(
RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function. This is not supported at the moment.
"""


def test_the_pane_alone_holds_no_cause_and_says_what_to_fetch(say: Say) -> None:
    d = say(PANE, "pane")
    assert (d.kind, d.root_exception, d.user_frame) == ("root_cause_not_shown", None, "/root/dflash_model.py:760")
    assert any("attempt's whole log" in place for place in d.fetch)
    assert not d.auto_safe


def test_with_the_log_the_cause_is_named_and_why(say: Say) -> None:
    d = say(LOG)
    assert (d.kind, d.user_frame) == ("fx_dynamo_conflict", "/root/dflash_model.py:760")
    assert d.root_exception is not None and "symbolically trace a dynamo-optimized function" in d.root_exception
    assert d.facts["fx_cause"] == "threads"
    assert any("2.13" in reason and "threads" in reason for reason in d.why)


def test_the_ladder_follows_the_torch_version(say: Say) -> None:
    threads, nesting = say(LOG), say(LOG.replace("torch 2.13.0+cu128", "torch 2.14.1+cu128"))
    assert nesting.facts["fx_cause"] == "nesting", (
        "from 2.14 on the flag is a thread's own: threads cannot be the cause"
    )
    assert threads.remedies[0].action == "workers_processes"
    assert nesting.remedies[0].action == "loss_reentrant"
    actions = [r.action for r in nesting.remedies]
    assert "workers_processes" not in actions and "compile_lock" not in actions
    for remedy in (*threads.remedies, *nesting.remedies):
        assert "error_on_nested_fx_trace" not in remedy.command, "running uncompiled is what led to the dense request"


def dense(allocation: str) -> str:
    return f"""\
flex_attention over [1, 32, 32768, 81920]
step 900/98000 loss 2.21
Traceback (most recent call last):
  File "/root/dflash_model.py", line 512, in forward
    out = flex_attention(q, k, v, block_mask=mask)
  File "/root/venv/lib/python3.12/site-packages/torch/_higher_order_ops/flex_attention.py", line 240, in math_attention
    scores, _ = _math_attention_inner(query, key, value)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {allocation}. GPU 6 has a total capacity of 139.80 GiB of which 71.02 GiB is free. Including non-PyTorch memory, this process has 68.70 GiB memory in use. Of the allocated memory 66.10 GiB is allocated by PyTorch, and 1.20 GiB is reserved by PyTorch but unallocated.
"""


def test_a_dense_request_asks_for_compilation_back_not_for_a_smaller_batch(say: Say) -> None:
    for allocation in ("320.00 GiB", "328.00 GiB", "328.00 GB", "344.00 GB", "80.00 GiB", "160.00 GiB"):
        d = say(dense(allocation))
        assert d.kind == "cuda_oom_dense_attention", allocation
        assert "compil" in d.remedies[0].text.lower()
        assert not any(r.action == "smaller_anchors" for r in d.remedies)


def test_a_small_request_is_an_ordinary_one(say: Say) -> None:
    assert say(dense("2.00 GiB")).kind == "cuda_oom"
