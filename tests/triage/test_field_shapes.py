"""Shapes in which logs reach us from the field: other launchers' prefixes, notebooks, containers, wraps of a few lines."""
# ruff: noqa: E501 - lines of logs are as long as they are

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from dflash_ops.contracts.diagnosis import Diagnosis

Say = Callable[..., Diagnosis]

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 640.00 MiB. GPU 2 has a total capacity of 79.11 GiB of which 201.00 MiB is free. "
    "Including non-PyTorch memory, this process has 78.90 GiB memory in use. Of the allocated memory 78.02 GiB is allocated by PyTorch, and 9.00 MiB is reserved by PyTorch but unallocated."
)
TRACE = (
    "Traceback (most recent call last):",
    '  File "/srv/job/run.py", line 61, in main',
    "    y = net(x)",
    '  File "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1775, in _wrapped_call_impl',
    "    return self._call_impl(*args, **kwargs)",
    OOM,
)


def check(d: Diagnosis, rank: int | None = None) -> None:
    assert (d.kind, d.root_rank, d.user_frame) == ("cuda_oom", rank, "/srv/job/run.py:61")
    assert d.root_exception is not None and OOM[:80] in d.root_exception


def test_hosts_before_ranks(say: Say) -> None:
    check(say("\n".join(f"node-b: [rank9]: {line}" for line in TRACE)), 9)


def test_compose_before_ranks(say: Say) -> None:
    check(say("\n".join(f"trainer-1  | [rank2]: {line}" for line in TRACE)), 2)


def test_dockers_json_before_ranks(say: Say) -> None:
    check(say("\n".join(json.dumps({"log": f"[rank2]: {line}\n", "stream": "stderr"}) for line in TRACE)), 2)


def test_deepspeeds_launcher_says_whose_process_failed(say: Say) -> None:
    last = "[2026-10-01 10:00:02,755] [ERROR] [launch.py:325:sigkill_handler] ['/opt/venv/bin/python', '-u', 'run.py', '--local_rank=5'] exits with return code = 1"
    check(say("\n".join([*TRACE, last])), 5)


def test_spawn_says_whose_process_failed(say: Say) -> None:
    head = "torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 3 terminated with the following error:\n"
    check(say(head + "\n".join(TRACE)), 3)


NOTEBOOK = """\
---------------------------------------------------------------------------
RuntimeError                              Traceback (most recent call last)
Cell In[14], line 2
      1 net = build()
----> 2 fit(net, loader)

File ~/work/fit.py:33, in fit(net, loader)
     31 for x, y in loader:
     32     p = net(x)
---> 33     loss = crit(p @ w, y)
     34     loss.backward()

RuntimeError: mat1 and mat2 shapes cannot be multiplied (16x300 and 512x10)
"""


def test_a_notebooks_traceback_is_read_as_pythons(say: Say) -> None:
    d = say(NOTEBOOK)
    assert (d.kind, d.user_frame) == ("shape_mismatch", "~/work/fit.py:33")
    assert d.root_exception == "RuntimeError: mat1 and mat2 shapes cannot be multiplied (16x300 and 512x10)"


def test_an_old_notebooks_frames_have_their_number_at_the_arrow(say: Say) -> None:
    old = NOTEBOOK.replace("Cell In[14], line 2", "<ipython-input-14-9f> in <module>").replace(
        "File ~/work/fit.py:33, in fit(net, loader)", "~/work/fit.py in fit(net, loader)"
    )
    assert say(old).user_frame == "~/work/fit.py:33"


def test_source_in_a_notebook_is_no_error(say: Say) -> None:
    text = NOTEBOOK.replace("crit(p @ w, y)", 'crit(p)  # RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")')
    assert say(text).kind == "shape_mismatch"


def test_a_scalers_everyday_word_does_not_make_the_next_error_a_survived_one(say: Say) -> None:
    d = say(
        "[2026-10-01 10:00:02,755] [INFO] [loss_scaler.py:183:update_scale] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 1, reducing to 1\n"
        + "\n".join(TRACE)
    )
    assert d.kind == "cuda_oom"


