"""The playbooks are complete, honest about safety, and each example is its own kind's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomllib

from dflash_ops.playbooks import proof_there
from dflash_ops.triage import Triage
from dflash_ops.triage.examples import Example, check, examples
from dflash_ops.triage.lint import ACTIONS, lint

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "playbooks").glob("*.toml"))
DOCUMENTS: list[dict[str, Any]] = [tomllib.loads(path.read_text(encoding="utf-8")) for path in FILES]
KINDS: list[dict[str, Any]] = [kind for document in DOCUMENTS for kind in document["kind"]]
WANTED = {
    row.split("\t")[0]: (row.split("\t")[1], row.split("\t")[2])
    for row in (ROOT / "tests/data/triage/kinds.tsv").read_text(encoding="utf-8").splitlines()[1:]
}
# what no step may do by itself, whatever a playbook says (laws of supervision, 6)
FORBIDDEN = re.compile(
    r"\brm\b|--gpu-reset|nvidia-smi -r|\breboot\b|\bshutdown\b|\bchmod\b|\bchown\b|weights_only=False|"
    r"trust_remote_code=True|ssh-keygen -R|StrictHostKeyChecking|\bkill(?:all)?\b|pkill|"
    r"\bpct (?:stop|reboot|destroy)|\bmkfs\b|rmmod|"
    r"TORCH_COMPILE_DISABLE|TORCHDYNAMO_DISABLE|error_on_nested_fx_trace",
)


def test_every_id_stands_exactly_once_with_the_role_and_grade_of_the_list() -> None:
    ids = [kind["id"] for kind in KINDS]
    assert sorted(ids) == sorted(WANTED)
    assert {kind["id"]: (kind["role"], kind["grade"]) for kind in KINDS} == WANTED


def test_a_family_is_a_file() -> None:
    for path, document in zip(FILES, DOCUMENTS, strict=True):
        assert (document["schema"], document["family"]) == (1, path.stem)


def test_nothing_to_lint() -> None:
    """Schema, known keys, literals of six characters, known actions and predicates, no expression that can blow up."""
    assert [str(fault) for fault in lint(DOCUMENTS, proof_there) if fault.error] == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["id"])
def test_a_kind_tells_a_tired_person_what_it_means_and_what_to_do(kind: dict[str, Any]) -> None:
    sentences = re.split(r"(?<=[.!?])\s+", kind["meaning"].strip())
    assert 1 <= len(sentences) <= 5, kind["meaning"]
    assert kind["references"]
    steps = kind.get("remedy", [])
    assert steps or kind["id"] == "healthy"
    for step in steps:
        assert step["action"] in ACTIONS
        assert step["text"].endswith((".", ":")) or step["text"].endswith(")"), step["text"]
        assert step["proven"] == "reported" or (ROOT / step["proven"].split("::")[0]).is_file(), step["proven"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["id"])
def test_only_told_steps_may_name_what_is_never_automatic(kind: dict[str, Any]) -> None:
    for step in kind.get("remedy", []):
        if step["action"] != "tell":
            assert not FORBIDDEN.search(step.get("command", "")), step
            assert (
                not re.search(r"\b(?:delete|wipe|reset the card|reboot)\b", step["text"]) or "never" in step["text"]
            ), step
        if step["action"] == "tell":
            assert step["grade"] == "N", step


def test_a_grade_is_no_better_than_its_ladder() -> None:
    """A kind of grade A has a step that may run by itself, one of grade N has none, one of grade B one to allow."""
    for kind in KINDS:
        grades = {step["grade"] for step in kind.get("remedy", []) if step["action"] not in ("tell", "hold")}
        if kind["grade"] == "A":
            assert "A" in grades, kind["id"]
        elif kind["grade"] == "B":
            assert grades & {"A", "B"} or any(s["grade"] == "B" for s in kind["remedy"]), kind["id"]


def _hits(kind: dict[str, Any], text: str) -> Iterator[str]:
    lines = [re.sub(r"^(?:\[?(?:rank|default)\d+\]?:\s?|\s*\|\s)", "", line) for line in text.splitlines()]
    for signature in kind.get("signature", ()):
        flags = re.IGNORECASE if signature.get("ignore_case") else 0
        literal = signature["literal"].lower() if flags else signature["literal"]
        for line in (*lines, *text.splitlines()):
            said = line.lower() if flags else line
            if literal in said and (not signature.get("regex") or re.search(signature["regex"], line, flags)):
                yield signature["literal"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind["id"])
def test_each_example_holds_a_signature_of_its_kind(kind: dict[str, Any]) -> None:
    assert kind["example"]
    for example in kind["example"]:
        # a traceback cut before its end has no text of its own: that is what the verdict says
        if kind.get("signature") and kind["id"] != "root_cause_not_shown":
            assert next(_hits(kind, example["text"]), None), example["text"][:200]
        if example.get("cause"):
            assert example["cause"] in example["text"]


def test_the_fx_ladder_is_told_truly() -> None:
    """Processes before a lock before reentrant checkpointing; compilation is never turned off."""
    (kind,) = (k for k in KINDS if k["id"] == "fx_dynamo_conflict")
    assert [s["action"] for s in kind["remedy"]] == ["workers_processes", "compile_lock", "loss_reentrant", "tell"]
    assert [s.get("when", "") for s in kind["remedy"]][:3] == ["fx_threads", "fx_threads", "fx_nesting"]
    assert "Never turn compilation off" in kind["remedy"][-1]["text"]


def test_dense_attention_is_not_answered_with_a_smaller_batch() -> None:
    (kind,) = (k for k in KINDS if k["id"] == "cuda_oom_dense_attention")
    assert "smaller_anchors" not in [s["action"] for s in kind["remedy"]]
    assert "Restore compilation" in kind["remedy"][-1]["text"]


TRIAGE = Triage(DOCUMENTS)


@pytest.mark.parametrize("example", examples(DOCUMENTS), ids=lambda example: example.name)
def test_an_example_is_diagnosed_as_its_own_kind_and_no_other(example: Example) -> None:
    assert check(TRIAGE, example) == []
