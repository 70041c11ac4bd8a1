"""A night in three minutes: `make demo-crash`, or `python -m chaos.night [--short]` in tests/.

One supervised job on this machine, deployed as any other: the trainer of threads/twothreads.py, with an own ladder
that tries what only looks like a cure first. Everything that is told was read from the job's journal; what is claimed
at the end is compared with it, and the exit code is 1 where it did not happen. Ctrl-C ends it and leaves nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ending import end_supervisors  # type: ignore[import-not-found]

from dflash_ops.contracts import Event, Layout, clock
from dflash_ops.deploy.toml import dump_toml
from dflash_ops.resident import attempts, journal, proc
from dflash_ops.supervise.words import say

REPO = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("threads")
FX = "fx_dynamo_conflict"
#: The step at which one drafter compiles while the other one calls; the steps of the first part, and of both.
AT, FIRST, ALL = 12, 24, 90
#: Seconds that anything may take: loading torch takes long on a busy machine.
PATIENCE_S = 150.0
#: Events of the journal that are part of the story.
TOLD = frozenset(
    {"attempt_started", "attempt_exited", "diagnosed", "action_intended", "action_outcome", "held", "checkpoints_aside"}
)


class NotSo(Exception):
    """Something that the night shows did not happen."""


class Night:
    """The job, its folder, and the story as far as it was told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "job"
        self.socket = f"dflash-night-{secrets.token_hex(4)}"
        self.began = time.monotonic()
        self._said = 0
        self._diagnosed: set[str] = set()

    @property
    def layout(self) -> Layout:
        return Layout(self.root)

    def write(self, *words: str, total: int) -> None:
        """The inventory, as an operator would write it."""
        job = {
            "host": "here",
            "root": str(self.root),
            "socket": self.socket,
            "source": str(SOURCE),
            "command": [sys.executable, "-u", "{release}/twothreads.py", *words],
            "progress": r"it (?P<step>\d+) of (?P<total>\d+) loss=(?P<loss>\S+)",
            "grace_s": 10,
            "watch_s": 1,
            "env": {
                "SAVE": "{checkpoints}",
                "TOTAL": str(total),
                "AT": str(AT),
                "STEP_S": "0.15",
                "OMP_NUM_THREADS": "1",
                "TORCHINDUCTOR_CACHE_DIR": "{attempt}/compile-cache",
            },
            "policy": {
                "mode": "act",
                "allow": [f"{FX}:loss_reentrant", f"{FX}:workers_processes"],
                "ladders": {FX: ["loss_reentrant", "workers_processes"]},
                "budgets": {"backoff_s": 2},
            },
            "remedies": {
                "loss_reentrant": {"args": ["--loss", "reentrant"]},
                "workers_processes": {"args": ["--workers", "processes"]},
            },
        }
        document = {"schema": 1, "hosts": {"here": {"kind": "local", "python": sys.executable}}, "jobs": {"night": job}}
        (self.folder / "inventory.toml").write_text(dump_toml(document), "utf-8")

    def ops(self, *words: str) -> str:
        """One command of dflash-ops, as it is typed; its output.

        Raises:
            NotSo: it failed.
        """
        self.tell(f"$ dflash-ops {' '.join(words)}")
        argv = [sys.executable, "-m", "dflash_ops.cli.main", *words, "-i", str(self.folder / "inventory.toml")]
        env = {**os.environ, "PYTHONPATH": str(REPO), "XDG_STATE_HOME": str(self.folder / "state"), "NO_COLOR": "1"}
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, env=env, check=False)
        if done.returncode != 0:
            raise NotSo(f"dflash-ops {words[0]} ended with {done.returncode}: {done.stderr[-1500:]}")
        return done.stdout

    # -- telling

    def tell(self, text: str, who: str = "") -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {who:<11}{text}", flush=True)

    def events(self, name: str = "", attempt: int | None = None) -> list[Event]:
        found = journal.read(self.layout.journal)[0] if self.layout.journal.exists() else []
        return [e for e in found if name in ("", e.event) and attempt in (None, e.attempt)]

    def follow(self) -> None:
        """Tell what stands in the journal since the last time."""
        for event in self.events():
            if event.seq <= self._said:
                continue
            self._said = event.seq
            if event.event in TOLD:
                self.tell(self._words(event), event.actor.split(" ")[0])

    def _words(self, event: Event) -> str:
        if event.event == "action_intended":
            decision = event.data["decision"]
            return f"{decision['action']}: {decision['reason']}\n" + "".join(
                f"{'':<22}{line}\n" for line in decision["command"].splitlines()
            ).rstrip("\n")
        if event.event == "action_outcome":
            by_id = {e.data["decision"]["id"]: e.data["decision"]["action"] for e in self.events("action_intended")}
            return f"{by_id.get(event.data['id'], 'it')}:{say(event).removeprefix(':')}"
        key = str(event.data.get("fingerprint"))
        again = event.event == "diagnosed" and key in self._diagnosed
        self._diagnosed |= {key} if event.event == "diagnosed" else set()
        return say(event, again=again)

    def until(self, what: Callable[[], Any], why: str) -> Any:
        """Tell the story until `what` gives something true.

        Raises:
            NotSo: not within PATIENCE_S, or the supervisor left it to a person.
        """
        end = time.monotonic() + PATIENCE_S
        while True:
            self.follow()
            if found := what():
                return found
            if (held := self.events("held")) or time.monotonic() > end:
                why_not = f"; left to a person: {held[-1].data['reason']}" if held else ""
                raise NotSo(f"waited in vain for: {why}{why_not}")
            time.sleep(0.1)

    # -- looking

    @property
    def attempt(self) -> int:
        return max((e.attempt or 0 for e in self.events("attempt_started")), default=0)

    def finished(self, attempt: int) -> bool:
        return any(e.data["state"] == "finished" for e in self.events("attempt_exited", attempt))

    def past(self, step: int) -> bool:
        """Whether the newest attempt has made this step (its log says so)."""
        log = self.layout.attempt(self.attempt).log
        text = log.read_text("utf-8", "replace") if log.exists() else ""
        return any(
            int(line.split()[1]) > step for line in text.splitlines() if line.startswith("it ") and " of " in line
        )

    def verified(self, action: str) -> bool:
        good = {e.data["id"] for e in self.events("action_outcome") if e.data["outcome"] == "verified"}
        return any(d["action"] == action and d["id"] in good for d in self.decisions())

    def decisions(self) -> list[dict[str, Any]]:
        return [e.data["decision"] for e in self.events("action_intended")]

    def kill(self, *, cut: bool) -> str:
        """SIGKILL to the trainer; with `cut`, while it is held, its newest checkpoint loses its second half."""
        start = attempts.read(self.layout, self.attempt).start
        assert start is not None
        family = (start.launcher, *proc.family(start.launcher))
        for process in family:
            proc.send(process, signal.SIGSTOP)
        newest = max((self.root / "checkpoints").glob("step-*"))
        if cut:
            file = newest / "drafter.safetensors"
            os.truncate(file, file.stat().st_size // 2)
            self.tell(f"caused: the newest checkpoint, {newest.name}, is cut in half")
        self.tell("caused: SIGKILL to the trainer and its drafters")
        for process in family:
            proc.send(process, signal.SIGKILL)
        return newest.name

    # -- the end

    def close(self) -> None:
        """End all that was started, each by its record."""
        end_supervisors(self.root)
        for number in attempts.numbers(self.layout):
            start = attempts.read(self.layout, number).start
            if start is not None:
                for process in (start.launcher, start.wrapper, *proc.family(start.launcher)):
                    proc.send(process, signal.SIGCONT)
                    proc.send(process, signal.SIGKILL)
        subprocess.run(["tmux", "-L", self.socket, "kill-server"], capture_output=True, timeout=30, check=False)


# -- the story


def race(night: Night) -> None:
    """The FX crash; what only looks like a cure; what is one."""
    night.tell(f"one process, two drafter threads, one compiled function; at step {AT} one of them meets a new length")
    night.tell("and is held inside its compile until the other one has called what is compiled already")
    night.write(total=FIRST)
    night.ops("deploy", "night")
    night.until(lambda: night.events("diagnosed"), "the crash, and its name")
    night.until(lambda: len([d for d in night.decisions() if d["kind"] == FX]) > 1, "the second hypothesis")
    night.until(lambda: night.verified("workers_processes"), "the proof")
    night.until(lambda: night.finished(night.attempt), "the end of the training")


def mended(night: Night) -> None:
    """On torch 2.14 and later: the same moment, and nothing happens."""
    night.write(total=FIRST)
    night.ops("deploy", "night")
    night.until(lambda: night.finished(night.attempt), "the end of the training")
    night.tell("both threads went through the same moment, and nothing crashed")


def damage(night: Night) -> None:
    """The next part: a cut checkpoint, then a plain kill."""
    night.tell("a person writes what helped into the inventory (--workers processes), and has it go on")
    night.write("--workers", "processes", total=ALL)
    night.ops("deploy", "night", "--resume")
    night.until(lambda: night.past(FIRST + 8), "steps of the next part")
    night.kill(cut=True)
    night.until(lambda: night.verified("resume_earlier"), "steps beyond the damaged checkpoint")
    first = night.attempt
    night.until(lambda: night.past(FIRST + 24), "more steps")
    night.kill(cut=False)
    night.until(lambda: night.attempt > first and night.verified("restart"), "steps beyond the kill")
    night.until(lambda: night.finished(night.attempt), "the end of the training")


def claims(night: Night, *, raced: bool, whole: bool) -> list[tuple[str, bool]]:
    """What the night claims to have shown, each looked up in the journal and in `incidents`."""
    said = json.loads(night.ops("incidents", "list", "night", "--json"))["jobs"][0]["incidents"]
    kinds = [e.data["kind"] for e in night.events("diagnosed")]
    outcome = {e.data["id"]: e.data["outcome"] for e in night.events("action_outcome")}
    done = [(d["kind"], d["action"], outcome.get(d["id"], "open")) for d in night.decisions()]
    race = [(action, came) for kind, action, came in done if kind == FX]
    rest = [(action, came) for kind, action, came in done if kind != FX]
    mine = [i for i in said if i["kind"] == FX]
    ends = [e.data["step"] for e in night.events("attempt_exited") if e.data["state"] == "finished"]
    found = []
    if raced:
        found += [
            ("the crash was named as the FX race, twice", kinds.count(FX) == 2),
            (
                "reentrant checkpointing was tried first, and the journal says that it did not help",
                race[:1] == [("loss_reentrant", "useless")],
            ),
            (
                "one process a device was next, and a later step proved it",
                race[1:] == [("workers_processes", "verified")],
            ),
            ("that training finished", ends[:1] == [FIRST]),
            (
                "both crashes are one incident, and it is repaired",
                [(len(i["attempts"]), i["state"]) for i in mine] == [(2, "repaired")],
            ),
        ]
    if whole:
        aside = [name for e in night.events("checkpoints_aside") for name in e.data["names"]]
        places = night.root / "checkpoints.aside"
        found += [
            (
                "the cut checkpoint was found, and set aside whole",
                len(aside) == 1 and bool(list(places.rglob(f"{aside[0]}/drafter.safetensors"))),
            ),
            ("it went on from the checkpoint before", ("resume_earlier", "verified") in rest),
            ("it went on after a plain kill", rest[-1:] == [("restart", "verified")]),
            ("the whole training finished", ends[-1:] == [ALL]),
        ]
    over = all(i["state"] in ("repaired", "passed") for i in said)
    found.append(("every incident is over, and nothing was left to a person", over and not night.events("held")))
    return found


def global_flag(version: str) -> bool:
    """Whether this torch has one FX flag for the whole process."""
    return tuple(int(x) for x in version.split("+")[0].split(".")[:2]) < (2, 14)


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true", help="the first part only")
    given = parser.parse_args(args)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    version = importlib.metadata.version("torch")
    raced = global_flag(version)
    print(f"A night in three minutes, {clock(time.time())}, torch {version}", flush=True)
    if not raced:
        print(
            "In torch 2.14 and later each thread has an FX flag of its own: the race is mended. Shown instead: the same"
        )
        print("two threads go through the same moment without a crash; then a cut checkpoint and a kill.", flush=True)
    with _night() as night:
        try:
            race(night) if raced else mended(night)
            whole = not given.short or not raced
            if whole:
                damage(night)
            print()
            print(night.ops("incidents", "list", "night"), end="")
            print(night.ops("incidents", "show", "1", "night"), end="\n\n")
            results = claims(night, raced=raced, whole=whole)
        except NotSo as error:
            night.follow()
            print(f"FAILED: {error}", flush=True)
            return 1
        except KeyboardInterrupt:
            print("\ninterrupted: all that was started is ended and removed", flush=True)
            return 130
        for text, so in results:
            print(f"  {'yes' if so else 'NO '}  {text}")
        wrong = sum(not so for _, so in results)
        took = time.monotonic() - night.began
        print(f"{len(results) - wrong} of {len(results)} shown in {took:.0f} s" + (f", {wrong} NOT" if wrong else ""))
        return 1 if wrong else 0


@contextlib.contextmanager
def _night() -> Iterator[Night]:
    with tempfile.TemporaryDirectory(prefix="dflash-night-", ignore_cleanup_errors=True) as folder:
        night = Night(Path(folder))
        try:
            yield night
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave half of it behind
            night.close()


if __name__ == "__main__":
    sys.exit(main())
