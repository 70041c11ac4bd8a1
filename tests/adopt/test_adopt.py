"""Sessions that somebody else started, in a real tmux: looked at, and nothing of them touched."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from smi import Smi

from dflash_ops.cli.adopted import client_of
from dflash_ops.cli.main import run
from dflash_ops.contracts import LIVE_STATES
from dflash_ops.fleet.follow import Look, Watch
from dflash_ops.hosts.factory import open_host
from dflash_ops.inventory import load

SCHEMAS = Path(__file__).resolve().parents[2] / "docs/schemas"
PYTHON = os.path.realpath(sys.executable)
TRAINER = """\
import os, sys, time
for step in range(int(sys.argv[1]), int(sys.argv[2]) + 1):
    if os.path.exists("crash"): raise RuntimeError("the disk is full of ants")
    print(f"iter {step}: loss {4.0 / step:.4f}, time 50.00ms, mfu 1.00%", flush=True)
    time.sleep(0.05)
"""
DEAF = """\
import signal, time
signal.signal(signal.SIGHUP, signal.SIG_IGN)
for step in range(1, 9999):
    try:
        print(f"step: {step}  loss: 1.0", flush=True)
    except OSError:
        pass  # the terminal is gone
    time.sleep(0.05)
"""
INVENTORY = """\
# a comment that stays
schema = 1

[hosts.here]   # so does this one
kind = "local"
python = "{python}"
"""


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@dataclass
class Session:
    """A tmux server of our own, in the part of somebody who never heard of dflash-ops."""

    folder: Path
    socket: str
    capfd: pytest.CaptureFixture[str]

    @property
    def inventory(self) -> Path:
        return self.folder / "inventory.toml"

    @property
    def root(self) -> Path:
        return self.folder / "root of 100% 'it' #1"

    def tmux(self, *args: str) -> str:
        env = {k: v for k, v in os.environ.items() if not k.startswith("TMUX")}
        done = subprocess.run(
            ["tmux", "-f", "/dev/null", "-L", self.socket, *args], capture_output=True, text=True, env=env, timeout=20
        )
        return done.stdout

    def start(self, *command: str, session: str = "dflash") -> None:
        self.tmux("new-session", "-d", "-s", session, "-x", "120", "-y", "30", "-c", str(self.folder), *command)

    def type(self, text: str, session: str = "dflash") -> None:
        self.tmux("send-keys", "-t", f"={session}:", text, "Enter")

    def ops(self, *args: str) -> Outcome:
        self.capfd.readouterr()
        code = run([args[0], "-i", str(self.inventory), *args[1:]])
        seen = self.capfd.readouterr()
        return Outcome(code, seen.out, seen.err)

    def adopt(self, *more: str) -> Outcome:
        return self.ops(
            "adopt", "here", "--session", "dflash", "--socket", self.socket, "--root", str(self.root), *more
        )

    @property
    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.ops("status", "dflash", "--json").out)["jobs"][0])

    def until(self, what: Callable[[dict[str, Any]], bool], seconds: float = 20.0) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while not what(found := self.status):
            assert time.monotonic() < end, found
            time.sleep(0.1)
        return found

    @property
    def trainer(self) -> int:
        """Pid of the python below the pane's shell."""
        pid = self.tmux("list-panes", "-s", "-t", "=dflash:", "-F", "#{pane_pid}").split()[0]
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else int(pid)


@pytest.fixture
def there(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "train.py").write_text(TRAINER)
    (tmp_path / "inventory.toml").write_text(INVENTORY.format(python=PYTHON))
    made = Session(tmp_path, f"dflash-test-{secrets.token_hex(4)}", capfd)
    try:
        yield made
    finally:
        made.tmux("kill-server")
        Path(f"/tmp/tmux-{os.getuid()}/{made.socket}").unlink(missing_ok=True)


def stepping(status: dict[str, Any]) -> bool:
    return bool(status["state"] == "stepping" and status["progress"]["step"])


def valid(kind: str, value: Any) -> None:
    jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{kind}.schema.json").read_text())).validate(value)