def test_a_smaller_batch_after_the_error_is_a_retry(say: Say) -> None:
    steps = "".join(f"step {n}/900 loss 2.1\n" for n in range(40, 44))
    assert say(f"step 39/900 loss 2.1\n{OOM}\nreducing the batch size to 4\n{steps}").kind == "healthy"
    assert say(f"step 39/900 loss 2.1\ntrying batch size 8\n{OOM}\n").kind == "cuda_oom"


def test_what_somebody_asked_a_server_is_no_error_of_ours(say: Say) -> None:
    line = "INFO 10-01 10:00:02 [logger.py:39] Received request 7: prompt: 'what does CUDA out of memory. Tried to allocate 2.00 GiB mean?'"
    assert say(line).kind == "healthy"


def test_a_collective_that_timed_out_comes_before_what_its_take_down_shows(say: Say) -> None:
    d = say(
        "  what():  [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(OpType=BROADCAST, Timeout(ms)=1800000) ran for 1800771 milliseconds before timing out.\n"
        'Traceback (most recent call last):\n  File "/srv/job/run.py", line 61, in main\n    loss.backward()\n'
        "RuntimeError: NCCL error in: /pytorch/torch/lib/c10d/ProcessGroupNCCL.cpp:911, unhandled system error, NCCL version 21.0.3\n"
    )
    assert (d.kind, d.root_rank) == ("nccl_watchdog_timeout", 3)


def test_a_line_that_begins_something_new_is_not_joined_to_a_long_one(say: Say) -> None:
    d = say("ModuleNotFoundError: No module named 'flashlight_ops'\nInstall it and try again.")
    assert d.root_exception == "ModuleNotFoundError: No module named 'flashlight_ops'"
    nan = "Epoch: [3]  [ 340/1251]  eta: 0:12:11  lr: 0.000150  loss: 0.7211 (0.7322)  time: 0.8031  max mem: 9721\nLoss is nan, stopping training\n"
    assert say(nan).kind == "nan_loss"


def test_a_wrapped_dict_of_the_trainer_is_whole_again(say: Say) -> None:
    rows = [
        f"2026-10-01T10:00:0{n}.123456Z {{'loss': {v}, 'grad_norm': {v}, 'learning_rate': 9.2e-06, 'epoch': 0.3{n}}}"
        for n, v in enumerate(("1.101", "1.102", "nan", "nan"))
    ]
    assert say("\n".join(row[at : at + 80] for row in rows for at in (0, 80))).kind == "nan_loss"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("host_oom_sigkill", "mpirun noticed that process rank 1 with PID 0 on node b exited on signal 9 (Killed)."),
        ("host_oom_sigkill", "[2]  - 90211 killed     python run.py"),
        ("segfault", "mpirun noticed that process rank 1 with PID 0 on node b exited on signal 11 (Segmentation fault)."),
        ("dataloader_shm_bus_error", "job.sh: line 12: 90211 Bus error               (core dumped) python run.py"),
        ("port_in_use", "ConnectionError: Tried to launch distributed communication on port `29511`, but another process is utilizing it."),
        ("dtype_mismatch", "ValueError: Must flatten tensors with uniform dtype but got torch.float16 and torch.float32"),
        ("nan_loss", "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0"),
        ("inductor_toolchain_error", "RuntimeError: Error building extension 'cpu_adam'"),
        ("chat_template_error", "jinja2.exceptions.TemplateSyntaxError: expected token 'end of print statement', got 'x'"),
        ("gpu_fell_off_bus", "NVRM: The NVIDIA GPU 0000:18:00.0 (PCI ID: 10de:2330) installed in this system has fallen off the bus and is not responding to commands."),
        ("root_cause_not_shown", "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"),
        ("dcp_checkpoint_missing_key", 'Traceback (most recent call last): (RANK 1)\n  File "/opt/venv/lib/python3.12/site-packages/torch/distributed/checkpoint/default_planner.py", line 131, in create_default_local_load_plan\n    md = metadata.state_dict_metadata[fqn]\nKeyError: \'head.bias\''),
    ],
)  # fmt: skip
def test_more_words_of_known_kinds(say: Say, kind: str, text: str) -> None:
    assert say(text).kind == kind
