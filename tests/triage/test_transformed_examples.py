"""The playbooks' own examples, through all that can happen to a log: the kind stays, and so does the cause line."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from dflash_ops.playbooks import load_documents
from dflash_ops.triage import Triage
from dflash_ops.triage.examples import check, examples

sys.path.insert(0, str(Path(__file__).parent))
from transforms import ALL

EXAMPLES = examples(load_documents())


@pytest.mark.parametrize("name", ALL)
def test_examples_keep_their_kind(triage: Triage, name: str) -> None:
    transform, share = ALL[name]
    wrong = {}
    for n, example in enumerate(EXAMPLES):
        changed = dataclasses.replace(example, text=transform(example.text.strip("\n") + "\n"))
        if name == "teed":
            changed = dataclasses.replace(changed, rank=None)  # the prefix says another rank
        if faults := check(triage, changed):
            wrong[f"{n} {example.name}"] = faults
    assert len(wrong) <= (1 - share) * len(EXAMPLES), f"{len(wrong)} of {len(EXAMPLES)}: {wrong}"
    false_alarms = [key for key, faults in wrong.items() if any(fault.startswith("wants healthy") for fault in faults)]
    assert not false_alarms, false_alarms
