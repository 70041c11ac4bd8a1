"""What lint says about playbooks, and what compiling them refuses."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_ops.errors import ContractError
from dflash_ops.playbooks import proof_there
from dflash_ops.triage import compile_playbooks
from dflash_ops.triage.lint import lint


def document(**changes: Any) -> dict[str, Any]:
    signature = {"literal": "no space left", **changes.pop("signature", {})}
    kind = {
        "id": "k", "title": "t", "role": "root", "grade": "N", "meaning": "m", "signature": [signature],
        "example": [{"text": "no space left"}], **changes,
    }  # fmt: skip
    return {"schema": 1, "family": "f", "title": "F", "kind": [kind]}


def errors(**changes: Any) -> str:
    return " | ".join(f.what for f in lint([document(**changes)], proof_there) if f.error)


def notes(**changes: Any) -> str:
    return " | ".join(f.what for f in lint([document(**changes)]) if not f.error)


def test_a_right_one_has_no_faults() -> None:
    assert lint([document()]) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"role": "chief"}, "role"),
        ({"grade": "Z"}, "grade"),
        ({"id": "Big-Name"}, "id must"),
        ({"priority": 300}, "priority"),
        ({"meaning": ""}, "no meaning"),
        ({"example": []}, "no example"),
        ({"colour": "red"}, "unknown key 'colour'"),
        ({"evidence": {"predicate": "nobody"}}, "no predicate"),
        ({"remedy": [{"action": "explode", "grade": "A", "text": ""}]}, "unknown action"),
        (
            {"remedy": [{"action": "loss_reentrant", "grade": "A", "proven": "reported"}]},
            "better than the action's own, B",
        ),
        ({"remedy": [{"action": "fresh_start_aside", "grade": "A", "proven": "reported"}]}, "better than the action's"),
        ({"remedy": [{"action": "restart", "grade": "Q", "proven": "reported"}]}, "none of A, B"),
        ({"remedy": [{"action": "restart", "grade": "A"}]}, "no proven"),
        ({"remedy": [{"action": "restart", "grade": "A", "proven": "yes"}]}, "nor a path in tests/"),
        ({"remedy": [{"action": "restart", "grade": "A", "proven": "tests/none.py"}]}, "'tests/none.py' is not there"),
        ({"remedy": [{"action": "restart", "grade": "A", "proven": "reported", "limit": 0}]}, "means never"),
        ({"remedy": [{"action": "restart", "grade": "A", "proven": "reported", "command": "rm -rf /x"}]}, "'rm -r'"),
        ({"signature": {"literal": "abc"}}, "6 characters"),
        ({"signature": {"where": "nowhere"}}, "where"),
        ({"signature": {"regex": "("}}, "does not compile"),
        ({"signature": {"regex": "(a+)+no space left"}}, "endless repeat inside"),
        ({"signature": {"regex": "(?:x*|y)*no space left"}}, "endless repeat inside"),
        ({"signature": {"regex": ".*a.*b.*c.*no space left"}}, "in a row"),
    ],
)
def test_each_fault_is_said(changes: dict[str, Any], said: str) -> None:
    assert said in errors(**changes)


@pytest.mark.parametrize(
    "regex", [r"no space left on \S+", r"(?:OSError|IOError): no space left", r"(?P<entity>\S+): no space left"]
)
def test_a_literal_that_stands_in_every_match_is_fine(regex: str) -> None:
    assert notes(signature={"regex": regex}) == ""


@pytest.mark.parametrize("regex", [r"no space", r"no spaces? left", r"no space left|full", r"(?:no space left)?"])
def test_a_literal_that_need_not_stand_in_the_match_deserves_a_look(regex: str) -> None:
    assert "without the literal" in notes(signature={"regex": regex})


def test_an_id_twice_in_one_file_is_an_error_and_in_another_an_override() -> None:
    twice = document()
    twice["kind"] = twice["kind"] * 2
    assert any("twice" in f.what for f in lint([twice]))
    first, second = document(), {**document(title="mine"), "family": "own"}
    assert not [f for f in lint([first, second]) if f.error]
    assert compile_playbooks([first, second]).kinds["k"].title == "mine"


def test_compiling_names_the_family_and_the_kind() -> None:
    broken = document()
    del broken["kind"][0]["role"]
    with pytest.raises(ContractError, match="no role") as error:
        compile_playbooks([broken])
    assert "family f, kind k" in str(error.value)
    with pytest.raises(ContractError, match="no literal"):
        compile_playbooks([document(signature={"literal": ""})])
    with pytest.raises(ContractError, match="schema"):
        compile_playbooks([{"schema": 2, "family": "f"}])


@pytest.mark.parametrize(
    ("path", "there"),
    [
        ("tests/triage/test_playbook_lint.py", True),
        ("tests/triage/test_playbook_lint.py::test_a_right_one_has_no_faults", True),
        ("tests/triage/test_playbook_lint.py::test_nobody", False),
        ("tests/triage/test_nobody.py::test_x", False),
    ],
)
def test_a_proof_is_a_test_that_is_there(path: str, there: bool) -> None:
    assert proof_there(path) is there
