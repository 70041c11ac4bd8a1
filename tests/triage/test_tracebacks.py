"""Tracebacks of Python 3.8 to 3.14, whole, chained, nested, interleaved and cut."""
# ruff: noqa: E501 - lines of logs are as long as they are

from __future__ import annotations

from dflash_ops.triage.case import Text
from dflash_ops.triage.match import Matcher
from dflash_ops.triage.playbook import compile_playbooks
from dflash_ops.triage.read import read
from dflash_ops.triage.types import Record, Source

_MATCHER = Matcher(compile_playbooks([]))


def parse(text: str) -> Text:
    return read(Source("a", text.lstrip("\n").encode()), 0, _MATCHER, _MATCHER.needles(), None)


def tracebacks(text: str) -> list[Record]:
    return [record for record in parse(text).records if record.form != "loose"]


def one(text: str) -> Record:
    found = tracebacks(text)
    assert len(found) == 1, [(r.form, r.first, r.last) for r in found]
    return found[0]


def test_3_8_without_carets_and_3_13_with_carets_and_long_snippets_read_the_same() -> None:
    old = one("""
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    main()
  File "train.py", line 5, in main
    raise ValueError("no")
ValueError: no
""")
    new = one("""
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    main()
    ~~~~^^
  File "train.py", line 5, in main
    raise ValueError(
    ...<2 lines>...
    )
ValueError: no
""")
    for record in (old, new):
        segment = record.segments[-1]
        assert (segment.exception, segment.message) == ("ValueError", "no")
        assert [str(f) for f in segment.frames] == ["train.py:9", "train.py:5"]
        assert not record.cut


def test_repeated_lines_notes_and_messages_of_many_lines_belong_to_the_error() -> None:
    record = one("""
Traceback (most recent call last):
  File "a.py", line 3, in f
    f()
  [Previous line repeated 994 more times]
RecursionError: maximum recursion depth exceeded
while walking the tree
  of the plan
noted: by the caller
""")
    assert record.segments[0].exception == "RecursionError"
    assert "noted: by the caller" in record.text


def test_chains_keep_their_order_and_their_relation() -> None:
    record = one("""
Traceback (most recent call last):
  File "a.py", line 1, in f
    x["k"]
KeyError: 'k'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in g
    raise RuntimeError("second")
RuntimeError: second

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 9, in h
    raise ValueError("third") from e
ValueError: third
""")
    assert [s.exception for s in record.segments] == ["KeyError", "RuntimeError", "ValueError"]
    assert [s.relation for s in record.segments] == ["", "context", "cause"]


def test_the_traceback_of_a_worker_inside_a_message_is_nested() -> None:
    record = one("""
Traceback (most recent call last):
  File "train.py", line 4, in <module>
    for batch in loader:
  File "/opt/venv/lib/python3.12/site-packages/torch/utils/data/dataloader.py", line 701, in __next__
    data = self._next_data()
KeyError: Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/opt/venv/lib/python3.12/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
  File "/root/work/data.py", line 77, in __getitem__
    return row["tokens"]
KeyError: 'tokens'
""")
    assert [s.relation for s in record.segments] == ["", "inner"]
    assert record.segments[1].message == "'tokens'"


def test_remote_tracebacks_of_process_pools() -> None:
    record = one('''
concurrent.futures.process._RemoteTraceback:
"""
Traceback (most recent call last):
  File "/usr/lib/python3.11/concurrent/futures/process.py", line 256, in _process_worker
    r = call_item.fn(*call_item.args, **call_item.kwargs)
  File "/root/work/prep.py", line 12, in tokenize
    raise OSError(28, "No space left on device")
OSError: [Errno 28] No space left on device
"""

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/root/work/prep.py", line 30, in <module>
    list(pool.map(tokenize, files))
OSError: [Errno 28] No space left on device
''')
    assert any(str(f) == "/root/work/prep.py:12" for s in record.segments for f in s.frames)


def test_a_thread_is_named_and_a_hook_that_failed_is_told_apart() -> None:
    thread = one("""
Exception in thread Thread-7 (_pin_memory_loop):
Traceback (most recent call last):
  File "/usr/lib/python3.12/threading.py", line 1075, in _bootstrap_inner
    self.run()
RuntimeError: received 0 items of ancdata
""")
    assert thread.title.startswith("Exception in thread Thread-7")
    hook, real = tracebacks("""
Error in sys.excepthook:
Traceback (most recent call last):
  File "/opt/venv/lib/python3.12/site-packages/tracker/hooks.py", line 12, in hook
    self.send()
BrokenPipeError: [Errno 32] Broken pipe

Original exception was:
Traceback (most recent call last):
  File "/root/work/train.py", line 3, in <module>
    go()
ValueError: real
""")
    assert "sys.excepthook" in hook.title
    assert real.title == "Original exception was:"


def test_syntax_errors_have_a_place_but_no_function() -> None:
    record = one("""
  File "/root/work/train.py", line 84
    print(f'{x')
          ^
SyntaxError: f-string: expecting '}'
""")
    assert (record.segments[0].exception, str(record.segments[0].frames[0])) == (
        "SyntaxError",
        "/root/work/train.py:84",
    )


