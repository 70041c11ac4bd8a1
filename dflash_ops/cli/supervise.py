"""`dflash-ops supervise`: watch jobs from outside their containers, for what cannot be seen from inside."""

from __future__ import annotations

import contextlib
import hashlib
import json as json_
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops.cli.common import InventoryOption, console, is_plain, print_json, render_error
from dflash_ops.cli.several import AllOption, JobsArgument, chosen
from dflash_ops.errors import DflashError, JobBusy
from dflash_ops.fleet.ask import Answer, Asking

if TYPE_CHECKING:
    from rich.table import Table

    from dflash_ops.collect.kernel import KernelHost
    from dflash_ops.hosts.base import Host
    from dflash_ops.hosts.factory import Hosts
    from dflash_ops.inventory import Inventory, Job
    from dflash_ops.supervise.outside import Change, Look, Memory
    from dflash_ops.triage.playbook import Playbooks

#: Seconds that a notification may take before a run with --once ends without it.
_NOTIFY_S = 35.0


def command(
    job: JobsArgument = None,
    every: AllOption = False,
    once: Annotated[bool, typer.Option("--once", help="One look, for cron: what is news, and the exit code.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=1, max=3600, help="Between two looks.")
    ] = 15.0,
    notify: Annotated[
        str | None,
        typer.Option(
            "--notify",
            metavar="FILE",
            envvar="DFLASH_NOTIFY",
            help="apprise's config file on this machine; without it apprise's own APPRISE_URLS counts.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object for each change.")] = False,
    inventory: InventoryOption = None,
) -> int:
    """Watch from outside: host unreachable, container stopped, resident dead, kernel log. Each change is said once."""
    from dflash_ops.fleet.jobs import machine_of
    from dflash_ops.hosts.factory import Hosts

    loaded, jobs = chosen(inventory, job, every)
    parts = [part for one in jobs for part in one.parts]
    with Hosts(loaded) as hosts:
        watches = [Watch(loaded, hosts, part, notify or "") for part in parts]
        asking = Asking(
            watches,
            Watch.look,
            machine=lambda watch: machine_of(loaded, watch.job),
            name=lambda watch: f"job {watch.label}",
            every=None if once else interval,
        )
        try:
            return _watch(watches, asking, once=once, as_json=json)
        finally:
            for watch in watches:
                watch.close()


def _watch(watches: list[Watch], asking: Asking[Watch, list[str]], *, once: bool, as_json: bool) -> int:
    """All are looked at side by side, each at its own pace: what is away delays the look at nothing else."""
    if once or as_json or is_plain(sys.stdout):
        faults = 0
        for event in asking:
            if isinstance(event, Answer):
                for text in event.ended.value or ():
                    if as_json:
                        print_json(watches[event.index].to_json(text))
                    else:
                        print(text, flush=True)
                if event.ended.error is not None:
                    faults = max(faults, event.ended.error.exit_code)
                    render_error(event.ended.error, sys.stderr)
        return max(faults, *(watch.code for watch in watches))
    from rich.live import Live

    news: list[str] = []
    with Live(_table(watches, news), console=console(), auto_refresh=False) as live:
        for event in asking:
            if isinstance(event, Answer):
                error = event.ended.error
                said = event.ended.value or ([] if error is None else [f"{watches[event.index].label}: {error}"])
                news = [*news, *said][-8:]
                live.update(_table(watches, news), refresh=True)
    return max(watch.code for watch in watches)


def _table(watches: list[Watch], news: list[str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from dflash_ops.view.text import clean

    out = Table(box=None, pad_edge=False, header_style="bright_black", caption_justify="left")
    for head in ("job", "host", "state", "since", "lease"):
        out.add_column(head)
    for watch in watches:
        out.add_row(*(clean(word) for word in watch.row()))
    if news:
        out.caption = Text("\n".join(clean(text) for text in news))
    return out


class Watch:
    """One job (or node), its memory between looks and between runs, and what came of the last look.

    Raises:
        JobBusy: another `supervise` on this machine watches it. OSError: its folder cannot be written.
    """

    def __init__(self, loaded: Inventory, hosts: Mapping[str, Host] | Hosts, job: Job, notify: str) -> None:
        from dflash_ops.resident.files import flock

        self._loaded, self._hosts, self.job, self._notify = loaded, hosts, job, notify
        self.code = 0
        self._fault = ""
        self._at = _state_folder() / _name(loaded, job)
        self._at.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(self._at / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not flock(self._lock, 0.0):
            os.close(self._lock)
            raise JobBusy(f"another supervise watches {job.name}", str(self._at), "one is enough; end the other first")
        self._memory = self._load()
        self._senders: list[threading.Thread] = []
        self._playbooks: Playbooks | None = None

    def look(self) -> list[str]:
        """One look and what follows from it: lines for people."""
        from dflash_ops.collect.outside import look
        from dflash_ops.contracts import clock
        from dflash_ops.supervise.outside import changes, conditions

        try:
            host = self._hosts[self.job.host]
            seen = look(host, self.job, self._below(), self._memory)
        except DflashError as error:
            self.code = max(1, error.exit_code)
            said = self._once(f"cannot be judged: {error.what}")
            return [f"{clock(time.time())} {self.label}: {text}" for text in said]
        self._memory, news = changes(self._memory, seen)
        now = conditions(seen)
        self.code = 5 if seen.fault == "unreachable" else 1 if now else 0
        said, fault = [], ""
        try:
            said = self._act(seen)
            self._save()
        except OSError as error:  # what cannot be written down is not done; a later run says again what was said
            fault = f"{error.filename or self._at} cannot be written: {error.strerror}"
        except DflashError as error:
            fault = error.what
        if fault:
            self.code = max(1, self.code)
            said += [text if said else f"nothing is done: {text}" for text in self._once(fault)]
        else:
            self._fault = ""
        self._tell(news, said)
        texts = [f"{clock(c.t)} {self.label}: {c.text}" for c in news]
        return [*texts, *(f"{clock(seen.t)} {self.label}: {text}" for text in said)]

    def _once(self, fault: str) -> list[str]:
        """What keeps it from judging or doing, said once while it lasts."""
        known, self._fault = self._fault == fault, fault
        return [] if known else [fault]

    def row(self) -> tuple[str, str, str, str, str]:
        """Job, host, state, since, lease."""
        from dflash_ops.contracts import clock
        from dflash_ops.supervise.outside import words

        m = self._memory
        state = ", ".join(map(words, m.since)) or (m.seen.state.value if m.seen else "-")
        since = min(m.since.values()) if m.since else m.seen.since if m.seen else 0.0
        return (self.label, self.job.host, state, clock(since) if since else "-", m.seen.lease if m.seen else "")

    def to_json(self, text: str) -> dict[str, object]:
        """One change as `--json` has it: who, what, and the exit code of the look that found it."""
        node = self.job.node.rank if self.job.node is not None else None
        said = {"job": self.job.name, "node": node, "host": self.job.host, "text": text, "exit": self.code}
        return {"schema": 1, "kind": "supervise", "t": time.time(), **said}

    def close(self) -> None:
        """Waits for notifications on their way, then lets go."""
        end = time.monotonic() + _NOTIFY_S
        for sender in self._senders:
            sender.join(max(0.0, end - time.monotonic()))
        os.close(self._lock)

    @property
    def label(self) -> str:
        return self.job.name if self.job.node is None else f"{self.job.name} {self.job.label}"

    def _below(self) -> KernelHost:
        from dflash_ops.collect.kernel import KernelHost
        from dflash_ops.inventory import LxcHost

        at = self._loaded.host_of(self.job)
        return KernelHost(self._hosts[at.via], at.id) if isinstance(at, LxcHost) else KernelHost(self._hosts[at.name])

    def _act(self, seen: Look) -> list[str]:
        from dflash_ops.client import JobClient
        from dflash_ops.inventory import LxcHost
        from dflash_ops.tell.outside import Container, outside_pass, progress

        at = self._loaded.host_of(self.job)
        container = Container(self._hosts[at.via], at.id) if isinstance(at, LxcHost) else None
        if self.job.adopted:
            return []
        client = JobClient(self._hosts[self.job.host], self.job, at.python)
        record = self._at / "journal.jsonl"
        done: list[str] = []
        if container is None:
            progress(seen, record)
        else:
            done = outside_pass(
                seen, self._memory, self.job, container, self._books(), record, lambda: client.ask("snapshot")
            )
        return [*done, *self._mend(seen, record, at.python)]

    def _mend(self, seen: Look, record: Path, python: str) -> list[str]:
        """Of a crashed job: send again what is damaged there, where the owner allows it."""
        from dataclasses import replace

        from dflash_ops.tell.redeploy import Found, redeploy_pass, wanted

        if not wanted(seen, self._memory, self.job):
            return []
        from dflash_ops.collect.outside import look
        from dflash_ops.deploy.again import Again
        from dflash_ops.deploy.decide import Options
        from dflash_ops.view.stages import Silent

        assert seen.inside is not None
        host = self._hosts[self.job.host]
        mend = Again(host, self.job, Options(), Silent(), python=python, environ=os.environ)
        said = redeploy_pass(
            seen,
            self.job,
            self._books(),
            record,
            lambda: Found(*mend.inspect()),
            lambda: look(host, self.job, self._below(), self._memory).inside,
            mend.send,
        )
        if said is None:
            return []
        self._memory = replace(self._memory, inspected=seen.inside.attempt)
        return said

    def _books(self) -> Playbooks:
        if self._playbooks is None:
            from dflash_ops.collect.job import folders
            from dflash_ops.playbooks import load_documents
            from dflash_ops.triage import Triage

            self._playbooks = Triage(load_documents([*folders(self._loaded)])).playbooks
        return self._playbooks

    def _tell(self, news: tuple[Change, ...], said: list[str]) -> None:
        """Through apprise, not the same condition twice within the cooldown; nothing waits for it."""
        from dataclasses import replace

        from dflash_ops.resident.notify import deliver, program
        from dflash_ops.tell.outside import message

        if not self._notify and not os.environ.get("APPRISE_URLS"):
            return
        now, told = time.time(), dict(self._memory.notified)
        fresh = [
            c
            for c in news
            if c.alarm and not 0 <= now - told.get(f"{c.key}:{c.begun}", -1e9) < self.job.policy.cooldown_s
        ]
        texts = [*(c.text for c in fresh), *said]
        if not texts:
            return
        told.update({f"{c.key}:{c.begun}": now for c in fresh})
        self._memory = replace(self._memory, notified=told)
        with contextlib.suppress(OSError):  # said by `look`; people are told all the same
            self._save()
        title, text = message(self.label, texts)

        def send() -> None:
            if (failed := deliver(self._notify, title, text, program=program(sys.executable))) is not None:
                print(f"{self.label}: nobody was notified: {failed}", file=sys.stderr, flush=True)

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        self._senders = [*(s for s in self._senders if s.is_alive()), sender]

    def _load(self) -> Memory:
        from dflash_ops.contracts import from_dict
        from dflash_ops.errors import StateError
        from dflash_ops.supervise.outside import Memory

        path = self._at / "seen.json"
        try:
            return from_dict(Memory, json_.loads(path.read_text("utf-8")), str(path))
        except FileNotFoundError:
            return Memory()
        except (ValueError, DflashError) as error:
            raise StateError(
                f"what was seen before cannot be read: {error}", str(path), "move it away; then all is said anew"
            ) from error

    def _save(self) -> None:
        from dflash_ops.contracts import dumps
        from dflash_ops.resident.files import write_atomic

        write_atomic(self._at / "seen.json", dumps(self._memory).encode() + b"\n")


def reset_outside(loaded: Inventory, job: Job, reason: str, actor: str) -> bool:
    """Clear what `supervise` counted for this job on this machine; whether there was something.

    Raises:
        OSError, DflashError: its journal cannot be read or written.
    """
    from dflash_ops.resident import journal

    record = _state_folder() / _name(loaded, job) / "journal.jsonl"
    if not record.exists():
        return False
    journal.append(record, "supervise_reset", actor=actor, data={"reason": reason.strip()})
    return True


def _state_folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local/state")
    return Path(base) / "dflash-ops" / "supervise"


def _name(loaded: Inventory, job: Job) -> str:
    """A folder name for this job of this inventory."""
    whole = f"{Path(loaded.file).resolve()}\0{job.name}\0{job.node.rank if job.node else ''}"
    return hashlib.sha256(whole.encode()).hexdigest()[:16]
