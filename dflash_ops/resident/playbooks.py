"""The playbooks that the resident judges by: its own (packed beside the code, as JSON), then those of the job."""

from __future__ import annotations

import json
import pkgutil
from typing import Any

from dflash_ops.errors import ContractError, StateError
from dflash_ops.resident.attempts import Attempt
from dflash_ops.resident.files import read_json
from dflash_ops.triage import Triage

#: File of the attempt's folder that holds the inventory's own playbooks.
OWN = "playbooks.json"


def documents(attempt: Attempt | None = None) -> list[dict[str, Any]]:
    """Decoded playbooks; later ones override earlier ones.

    Raises:
        StateError: the resident was packed without its playbooks, or the job's file is damaged.
    """
    try:
        raw = pkgutil.get_data("dflash_ops.resident", "playbooks.json") or b"[]"
    except OSError as error:
        raise StateError(f"the resident has no playbooks: {error}", "resident/current.pyz", "deploy again") from None
    found: list[dict[str, Any]] = json.loads(raw)
    own = read_json(attempt.layout.path / OWN) if attempt is not None else None
    if own is not None:
        if not isinstance(own, list):
            raise StateError("playbooks.json is no list", str(attempt and attempt.layout.path / OWN), "deploy again")
        found += own
    return found


def triage(attempt: Attempt | None = None) -> Triage:
    """Ready to judge.

    Raises:
        StateError, ContractError: a playbook cannot be read.
    """
    try:
        return Triage(documents(attempt))
    except (TypeError, KeyError, AttributeError) as error:
        raise ContractError(f"a playbook is not in the agreed form: {error}", OWN, "deploy again") from None
