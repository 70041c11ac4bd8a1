"""Never raises on any bytes; any chunking gives the same; the fingerprint keeps what it promises."""
# ruff: noqa: E501 - lines of logs are as long as they are

from __future__ import annotations

import re

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_ops.playbooks import load_documents
from dflash_ops.triage import Source, Triage
from dflash_ops.triage.examples import examples
from dflash_ops.triage.fingerprint import normalise
from dflash_ops.triage.types import SOURCE_KINDS

DOCUMENTS = load_documents()
TRIAGE = Triage(DOCUMENTS)
TEXTS = [e.text.encode() for e in examples(DOCUMENTS)]
NOISE = [
    b"\x1b[31m",
    b"\r",
    b"\n",
    b"\x08\x08",
    b"\x00",
    b'"""',
    b"```\n",
    b"\xff\xfe",
    b"Traceback (most recent call last):\n",
    b'  File "x.py", line 3, in f\n',
    b"\x1b]0;t\x07",
    b'{"log":"x\\n"}',
    b"\xe2\x94\x82 ",
    b"  + Exception Group Traceback (most recent call last):\n",
    b"100%|\xe2\x96\x88| 3/4 [00:01<00:02, 1it/s]",
    b"==== dflash-ops attempt 2 release abc 2026-01-01T00:00:00Z ====\n",
    b"\nDuring handling of the above exception, another exception occurred:\n",
    b'"py_callstack": "',
    b"    +---------------- 1 ----------------\n",
]
pieces = st.lists(st.one_of(st.binary(max_size=60), st.sampled_from(TEXTS), st.sampled_from(NOISE)), max_size=8)
relaxed = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


@relaxed
@given(pieces, st.sampled_from(SOURCE_KINDS), st.lists(st.integers(1, 400), min_size=1, max_size=5))
def test_any_bytes_in_any_pieces_get_one_answer(parts: list[bytes], kind: str, sizes: list[int]) -> None:
    data = b"".join(parts)
    whole = TRIAGE.diagnose([Source("a", data, kind)])
    assert 0.0 <= whole.confidence <= 1.0
    cut, at, n = [], 0, 0
    while at < len(data):
        cut.append(data[at : at + sizes[n % len(sizes)]])
        at += len(cut[-1])
        n += 1
    assert TRIAGE.diagnose([Source("a", iter(cut), kind)]) == whole


@relaxed
@given(st.sampled_from(TEXTS), st.data())
def test_a_damaged_example_still_gets_an_answer(text: bytes, data: st.DataObject) -> None:
    body = bytearray(text)
    for _ in range(data.draw(st.integers(0, 12))):
        at = data.draw(st.integers(0, max(0, len(body) - 1)))
        body[at : at + data.draw(st.integers(0, 30))] = data.draw(st.sampled_from(NOISE))
    d = TRIAGE.diagnose([Source("a", bytes(body))])
    assert re.fullmatch(r"[a-z][a-z0-9_]*", d.kind)


NUMBERS = st.integers(0, 10**9)


@settings(max_examples=60, deadline=None)
@given(NUMBERS, NUMBERS, st.integers(0, 63), st.integers(0, 63))
def test_a_fingerprint_forgets_ranks_pids_sizes_times_and_paths(a: int, b: int, r: int, s: int) -> None:
    def text(number: int, rank: int, path: str) -> str:
        return (
            f"[rank{rank}]: Traceback (most recent call last):\n"
            f'[rank{rank}]:   File "{path}/w.py", line 7, in save\n[rank{rank}]:     write()\n'
            f"[rank{rank}]: OSError: [Errno 28] No space left on device: '{path}/step-{number:08d}' (pid {number}, 0x{number:08x}, {number}.5 GiB)\n"
        )

    one = TRIAGE.diagnose([Source("a", text(a, r, "/root/a").encode())])
    two = TRIAGE.diagnose([Source("b", text(b, s, "/srv/other/b").encode())])
    assert one.fingerprint == two.fingerprint != ""
    wide = text(a, r, "/root/a")
    wrapped = "\n".join(line[i : i + 60] for line in wide.split("\n") for i in range(0, max(1, len(line)), 60))
    assert TRIAGE.diagnose([Source("a", wrapped.encode())]).fingerprint == one.fingerprint


def test_another_place_or_another_message_is_another_fingerprint() -> None:
    def fp(function: str, message: str) -> str:
        text = f'Traceback (most recent call last):\n  File "w.py", line 7, in {function}\n    x\nOSError: {message}\n'
        return TRIAGE.diagnose([Source("a", text.encode())]).fingerprint

    first = fp("save", "[Errno 28] No space left on device")
    assert first != fp("load", "[Errno 28] No space left on device")
    assert first != fp("save", "[Errno 30] Read-only file system")


def test_what_the_normal_form_takes_out() -> None:
    told = normalise(
        "rank 3: 2.00 GiB at 0x7f3b, pid 4242, /ckpt/step-00000100/model.safetensors, cuda:3, 2026-11-29T16:24:18Z"
    )
    assert not re.search(r"\d", told), told
