"""What a terminal of 80 columns shows of a diagnosis."""

from __future__ import annotations

import io
import re

from rich.console import Console

from dflash_ops.contracts.diagnosis import Diagnosis, EvidenceLine, Remedy
from dflash_ops.view.triage import show

COMMAND = "cat /sys/fs/cgroup/lxc/200/memory.events; pct config 200 | grep -E 'memory|swap'; nvidia-smi -L; dmesg -T"
FOUND = Diagnosis(
    kind="host_oom_kernel_log",
    title="The kernel's OOM killer ended a process",
    root_exception="Out of memory: Killed process 4242 (python3)",
    root_rank=3,
    user_frame="/root/train.py:402",
    confidence=0.97,
    fingerprint="0123456789abcdef",
    meaning="The machine ran out of memory. The kernel chose a process. " + "A third sentence that can wait. " * 6,
    evidence=(
        EvidenceLine("Out of memory: Killed process 4242 (python3) " + "total-vm:9000000kB " * 5, 123456, "kernel log"),
        EvidenceLine('File "/root/train.py", line 402, in loop', 8, "attempt 2, log", "frame"),
    ),
    remedies=(
        Remedy("tell", "N", "Fewer data workers, less pinned memory, or a higher memory limit " * 2, COMMAND),
        Remedy("restart", "A", "Start again from the last checkpoint."),
    ),
    why=("line 123456: The kernel's OOM killer (is evidence from outside the program)",),
    facts={
        "missing": ["nvidia-smi (no answer within 10 s: the driver hangs)", "attempt 2, pane (there is no session)"],
        "sources": [{"name": "log", "status": "ok", "bytes": 2048, "note": "the last 2.0 of 9.0 MiB"}],
    },
)


def rows(*, explain: bool = False) -> list[str]:
    out = io.StringIO()
    show("toy, attempt 2", FOUND, explain=explain, console=Console(file=out, force_terminal=True, width=80))
    assert out.getvalue().endswith("\n")
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()


def test_the_verdict_comes_first_and_an_empty_line_before_each_section() -> None:
    seen = rows()
    assert seen[0].startswith("toy, attempt 2: host_oom_kernel_log")
    heads = ["Evidence", "What it means", "Why we think so", "What to do", "Not available"]
    assert [row for row in seen if row in heads] == heads
    assert all(seen[seen.index(head) - 1] == "" for head in heads)
    assert seen.count("") == len(heads)
    assert not any("third sentence" in row for row in seen), "that is for --explain"


def test_no_row_is_wider_than_the_terminal_but_a_command_stays_whole() -> None:
    seen = rows()
    assert [row for row in seen if len(row) > 80] == [f"     $ {COMMAND}"]


def test_later_rows_of_a_line_stand_under_its_text() -> None:
    seen = rows()
    at = next(i for i, row in enumerate(seen) if row.split()[:1] == ["123456"])
    assert seen[at + 1].startswith(" " * 11) and seen[at + 1].strip()
    step = next(i for i, row in enumerate(seen) if row.startswith("  1. "))
    assert seen[step + 1].startswith(" " * 5) and seen[step + 1][5] != " "


def test_each_missing_text_has_a_line_and_explain_says_what_was_read() -> None:
    assert rows()[-2:] == [
        "  - nvidia-smi (no answer within 10 s: the driver hangs)",
        "  - attempt 2, pane (there is no session)",
    ]
    seen = rows(explain=True)
    assert "  - log: 2.0 KiB; the last 2.0 of 9.0 MiB" in seen
    assert any("third sentence" in row for row in seen)
