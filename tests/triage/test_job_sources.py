"""A job's texts: each may be missing, and is then said to be missing."""

from __future__ import annotations

import pytest

from dflash_ops.collect.sources import Wanted, gather
from dflash_ops.errors import ConnectionLost
from dflash_ops.triage import Triage

LOG = b"step 1 loss 2.3\nOSError: [Errno 28] No space left on device\n"


def lost() -> bytes:
    raise ConnectionLost("the connection went away while reading", "192.0.2.6")


def forbidden() -> bytes:
    raise PermissionError(13, "Permission denied")


def test_what_cannot_be_had_is_named_and_the_rest_is_read(triage: Triage) -> None:
    sources, missing = gather(
        [
            Wanted("pane", "pane", lambda: b"step 1 loss 2.3\n"),
            Wanted("attempt 3, log", "log", lambda: iter([LOG[:20], LOG[20:]])),
            Wanted("host, dmesg", "kernel", lost),
            Wanted("errors/target0/error.json", "error_json", forbidden),
            Wanted("exit.json", "exit_json", lambda: None),
        ]
    )
    assert [s.name for s in sources] == ["attempt 3, log", "pane"]
    assert [str(m) for m in missing] == [
        "host, dmesg (the connection went away while reading)",
        "errors/target0/error.json (Permission denied)",
        "exit.json (not there)",
    ]
    d = triage.diagnose(sources, {"missing": [str(m) for m in missing]})
    assert d.kind == "disk_full"
    assert len(d.facts["missing"]) == 3


def test_a_kind_that_triage_does_not_know_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="smoke"):
        gather([Wanted("x", "smoke", lambda: b"")])