def test_a_shell_in_which_somebody_trains(there: Session) -> None:
    there.start("sh")
    there.type(f"{PYTHON} train.py 1 100000")
    end = time.monotonic() + 20
    while "iter " not in there.tmux("capture-pane", "-p", "-t", "=dflash:"):
        assert time.monotonic() < end
        time.sleep(0.05)
    before = there.tmux("list-panes", "-s", "-t", "=dflash:", "-F", "#{pane_id} #{pane_pid} #{pane_width}")
    adopted = there.adopt("--json")
    assert adopted.code == 0, adopted.err
    said = json.loads(adopted.out)
    valid("adopt", said)
    assert (said["dialect"], said["pid"], said["piped"]) == ("nanogpt", there.trainer, True)

    # the inventory: its comments, and the new job, which is one like any other
    text = there.inventory.read_text()
    assert text.startswith("# a comment that stays\n")
    assert "# so does this one" in text
    job = load(there.inventory).jobs["dflash"]
    assert (job.adopted, job.root, job.policy.mode) == (True, str(there.root), "observe")

    status = there.until(stepping)
    valid("status", {"schema": 1, "kind": "status", "jobs": [status]})
    assert status["started"] < status["now"]
    later = there.until(lambda s: s["progress"]["step"] > status["progress"]["step"])
    assert later["since"] == status["since"]
    assert "stepping" in there.ops("status").out

    logged = there.ops("logs", "dflash", "-n", "100000").out
    steps = [int(n) for n in re.findall(r"iter (\d+):", logged)]
    assert steps[0] == 1  # from before the adoption
    assert steps == list(range(1, len(steps) + 1))  # none lost between what was there and what came, none twice

    # only observed
    for refused in (there.ops("stop"), there.ops("deploy"), there.ops("releases"), there.ops("rollback")):
        assert refused.code == 2
        assert "adopted" in refused.err
    after = there.tmux("list-panes", "-s", "-t", "=dflash:", "-F", "#{pane_id} #{pane_pid} #{pane_width}")
    assert after == before
    # the same again renews it; another job of the name is refused
    assert there.adopt().code == 0
    assert there.inventory.read_text() == text
    assert there.ops("adopt", "here", "--session", "other", "--socket", there.socket, "--name", "dflash").code == 2

    # a crash: the traceback in the pane is the cause
    (there.folder / "crash").touch()
    crashed = there.until(lambda s: s["state"] == "crashed")
    assert crashed["detail"] == "RuntimeError: the disk is full of ants"
    assert crashed["session"]["alive"]
    # ... and a new start in the same pane is followed
    (there.folder / "crash").unlink()
    there.type(f"{PYTHON} train.py 500 100000")
    assert there.until(stepping)["progress"]["step"] >= 500

    # told to act: TERM to the trainer, and nothing else
    there.inventory.write_text(there.inventory.read_text() + 'policy = { mode = "act" }\n')
    stopped = there.ops("stop", "--grace", "10", "--json")
    assert stopped.code == 0, stopped.err
    valid("stop", json.loads(stopped.out))
    assert there.status["state"] == "stopped"
    assert there.tmux("has-session", "-t", "=dflash") == ""
    assert there.tmux("list-panes", "-s", "-t", "=dflash:", "-F", "#{pane_dead}").strip() == "0"


def test_the_ends_that_a_pane_can_tell(there: Session) -> None:
    there.start("sh", "-c", f"exec {PYTHON} train.py 1 40")
    there.tmux("set-option", "-w", "-t", "=dflash:", "remain-on-exit", "on")
    assert there.adopt().code == 0
    ended = there.until(lambda s: s["state"] not in ("stepping", "loading"))
    assert ended["state"] in ("finished", "unknown")  # tmux 3.3a may not know the exit code
    assert "dflash-ops deploy" not in there.ops("status").out
    assert "iter 40" in there.ops("logs", "dflash", "-f", "-n", "2").out  # tmux may say last that the pane is dead


def test_a_trainer_that_outlives_its_session_and_one_that_is_killed(there: Session) -> None:
    (there.folder / "deaf.py").write_text(DEAF)
    there.start(PYTHON, "deaf.py")
    assert there.adopt().code == 0
    status = there.until(stepping)
    pid = there.trainer
    there.tmux("kill-server")
    gone = there.until(lambda s: not s["session"]["alive"])
    assert gone["state"] == "stepping"
    assert "session is gone" in gone["warnings"][0]
    assert gone["progress"]["step"] >= status["progress"]["step"]
    os.kill(pid, signal.SIGKILL)
    dead = there.until(lambda s: s["state"] != "stepping")
    assert dead["state"] == "unknown"
    assert "nothing in the pane tells how" in dead["detail"]