def test_exception_groups_give_their_leaves() -> None:
    record = one("""
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
    |   File "/root/work/run.py", line 25, in train
    |     step()
    | ValueError: x
    +------------------------------------
""")
    assert record.form == "group"
    assert [s.exception for s in record.segments] == ["ExceptionGroup", "OSError", "ValueError"]


def test_faulthandler_and_py_spy_dumps_are_stacks_read_from_the_inside() -> None:
    fault = tracebacks("""
Fatal Python error: Segmentation fault

Current thread 0x00007f3b7a4b1740 (most recent call first):
  File "/opt/venv/lib/python3.12/site-packages/torch/nn/functional.py", line 100 in linear
  File "/root/work/model.py", line 12 in forward
  File "/root/work/train.py", line 3 in <module>
""")[-1]
    assert (fault.form, str(fault.segments[-1].frames[1])) == ("stack", "/root/work/model.py:12")
    spy = tracebacks("""
Thread 4412 (active): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2806)
    average (averaging.py:77)
""")[0]
    assert [str(f) for f in spy.segments[0].frames] == ["torch/distributed/distributed_c10d.py:2806", "averaging.py:77"]


def test_a_cut_tail_is_cut_and_a_cut_head_still_has_its_error() -> None:
    tail = one('Traceback (most recent call last):\n  File "a.py", line 3, in f\n    f()\n')
    assert tail.cut
    inside = one('  File "a.py", line 3, in f\n    f()\n  File "/opt/venv/lib/python3.12/site-packages/to\n')
    assert inside.cut
    head = one('    return f()\n  File "a.py", line 3, in f\n    f()\nValueError: x\n')
    assert (head.cut, head.segments[0].exception) == (False, "ValueError")


def test_two_ranks_interleaved_with_prefixes_are_two_errors() -> None:
    records = tracebacks("""
[rank0]: Traceback (most recent call last):
[rank1]: Traceback (most recent call last):
[rank1]:   File "a.py", line 3, in f
[rank0]:   File "a.py", line 3, in f
[rank0]:     f()
[rank1]:     f()
[rank1]: ValueError: one
[rank0]: ValueError: zero
""")
    assert {(r.rank, r.segments[0].message, len(r.segments[0].frames)) for r in records} == {
        (0, "zero", 1),
        (1, "one", 1),
    }


def test_progress_of_others_amid_a_traceback_does_not_part_it() -> None:
    record = one("""
Traceback (most recent call last):
step 12 loss 2.31 lr 1e-4
  File "a.py", line 3, in f
train:  12%|█▏        | 120/1000 [00:10<01:30,  9.90it/s]
    f()
[rank7]: step 12 loss 2.31 lr 1e-4
ValueError: x
""")
    assert (record.segments[0].exception, len(record.segments[0].frames)) == ("ValueError", 1)


def test_unknown_prefixes_are_learned_from_the_traceback_itself() -> None:
    prefix = "2026-11-29 06:01:12.977 [177/train/578 (pid 28936)] [09c561ee] "
    text = "\n".join(
        prefix + line
        for line in (
            "Traceback (most recent call last):",
            '  File "/root/work/a.py", line 3, in f',
            "    f()",
            "OSError: [Errno 28] No space left on device",
        )
    )
    record = one(text)
    assert str(record.segments[0].frames[0]) == "/root/work/a.py:3"
    assert record.segments[0].exception == "OSError"


def test_a_traceback_in_a_launchers_report_or_in_json_is_read() -> None:
    report = one("""
Root Cause (first observed failure):
[0]:
  rank      : 3 (local_rank: 3)
  traceback : Traceback (most recent call last):
    File "/root/work/train.py", line 453, in step
      loss = model(x)
    ValueError: bad
""")
    assert report.segments[0].exception == "ValueError"
    assert str(report.segments[0].frames[0]) == "/root/work/train.py:453"
    line = (
        '{"message": {"message": "ValueError: bad", "extraInfo": {"py_callstack": '
        '"Traceback (most recent call last):\\n  File \\"/root/work/train.py\\", line 4, in f\\n    f()\\nValueError: bad\\n"}}}'
    )
    assert any(str(f) == "/root/work/train.py:4" for r in tracebacks(line) for s in r.segments for f in s.frames)


def test_richs_boxes_give_their_frames() -> None:
    record = one("""
╭─────────────────── Traceback (most recent call last) ───────────────────╮
│ /root/work/train.py:88 in main                                          │
│                                                                         │
│   85 │   for batch in loader:                                           │
│ ❱ 88 │   │   loss = step(batch)                                         │
│                                                                         │
│ /opt/venv/lib/python3.12/site-packages/torch/nn/modules/a_very_long_nam │
│ e_of_a_module.py:2238 in forward                                        │
│                                                                         │
│ ❱ 2238 │   return torch.embedding(weight, input)                        │
╰─────────────────────────────────────────────────────────────────────────╯
IndexError: index out of range in self
""")
    assert [(f.user, f.number) for f in record.segments[0].frames] == [(True, 88), (False, 2238)]
    assert record.segments[0].exception == "IndexError"
