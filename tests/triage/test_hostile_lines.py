"""No line can make triage slow: every expression meets lines built to make it try and fail.

Nothing is timed here: an expression that blows up would run for hours and end at the suite's own limit.
"""

from __future__ import annotations

import pytest

from dflash_ops.playbooks import load_documents
from dflash_ops.triage import Source, Triage, compile_playbooks

SIGNATURES = compile_playbooks(load_documents()).signatures
FILLERS = (" a", "a", " ", "1", ".", "/a", "(", '"', "[1, ", "a b-c.d:e/f_g ", "\t")


@pytest.mark.parametrize("filler", FILLERS)
def test_every_expression_ends_on_lines_that_nearly_match(filler: str) -> None:
    for signature in SIGNATURES:
        body = filler * (4_000 // len(filler))
        for text in (signature.literal + body, body + signature.literal, (signature.literal + filler) * 60):
            for pattern in (signature.pattern, signature.entity_pattern):
                if pattern is not None:
                    pattern.search(text)


@pytest.mark.parametrize(
    "data",
    [
        b"a" * 1_000_000,
        b"Error: " * 150_000,
        b'  File "' * 100_000 + b"\n",
        b"CUDA out of memory. Tried to allocate 1 GiB " * 20_000,
        b"CUDA out of memory. Tried to allocate 1.00 GiB\n" * 20_000,
        b"[" * 300_000,
        b'"py_callstack": "' + b"\\n" * 100_000,
        b"".join(b"[rank%d]: Traceback (most recent call last):\n" % n for n in range(20_000)),
        b'  File "/a/b.py", line 12, in f\n    x\n' * 20_000,
        b"".join(b"error: %x some text %x\n" % (n * 7919, n * 104_729) for n in range(20_000)),
        b"\r 45%|##  | 45/100 [00:10<00:12, 4.4it/s]" * 40_000,
        b"| " * 200_000,
        "│ ".encode() * 100_000,
        b"0" * 500_000 + b": " + b"[0]" * 1_000,
    ],
)
def test_hostile_texts_get_an_answer(triage: Triage, data: bytes) -> None:
    assert triage.diagnose([Source("hostile", data)]).kind
