"""Which of several errors is the cause (laws of supervision, 3; the catalogue's cascade order)."""
# ruff: noqa: E501 - lines of logs are as long as they are

from __future__ import annotations

from collections.abc import Callable

from dflash_ops.contracts.diagnosis import Diagnosis
from dflash_ops.triage import Source, Triage

Say = Callable[..., Diagnosis]

WATCHDOG = (
    "[rank{r}]:[E1129 16:40:{s:02d}.1234 ProcessGroupNCCL.cpp:632] [Rank {r}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={n}, OpType={op}, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600034 milliseconds before timing out.\n"
)
SUMMARY = """\
E1129 16:40:31.100000 900 torch/distributed/elastic/multiprocessing/api.py:1003] failed (exitcode: 1) local_rank: 2 (pid: 912) of binary: /opt/venv/bin/python
Traceback (most recent call last):
  File "/opt/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
  File "/opt/venv/lib/python3.12/site-packages/torch/distributed/launcher/api.py", line 269, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-29_16:40:30
  host      : box
  rank      : 5 (local_rank: 5)
  exitcode  : -9 (pid: 915)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 915
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_16:40:29
  host      : box
  rank      : 2 (local_rank: 2)
  exitcode  : 1 (pid: 912)
  error_file: /tmp/elastic/attempt_0/2/error.json
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
OOM = """\
[rank2]: Traceback (most recent call last):
[rank2]:   File "/root/work/train.py", line 88, in <module>
[rank2]:     main()
[rank2]:   File "/root/work/train.py", line 61, in main
[rank2]:     loss.backward()
[rank2]:   File "/opt/venv/lib/python3.12/site-packages/torch/_tensor.py", line 648, in backward
[rank2]:     torch.autograd.backward(
[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has a total capacity of 79.11 GiB of which 1.10 GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the allocated memory 76.00 GiB is allocated by PyTorch, and 400.00 MiB is reserved by PyTorch but unallocated.
"""


def test_a_ranks_own_error_wins_over_timeouts_that_stand_before_it_and_the_launchers_report(say: Say) -> None:
    timeouts = WATCHDOG.format(r=0, s=20, n=9, op="ALLREDUCE") + WATCHDOG.format(r=1, s=20, n=9, op="ALLREDUCE")
    d = say(timeouts + OOM + SUMMARY)
    assert (d.kind, d.root_rank, d.user_frame) == ("cuda_oom", 2, "/root/work/train.py:61")
    assert d.root_exception is not None and d.root_exception.startswith("torch.OutOfMemoryError: CUDA out of memory.")
    assert "nccl_watchdog_timeout" in d.also


def test_timeouts_alone_are_the_diagnosis_and_name_the_first_rank(say: Say) -> None:
    d = say("".join(WATCHDOG.format(r=r, s=20 + r, n=9, op="ALLREDUCE") for r in (4, 1, 2)))
    assert (d.kind, d.root_rank) == ("nccl_watchdog_timeout", 4)


def test_ranks_in_different_collectives_have_diverged(say: Say) -> None:
    d = say(WATCHDOG.format(r=0, s=20, n=9, op="ALLREDUCE") + WATCHDOG.format(r=1, s=20, n=10, op="BROADCAST"))
    assert d.kind == "nccl_collective_mismatch"
    assert any("rank 0: ALLREDUCE #9, rank 1: BROADCAST #10" in reason for reason in d.why)


def test_one_rank_with_several_groups_cannot_be_compared(say: Say) -> None:
    text = WATCHDOG.format(r=0, s=20, n=9, op="ALLREDUCE") + WATCHDOG.format(r=0, s=20, n=12, op="ALLREDUCE")
    assert say(text + WATCHDOG.format(r=7, s=20, n=5, op="ALLREDUCE")).kind == "nccl_watchdog_timeout"


def test_a_launchers_report_alone_names_no_cause_but_what_to_fetch(say: Say) -> None:
    d = say(SUMMARY)
    assert (d.kind, d.root_exception, d.root_rank) == ("root_cause_not_shown", None, 2)
    assert any("/tmp/elastic/attempt_0/2/error.json" in place for place in d.fetch)


def test_of_the_launchers_report_the_first_failure_counts_not_the_others(say: Say) -> None:
    """Rank 5's SIGKILL is the teardown; only where the first failure was killed is that the cause."""
    killed = SUMMARY.replace("(exitcode: 1)", "(exitcode: -9)").replace("exitcode  : 1 ", "exitcode  : -9 ")
    assert say(killed).kind == "host_oom_sigkill"
    assert say(killed).root_rank == 2


def test_the_kernels_word_about_our_process_comes_first(triage: Triage) -> None:
    kernel = b"[Sun Nov 29 16:40:28 2026] Out of memory: Killed process 915 (python) total-vm:54140508kB, anon-rss:54032532kB\n"
    log = WATCHDOG.format(r=0, s=20, n=9, op="ALLREDUCE") + SUMMARY
    d = triage.diagnose([Source("log", log.encode()), Source("dmesg", kernel, "kernel")])
    assert d.kind == "host_oom_kernel_log"
    assert d.evidence[0].source == "dmesg"


def test_error_json_of_the_earliest_worker_is_read_before_the_log(triage: Triage) -> None:
    def report(message: str, stamp: int) -> bytes:
        stack = (
            f'Traceback (most recent call last):\\n  File \\"/root/work/w.py\\", line 7, in step\\n    go()\\n{message}'
        )
        return f'{{"message": {{"message": "{message}", "extraInfo": {{"py_callstack": "{stack}", "timestamp": "{stamp}"}}}}}}'.encode()

    late = Source(
        "errors/target1/error.json", report("OSError: [Errno 28] No space left on device", 1764441090), "error_json"
    )
    early = Source(
        "errors/drafter0/error.json",
        report("RuntimeError: CUDA error: device-side assert triggered", 1764441072),
        "error_json",
    )
    d = triage.diagnose([late, early])
    assert (d.kind, d.user_frame) == ("device_side_assert", "/root/work/w.py:7")
    assert d.evidence[0].source == "errors/drafter0/error.json"


def test_progress_of_the_same_worker_outlives_an_error(say: Say) -> None:
    caught = "step 10/99 loss 2.31\nRuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    steps = "".join(f"step {n}/99 loss 2.30\n" for n in range(11, 17))
    d = say(caught + steps)
    assert d.kind == "healthy"
    assert any("progress afterwards" in reason for reason in d.why)
    assert say(caught).kind == "cuda_oom"


def test_progress_of_other_ranks_outlives_nothing(say: Say) -> None:
    steps = "".join(f"[rank5]: step {n}/99 loss 2.30\n" for n in range(11, 30))
    assert say(OOM + steps).kind == "cuda_oom"


def test_an_old_bar_drawn_again_is_no_progress(say: Say) -> None:
    bar = "train:  12%|█▏        | 120/1000 [00:10<01:30,  9.90it/s]\n"
    assert say(bar + OOM.replace("[rank2]: ", "") + bar).kind == "cuda_oom"


def test_a_step_or_two_of_peers_after_a_crash_do_not_heal_it(say: Say) -> None:
    trace = OOM.replace("[rank2]: ", "")
    assert say("step 40 loss 2.1\n" + trace + "step 41 loss 2.1\n").kind == "cuda_oom"


def test_a_caught_error_long_before_the_crash_is_not_its_cause(say: Say) -> None:
    early = "step 10 loss 2.3\nOSError: [Errno 116] Stale file handle\n" + "".join(
        f"step {n} loss 2.2\n" for n in range(11, 60)
    )
    assert say(early + OOM).kind == "cuda_oom"


def test_only_the_last_attempt_counts(say: Say) -> None:
    marker = "==== dflash-ops attempt {} release 0123456789ab 2026-11-29T16:24:18Z ====\n"
    first = marker.format(1) + OOM + SUMMARY
    second = marker.format(2) + "dflash step=1/500 epoch=0.1 loss=9.1 block_tok_s=13000\n"
    d = say(first + second)
    assert d.kind == "healthy"
    assert d.facts["attempt"]["attempt"] == "2"
    assert say(first + marker.format(2) + "OSError: [Errno 28] No space left on device\n").kind == "disk_full"


def test_advice_and_conditional_wording_never_anchor(say: Say) -> None:
    advice = """\
Note: if you see CUDA out of memory. Tried to allocate errors, use a smaller batch.
There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage.
Hint: this could be caused by OSError: [Errno 24] Too many open files
"""
    assert say(advice).kind == "healthy"


def test_model_text_that_says_traceback_is_no_crash(say: Say) -> None:
    sample = """\
step 10 loss 2.3
sample 3: Here is the error you get:
Traceback (most recent call last):
  File "main.py", line 3, in <module>
    print(1/0)
ZeroDivisionError: division by zero
"""
    assert say(sample).kind == "healthy"
    assert say(sample + "step 11 loss 2.3\n").kind == "healthy"
    quoted = (
        'step 10 loss 2.3\n[sample] completion: say "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"\n'
    )
    assert say(quoted).kind == "healthy"
    crash = sample.replace('File "main.py"', 'File "/opt/venv/lib/python3.12/site-packages/x.py"')
    assert say(crash).kind == "unrecognised_error", "a stack through installed packages is no model's text"


def test_fenced_text_is_a_models_only_where_training_went_on(say: Say) -> None:
    fenced = '```\nTraceback (most recent call last):\n  File "a.py", line 1, in f\nOSError: [Errno 28] No space left on device\n```\n'
    assert say("step 1 loss 2.3\nHere is an error:\n" + fenced + "step 2 loss 2.3\n").kind == "healthy"
    assert say(fenced).kind == "disk_full", "a report that was copied with its fence"


def test_ignored_exceptions_are_no_crash(say: Say) -> None:
    ignored = """\
Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f62eb6ed630>
Traceback (most recent call last):
  File "/opt/venv/lib/python3.10/site-packages/torch/utils/data/dataloader.py", line 1466, in __del__
    self._shutdown_workers()
AssertionError: can only test a child process
"""
    assert say(ignored).kind == "healthy"
    assert say("\n".join(ignored.splitlines()[1:])).kind == "healthy", "what __del__ raises is ignored by Python itself"


def test_a_hook_that_failed_only_masks_the_real_error(say: Say) -> None:
    masked = """\
Error in sys.excepthook:
Traceback (most recent call last):
  File "/opt/venv/lib/python3.12/site-packages/tracker/hooks.py", line 12, in hook
    self.send()
PermissionError: [Errno 13] Permission denied: '/run/tracker'

Original exception was:
Traceback (most recent call last):
  File "/root/work/train.py", line 3, in <module>
    go()
"""
    known = say(masked + "OSError: [Errno 28] No space left on device\n")
    assert (known.kind, known.user_frame) == ("disk_full", "/root/work/train.py:3")
    unknown = say(masked + "PlanError: no\n")
    assert (unknown.kind, unknown.root_exception) == ("tracker_hook_masks_error", "PlanError: no")


def test_output_flushed_behind_the_error_that_ended_it_heals_nothing(say: Say) -> None:
    whole = "".join(f"step {n} loss 2.3\n" for n in range(40))
    assert say(OOM.replace("[rank2]: ", "") + whole).kind == "cuda_oom"


def test_the_rank_that_the_launcher_names_failed_whatever_its_peers_printed_later(say: Say) -> None:
    steps = "".join(f"[rank2]: step {n} loss 2.3\n" for n in range(100, 140))
    d = say("[rank2]: step 99 loss 2.3\n" + OOM + steps + SUMMARY)
    assert (d.kind, d.root_rank) == ("cuda_oom", 2)
    other = SUMMARY.replace("rank      : 2 (local_rank: 2)", "rank      : 3 (local_rank: 3)")
    assert say("[rank2]: step 99 loss 2.3\n" + OOM + steps + other).kind == "root_cause_not_shown"


def test_a_group_with_different_leaves_is_said_as_such(say: Say) -> None:
    group = """\
  + Exception Group Traceback (most recent call last):
  |   File "/root/work/run.py", line 40, in <module>
  |     asyncio.run(main())
  | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/root/work/run.py", line 20, in feed
    |     write()
    | OSError: [Errno 28] No space left on device
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "/root/work/run.py", line 25, in look
    |     read()
    | OSError: [Errno 24] Too many open files
    +------------------------------------
"""
    d = say(group)
    assert d.kind == "exception_group" and {"disk_full", "too_many_open_files"} <= set(d.also)
    same = say(group.replace("[Errno 24] Too many open files", "[Errno 28] No space left on device"))
    assert (same.kind, same.root_exception) == ("disk_full", "OSError: [Errno 28] No space left on device")


def test_what_python_prints_and_ignores_is_no_crash(say: Say) -> None:
    logging = """\
--- Logging error ---
Traceback (most recent call last):
  File "/usr/lib/python3.11/logging/__init__.py", line 1110, in emit
    msg = self.format(record)
TypeError: not all arguments converted during string formatting
Call stack:
  File "/root/work/train.py", line 9, in <module>
    main()
  File "/root/work/train.py", line 5, in main
    log.info("a", 1)
Message: 'a'
Arguments: (1,)
"""
    tracker = """\
Traceback (most recent call last):
  File "/usr/lib/python3.11/multiprocessing/resource_tracker.py", line 239, in main
    cache[rtype].remove(name)
KeyError: '/mp-2k3j'
"""
    for text in (logging, tracker):
        assert say(text).kind == "healthy"


def test_a_persons_ctrl_c_before_every_error_decides_and_after_one_does_not(say: Say) -> None:
    ctrl_c = """\
^CTraceback (most recent call last):
  File "/root/work/train.py", line 61, in main
    time.sleep(1)
KeyboardInterrupt
"""
    broken = "OSError: [Errno 5] Input/output error\n"
    assert say(ctrl_c + broken).kind == "keyboard_interrupt"
    assert say(OOM + ctrl_c).kind == "cuda_oom"


def test_an_error_that_no_playbook_names_is_said_to_be_unknown(say: Say) -> None:
    text = """\
Traceback (most recent call last):
  File "/root/work/train.py", line 12, in <module>
    main()
  File "/root/work/plan.py", line 30, in main
    check(x)
PlanError: the plan of epoch 3 has 12 batches, the launcher wants 13
"""
    d = say(text + SUMMARY)
    assert d.kind == "unrecognised_error"
    assert d.root_exception == "PlanError: the plan of epoch 3 has 12 batches, the launcher wants 13"
    assert d.user_frame == "/root/work/plan.py:30"
    assert not d.auto_safe


def test_an_unknown_error_before_a_cascade_is_nearer_to_the_cause(say: Say) -> None:
    own = '[rank3]: Traceback (most recent call last):\n[rank3]:   File "/root/w.py", line 3, in f\n[rank3]:     g()\n[rank3]: PlanError: no\n'
    cascade = WATCHDOG.format(r=0, s=20, n=9, op="ALLREDUCE")
    assert say(own + cascade).kind == "unrecognised_error"
    assert say(own + cascade).root_rank == 3
    assert say(cascade + own).kind == "nccl_watchdog_timeout"


def test_an_exit_record_speaks_where_the_texts_are_silent(triage: Triage) -> None:
    def with_exit(log: str, exit_json: str) -> Diagnosis:
        return triage.diagnose([Source("log", log.encode()), Source("exit.json", exit_json.encode(), "exit_json")])

    quiet = "dflash step=1/500 loss=9.1\n"
    killed = with_exit(quiet, '{"rc": null, "signal": "SIGKILL", "requested": null}')
    assert (killed.kind, killed.root_exception) == ("host_oom_sigkill", None)
    assert with_exit(quiet, '{"rc": 139, "signal": null, "requested": null}').kind == "segfault"
    assert with_exit(quiet, '{"rc": 0, "signal": null, "requested": null}').kind == "healthy"
    assert with_exit(OOM, '{"rc": null, "signal": "SIGKILL", "requested": null}').kind == "cuda_oom"
    stopped = with_exit(OOM, '{"rc": null, "signal": "SIGTERM", "requested": "stop"}')
    assert stopped.kind == "healthy", "a stop that was asked for is never a crash"
