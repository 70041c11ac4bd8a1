"""Which worker stands elsewhere, out of the text of a stack dump."""

from __future__ import annotations

from dflash_ops.supervise.stacks import odd, parse

WAIT = """Thread 0x00007f (idle): "MainThread"
    wait (threading.py:320)
    get (queue.py:171)
    next_batch (trainer/drafter_worker.py:{line})
    main (trainer/worker_main.py:50)
"""
SAVE = """Thread 0x00007f (active): "MainThread"
    write (torch/serialization.py:810)
    save (trainer/checkpoint.py:90)
    main (trainer/worker_main.py:50)
Thread 0x00008f (idle): "pin"
    wait (threading.py:320)
    get (queue.py:171)
"""
FAULT = """Thread 0x00007f11 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/usr/lib/python3.11/threading.py", line 973 in _bootstrap

Current thread 0x00007f22 (most recent call first):
  File "/srv/rel/trainer/ring.py", line {line} in take
  File "/srv/rel/trainer/target_worker.py", line 9 in main
"""


def dump(**stacks: str) -> str:
    return "".join(
        f"==== {name} pid {400 + i} state S (sleeping) by py-spy ====\n{text}\n"
        for i, (name, text) in enumerate(stacks.items())
    )


def test_the_one_that_differs_is_named_whatever_its_line_numbers() -> None:
    text = dump(
        launcher=WAIT.format(line=1),
        drafter0=WAIT.format(line=70),
        drafter1=SAVE,
        drafter2=WAIT.format(line=71),
        target0=FAULT.format(line=3),
    )
    found = odd(text)
    assert found is not None
    assert (found.worker, found.where) == ("drafter1", "write (serialization.py)")
    assert found.others == "wait (threading.py)"
    assert "drafter1 stands in write" in str(found)


def test_faulthandlers_main_thread_is_the_current_one() -> None:
    worker = parse(dump(target0=FAULT.format(line=3)))[0]
    assert worker.frames == ("take (ring.py)", "main (target_worker.py)")


def test_a_stopped_process_is_the_odd_one_though_it_has_no_stack() -> None:
    text = dump(drafter0=WAIT.format(line=1), drafter2=WAIT.format(line=1)) + (
        "==== drafter1 pid 9 state T (stopped) by kernel ====\nit is stopped (SIGSTOP or a debugger)\n"
    )
    found = odd(text)
    assert found is not None
    assert (found.worker, found.where) == ("drafter1", "stopped")


def test_no_majority_no_name() -> None:
    assert odd("") is None
    assert odd(dump(drafter0=SAVE, drafter1=WAIT.format(line=1))) is None
    assert odd(dump(drafter0=WAIT.format(line=1), drafter1=WAIT.format(line=2), drafter2=WAIT.format(line=3))) is None
    assert odd(dump(d0=SAVE, d1=WAIT.format(line=1), d2=FAULT.format(line=1))) is None
    assert odd("garbage\n==== ???\n\x00") is None