def test_the_stream_of_the_watch(there: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards too, and it goes on when the trainer has ended."""
    smi = Smi(there.folder / "bin")
    monkeypatch.setenv("PATH", f"{smi.folder}:{os.environ['PATH']}")
    there.start(PYTHON, "train.py", "1", "100000")
    assert there.adopt().code == 0
    smi.holders = [("GPU-0", there.trainer, "9", "python")]
    smi.write()
    inventory = load(there.inventory)
    one = inventory.job("dflash")
    client = client_of(open_host(inventory, one.host), one, PYTHON)

    def until(true: Callable[[Look], object]) -> Look:
        end = time.monotonic() + 30
        while not true(look := watch.looks()["it"]):
            assert time.monotonic() < end, look
            watch.wait(0.5)
        return look

    def holders(look: Look) -> list[str | None]:
        gpus = look.seen.snapshot.gpus if look.seen is not None else ()
        return [holder.worker for gpu in gpus for holder in gpu.holders or ()]

    with Watch({"it": client}) as watch:
        assert until(holders).link == "live"
        assert holders(watch.looks()["it"]) == ["launcher"]
        curved = until(lambda look: look.seen is not None and len(look.seen.snapshot.curves.get("loss", ())) > 1)
        assert curved.seen is not None
        loss = curved.seen.snapshot.curves["loss"]
        assert list(loss) == sorted(loss, reverse=True)
        os.kill(there.trainer, signal.SIGKILL)
        ended = until(lambda look: look.seen is not None and look.seen.snapshot.state not in LIVE_STATES)
        assert ended.seen is not None
        t = ended.seen.snapshot.t
        assert until(lambda look: look.seen is not None and look.seen.snapshot.t > t + 1).link == "live"


def test_somebody_elses_pipe_stays_theirs(there: Session) -> None:
    there.start("sh", "-c", f"exec {PYTHON} train.py 1 100000")
    theirs = there.folder / "theirs.log"
    there.tmux("pipe-pane", "-t", "=dflash:", f"cat >> {theirs}")
    adopted = there.adopt()
    assert adopted.code == 0
    assert "which stays" in adopted.err
    status = there.until(stepping)
    assert any("another pipe" in w for w in status["warnings"])
    size = theirs.stat().st_size
    there.until(lambda s: theirs.stat().st_size > size)


def test_what_cannot_be_adopted(there: Session) -> None:
    missing = there.adopt()
    assert missing.code == 2
    assert f"tmux -L {there.socket} ls" in missing.err
    assert "[jobs" not in there.inventory.read_text()
    assert not there.root.exists()
    assert there.ops("adopt", "nowhere", "--session", "x").code == 2
    assert there.ops("adopt", "here", "--session", "x", "--progress", "(").code == 2
    there.start("sh")
    there.tmux("set-option", "-t", "=dflash:", "@dflash_root", "/srv/job")
    ours = there.adopt()
    assert ours.code == 4
    assert "/srv/job" in ours.err


def test_a_job_that_is_said_to_be_adopted_and_is_not(there: Session) -> None:
    there.inventory.write_text(
        there.inventory.read_text() + f'[jobs.dflash]\nhost = "here"\nadopted = true\nroot = "{there.folder}/r"\n'
    )
    status = there.status
    assert (status["state"], status["deployed"]) == ("unknown", False)
    assert "dflash-ops adopt here" in status["detail"]


def test_an_inventory_that_cannot_be_written_is_left_as_it_is(there: Session) -> None:
    there.start("sh", session="a#b")  # a name that no inventory takes
    before = there.inventory.read_text()
    refused = there.ops("adopt", "here", "--session", "a#b", "--socket", there.socket, "--root", str(there.root))
    assert refused.code == 2
    assert there.inventory.read_text() == before
    assert sorted(p.name for p in there.folder.iterdir()) == ["inventory.toml", "train.py"]


@pytest.mark.parametrize(
    ("shown", "came", "before"),
    [
        (["a", "b", "c", ""], "", "a\nb\nc\n"),
        (["a", "b", "c"], "c\n", "a\nb\n"),
        (["a", "b", "cd"], "d\ne\n", "a\nb\ncd\n"),  # not the same: nothing is taken away
        (["a", "b", "cd", "e"], "d\ne\n", "a\nb\nc"),
        (["x", "x", "x"], "x\nx\n", "x\n"),
        ([], "x\n", ""),
    ],
)
def test_what_was_there_and_what_came_meet(shown: list[str], came: str, before: str) -> None:
    from dflash_ops.resident.pane import without_overlap

    assert without_overlap(shown, came) == before


def test_golden_records_load_for_ever() -> None:
    from dflash_ops.contracts import Process, State, from_dict, to_dict
    from dflash_ops.resident.adopted import Adoption, Last

    folder = Path(__file__).resolve().parents[1] / "data/contracts"
    for name, cls in (("adopted.json", Adoption), ("adopted.last.json", Last)):
        raw = json.loads((folder / name).read_text())
        found = from_dict(cls, raw, name)
        assert found.trainer == Process(4711, 123456)
        assert to_dict(found) == raw
    assert from_dict(Last, json.loads((folder / "adopted.last.json").read_text()), "").state is State.STEPPING
