from __future__ import annotations

from collections.abc import Callable

import pytest

from dflash_ops.contracts.diagnosis import Diagnosis
from dflash_ops.playbooks import load_documents
from dflash_ops.triage import Source, Triage


@pytest.fixture(scope="session")
def triage() -> Triage:
    return Triage(load_documents())


@pytest.fixture(scope="session")
def say(triage: Triage) -> Callable[..., Diagnosis]:
    """Diagnose one text."""

    def diagnose(text: str | bytes, kind: str = "log", **context: object) -> Diagnosis:
        data = text.encode() if isinstance(text, str) else text
        return triage.diagnose([Source("a.log", data, kind)], context)

    return diagnose
