"""`redeploy` from outside: damaged files of a crashed job are sent again, and only then, and only what ran."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dflash_ops.contracts import Layout
from dflash_ops.errors import JobBusy
from dflash_ops.resident import again, lease

if TYPE_CHECKING:
    from conftest import Toy

ALLOW = {"mode": "act", "allow": ["release_damaged:redeploy"]}


def code(toy: Toy) -> Path:
    (found,) = (toy.root / "releases").glob("[!.]*/train.py")  # what was damaged is kept beside it
    return found


def crashes(toy: Toy, attempt: int) -> None:
    """The trainer, and the supervisor beside it has nothing to repair it with."""
    (toy.root / "crash").touch()
    toy.until(lambda s: s["state"] == "crashed" and s["attempt"] == attempt)
    held = [e for e in toy.journal if e["event"] == "held" and e["attempt"] == attempt]
    toy.until(lambda s: bool(held) or any(e["event"] == "held" and e["attempt"] == attempt for e in toy.journal))
    (toy.root / "crash").unlink()


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_damaged_files_are_sent_again_once_where_it_is_allowed(toy: Toy) -> None:
    toy.write(policy={"mode": "act"}, watch_s=1)
    assert toy.ops("deploy").code == 0
    whole = code(toy).read_text()
    toy.until(lambda s: s["state"] == "stepping")
    code(toy).write_text("def (")
    crashes(toy, 1)
    first = toy.status["progress"]["step"]
    told = toy.ops("supervise", "--once")
    assert "crashed since" in told.out
    assert "sent" not in told.out  # not allowed, so it is not even asked
    toy.write(policy=ALLOW)

    held = lease.take(Layout(toy.root), "another")
    assert held is not None
    assert toy.ops("supervise", "--once").out == ""
    with pytest.raises(JobBusy, match="holds the lease"):
        again.again(toy.root, {"attempt": 1, "decision": "d", "reason": "r"}, {})
    held.release()

    source = Path(toy.job["source"]) / "train.py"
    source.write_text(whole + "# changed since\n")
    assert toy.ops("supervise", "--once").out == ""  # what ran cannot be made again from here
    source.write_text(whole)
    for file in (Path(toy.folder) / "state").rglob("seen.json"):
        file.write_text(file.read_text().replace('"inspected":1', '"inspected":null'))

    done = toy.ops("supervise", "--once")
    assert "is not there as it was sent: train.py; it was sent again, and attempt 2 runs" in done.out, done
    assert code(toy).read_text() == whole
    toy.until(lambda s: s["attempt"] == 2 and s["state"] == "stepping")
    started = [e for e in toy.journal if e["event"] == "attempt_started"][-1]
    assert started["actor"] == "supervisor"
    assert "it was sent again" in started["data"]["reason"]
    toy.until(lambda s: s["progress"]["step"] > first)  # beyond where it had struck: that try is forgiven
    assert toy.ops("supervise", "--once").code == 0

    (toy.root / "resident").joinpath("current.pyz").resolve().unlink()
    crashes_alone(toy)
    done = toy.ops("supervise", "--once")
    assert "the resident is not there as it was sent: it is missing; it was sent again, and attempt 3 runs" in done.out
    toy.until(lambda s: s["attempt"] == 3 and s["state"] == "stepping")
    with pytest.raises(JobBusy, match="another attempt has begun"):
        again.again(toy.root, {"attempt": 2, "decision": "d", "reason": "r"}, {})


def crashes_alone(toy: Toy) -> None:
    """With a supervisor that cannot make a pass any more: its file is gone."""
    (toy.root / "crash").touch()
    snapshot = toy.root / "run/snapshot.json"
    toy.until(lambda _: '"state":"crashed"' in snapshot.read_text())
    (toy.root / "crash").unlink()
