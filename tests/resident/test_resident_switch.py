"""A change of the split and a person at one time: what a person says last is what holds."""

from __future__ import annotations

import json
import secrets
from typing import Any

import pytest
from resident_lab import Lab  # type: ignore[import-not-found]

from dflash_ops.contracts import to_dict
from dflash_ops.errors import StartError
from dflash_ops.resident import attempts, lease, stop, switch


def change(one: Lab) -> dict[str, Any]:
    """The worker's part, in this process."""
    request = {
        "root": str(one.root), "token": secrets.token_hex(4), "expect": 1, "spec": to_dict(one.job()), "back": None,
        "grace_s": 20.0, "actor": "operator", "reason": "rebalance 1+1 -> 1+2",
        "event": {"from": {"targets": 1, "drafters": 1}, "to": {"targets": 1, "drafters": 2}},
    }  # fmt: skip
    return switch._held(one.layout, request, switch.Told(one.layout, request))


def test_a_stop_while_it_saves_keeps_the_new_split_from_starting(one: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    one.start()
    one.stepping()
    ours = stop.stop

    def two(*args: Any) -> dict[str, Any]:
        one.ok("stop", "--reason", "enough")  # a person's, which comes while ours waits for the save
        return ours(*args)

    monkeypatch.setattr(stop, "stop", two)
    with pytest.raises(StartError, match="operator stopped attempt 1 while its split was being changed"):
        change(one)
    assert attempts.numbers(one.layout) == [1]
    assert lease.holder(one.layout) is None
    assert json.loads((one.layout.run / switch.SWITCH).read_text())["phase"] == "starting"


def test_its_own_stop_is_none(one: Lab) -> None:
    one.start()
    one.stepping()
    assert change(one)["attempt"] == 2
