"""The operator's side of the resident: one job on one host, one exec a question.

The rule here: an answer is the resident's or it is an error. A machine that cannot be asked makes a snapshot in state
`unreachable`, a job that was never deployed one in state `unknown`; neither is a traceback.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_ops.contracts import JobSpec, Snapshot, State, dumps, from_dict
from dflash_ops.contracts.evidence import Evidence, decode
from dflash_ops.errors import BY_NAME, CommandFailed, ContractError, DflashError, HostError
from dflash_ops.hosts.base import Completed, Host
from dflash_ops.inventory import Job

#: Seconds for a question that reads some files, and for one that has a process start and look up.
ASK_S = 20.0
START_S = 90.0

#: Seconds for all texts of an attempt: its slow parts have deadlines of their own, and some MiB need their way.
EVIDENCE_S = 180.0

#: Seconds for the course of a job: a million lines of metrics take about half a minute of one core there.
HISTORY_S = 240.0

#: Seconds that a stop may take beyond its grace time: locks, KILL, waiting until nothing of the attempt lives.
STOP_MORE_S = 120.0

#: One exec for a status. The loop's snapshot.json is believed under the conditions of docs/resident.md (younger than
#: 3 s, its writer lives, no attempt began or ended since); else the resident looks anew. `$1` root, `$2` python: paths
#: are never part of the shell's text. A zombie has ended: init of a container may reap late or never. The first line
#: says that machine's clock and who answered. One process more than the shell, since a status is to take as long as a
#: bare `capture-pane`: `/proc/self/` is as old as the process that asks for it, so that one stat gives the clock and
#: the file's time.
LOOK = r"""
r="$1/run"; s="$r/snapshot.json"; z="$1/resident/current.pyz"; q= t= l=0;
n=$(stat -c %Y -- /proc/self/ "$s" 2>/dev/null); m=${n#*[!0-9]}; n=${n%%[!0-9]*}; [ -n "$n" ] || n=$(date +%s);
[ "$m" != "$n" ] || [ -f "$s" ] && a=$((n-m)) && [ $a -le 2 ] && [ $a -ge -2 ]
&& { read -r q < "$r/resident.json" || [ -n "$q" ]; } 2>/dev/null
&& q=${q#*\"pid\":} && q=${q# } && p=${q%%[!0-9]*}
&& { read -r x < "/proc/${p:-none}/stat"; } 2>/dev/null && x=${x##*) } && case "$x" in ''|[ZX]*) false;; esac
&& [ ! "$r/attempts" -nt "$s" ]
&& { for a in "$r"/attempts/*; do a=${a##*/};
case $a in *[!0-9]*) ;; *) [ "$a" -le "$l" ] || l=$a;; esac; done; [ ! "$r/attempts/$l/exit.json" -nt "$s" ]; }
&& { read -r t < "$s" || [ -n "$t" ]; } 2>/dev/null && { printf '%s file\n%s\n' "$n" "$t"; exit 0; };
[ -f "$z" ] || { printf '%s never\n' "$n"; exit 0; };
printf '%s asked\n' "$n"; exec "$2" -I -S "$z" snapshot --root "$1"
""".replace("\n", " ").strip()


#: How a line begins that is the resident's error.
_ERROR = b'{"schema":1,"error":'


@dataclass(frozen=True)
class Seen:
    """A snapshot and the time on the job's own machine when it was asked for: clocks differ, ages must not."""

    snapshot: Snapshot
    now: float
    deployed: bool = True

    @property
    def reachable(self) -> bool:
        return self.snapshot.state is not State.UNREACHABLE


@dataclass(frozen=True)
class History:
    """What `resident history` told (docs/contracts.md): `head`, and an object for each attempt, oldest first."""

    head: dict[str, Any]
    attempts: tuple[dict[str, Any], ...]


class JobClient:
    """One job on one host.

    Args:
        host: the way to the machine.
        job: the job as the inventory has it.
        python: the Python on that machine that runs the resident.
        resident: which one of those that are there; `current` is what the last deploy used.
    """

    def __init__(self, host: Host, job: Job, python: str = "python3", resident: str = "current") -> None:
        self.host = host
        self.job = job
        self.python = python
        self._resident = resident
        self._lost: float | None = None

    @property
    def pyz(self) -> str:
        return f"{self.job.root}/resident/{self._resident}.pyz"

    def snapshot(self, *, deadline: float = ASK_S) -> Seen:
        """State now, in one exec. A host error becomes state `unreachable`, since the first one of this client.

        Raises:
            DflashError: the resident refuses (damaged state), or what it says cannot be understood.
        """
        try:
            return self.seen(deadline=deadline)
        except HostError as error:
            return self.unreachable(error)

    def seen(self, *, deadline: float = ASK_S) -> Seen:
        """As `snapshot`, where a machine that cannot be reached is an error.

        Raises:
            HostError, and as `snapshot`.
        """
        argv = ["sh", "-c", LOOK, "sh", self.job.root, self.python]
        done = self.host.run(argv, deadline=deadline)
        self._lost = None
        head, _, rest = done.text.partition("\n")
        clock, _, how = head.partition(" ")
        if not clock.isdigit() or how not in ("file", "asked", "never"):
            raise self._strange(done, "look at the job")
        if how == "never":
            return Seen(_never(self.job.name, float(clock)), float(clock), deployed=False)
        if how == "file":
            said = _object(rest)
            if said is None:
                raise ContractError(
                    f"{self.job.root}/run/snapshot.json is no JSON object",
                    self.host.name,
                    "ask again in some seconds: one that grows old is made anew; if it stays so, see run/resident.log",
                )
            snapshot = self._understood(said, "run/snapshot.json")
        else:
            asked = Completed(done.argv, done.rc, rest.encode(), done.stderr)
            told = answer(asked, self.host.name, self.python, "ask the resident")
            snapshot = self._understood(told, "snapshot")
        # whole seconds only from `date`: the snapshot's own time may be a little later
        return Seen(snapshot, max(float(clock), snapshot.t))

    def unreachable(self, error: HostError) -> Seen:
        """The state that a host error means."""
        now = time.time()
        self._lost = self._lost if self._lost is not None else now
        detail = error.what + (f" ({error.where})" if error.where else "")
        return Seen(Snapshot(self.job.name, now, State.UNREACHABLE, self._lost, detail), now)

    def follow(self, *, idle: float = 15.0, forever: bool = False) -> Iterator[Seen]:
        """Snapshots as they come, one a second; ends with the job, unless it is to go on `forever`.

        Raises:
            HostError: the way to the machine was lost, or nothing came for `idle` seconds.
            CommandFailed: the resident failed.
        """
        return self._follow("follow", idle=idle, forever=forever)

    def _follow(self, command: str, *, idle: float, forever: bool) -> Iterator[Seen]:
        last: Snapshot | None = None
        for raw in self._stream(command, *(["--forever"] if forever else []), idle=idle):
            said = _object(raw.decode("utf-8", "replace"))
            if said is None:
                raise ContractError(f"`follow` said something that is no JSON object: {raw[:200]!r}", self.host.name)
            snapshot = self._understood(said, "follow")
            if last is not None and not snapshot.curves and snapshot.attempt == last.attempt:
                snapshot = replace(snapshot, curves=last.curves)  # said in the first line and when they changed
            last, self._lost = snapshot, None
            now = said.get("now")
            yield Seen(snapshot, max(float(now), snapshot.t) if isinstance(now, (int, float)) else snapshot.t)

    def logs(
        self, *, follow: bool = False, worker: str | None = None, attempt: int | None = None, lines: int = 100
    ) -> Iterator[bytes]:
        """Lines of the job's output, without newline; with `follow` also those to come.

        Raises:
            HostError, CommandFailed: as `follow`.
        """
        options = ["--lines", str(lines)]
        options += ["--worker", worker] if worker is not None else []
        options += ["--attempt", str(attempt)] if attempt is not None else []
        options += ["--follow"] if follow else []
        # A trainer may be silent for long; the way to the machine has its own watch over a dead peer.
        return self._stream("logs", *options, idle=6 * 3600.0 if follow else 60.0)

    def evidence(self, attempt: int | None = None, *, mib: float = 16.0, gpu: bool = True) -> Evidence:
        """All texts of an attempt (None: the newest), in one exec; `mib` = how much of the log's end.

        Raises:
            UsageError: nothing was ever started, or no such attempt.
            HostError, CommandFailed: as `ask`. ContractError: the answer is cut, or of another version.
        """
        options = ["--mib", f"{mib:g}"]
        options += ["--attempt", str(attempt)] if attempt is not None else []
        options += [] if gpu else ["--no-gpu"]
        done = self.host.run(self._argv("evidence", *options), deadline=EVIDENCE_S)
        self._refuse_undeployed(done.rc, done.error_text)
        if done.rc == 0 and not done.stdout.startswith(_ERROR):
            return decode(done.stdout, self._where)
        try:
            answer(done, self.host.name, self.python, "gather the job's texts")
        except DflashError as error:
            if "no command 'evidence'" in error.what:
                raise CommandFailed(
                    "the resident there is older than this dflash-ops and cannot gather a job's texts",
                    self._where,
                    f"dflash-ops logs {shlex.quote(self.job.name)} --lines 100000 | dflash-ops triage -",
                ) from None
            raise
        raise self._strange(done, "gather the job's texts")

    def history(self, attempt: int | None = None, *, every: bool = False, points: int = 400) -> History:
        """The course of one attempt (None: the newest), or with `every` of all, in one exec.

        Raises:
            UsageError: nothing was ever started, or no such attempt.
            HostError, CommandFailed: as `ask`. ContractError: the answer is cut, or of another version.
        """
        options = ["--points", str(points)]
        options += ["--attempt", str(attempt)] if attempt is not None else []
        options += ["--all"] if every else []
        done = self.host.run(self._argv("history", *options), deadline=HISTORY_S)
        self._refuse_undeployed(done.rc, done.error_text)
        lines = [_object(line) for line in done.text.splitlines()]
        if done.rc == 0 and len(lines) > 2 and None not in lines:
            head, *told, end = [line for line in lines if line is not None]
            if head.get("kind") == "history" and head.get("schema") == 1 and end.get("attempts") == len(told):
                return History(head, tuple(told))
        try:
            answer(done, self.host.name, self.python, "read the course of the job")
        except DflashError as error:
            if "no command 'history'" in error.what:
                raise CommandFailed(
                    "the resident there is older than this dflash-ops and cannot tell a job's course",
                    self._where,
                    f"dflash-ops deploy {shlex.quote(self.job.name)} sends a newer one",
                ) from None
            raise
        raise ContractError("the course of the job came in part only, or in another form", self._where, "ask again")

    def start(self, spec: JobSpec) -> dict[str, Any]:
        """Start an attempt; the answer names it.

        Raises:
            JobBusy, StartError, UsageError: as the resident says.
        """
        return self.ask("start", stdin=dumps(spec).encode() + b"\n", deadline=START_S)

    def stop(self, *, grace: float, reason: str = "", actor: str = "operator") -> dict[str, Any]:
        """TERM, wait `grace` seconds, KILL; the answer says how it ended."""
        options = ["--grace", f"{grace:g}", "--reason", reason, "--actor", actor]
        return self.ask("stop", *options, deadline=grace + STOP_MORE_S)

    def activate(self, release: str, *, actor: str = "operator") -> dict[str, Any]:
        """Switch `current` to a release that is there whole."""
        return self.ask("activate", "--release", release, "--actor", actor)

    def aside(self, *, reason: str = "", actor: str = "operator") -> dict[str, Any]:
        """Set the checkpoints aside, whole, with a manifest."""
        options = ["--reason", reason, "--actor", actor, "--checkpoints", self.job.checkpoints]
        return self.ask("aside", *options, deadline=600.0)

    def record(
        self, event: str, data: Mapping[str, Any], *, actor: str = "operator", attempt: int | None = None
    ) -> dict[str, Any]:
        """Write one event into the job's journal."""
        options = ["--event", event, "--actor", actor]
        options += ["--attempt", str(attempt)] if attempt is not None else []
        return self.ask("record", *options, stdin=json.dumps(data).encode() + b"\n")

    def attempts(self) -> dict[str, Any]:
        return self.ask("attempts")

    def ask(self, command: str, *options: str, stdin: bytes | None = None, deadline: float = ASK_S) -> dict[str, Any]:
        """One command of the resident, its JSON answer.

        Raises:
            DflashError: what the resident said, as the class that it named; HostError.
            CommandFailed: never deployed, or no answer.
        """
        done = self.host.run(self._argv(command, *options), deadline=deadline, stdin=stdin)
        self._refuse_undeployed(done.rc, done.error_text)
        return answer(done, self.host.name, self.python, f"ask the resident to {command}")

    def _understood(self, said: Any, what: str) -> Snapshot:
        """A snapshot from its JSON, with the inventory's name of the job: before its first start the resident has none.

        Raises:
            ContractError: it is of another form.
        """
        try:
            return replace(from_dict(Snapshot, said, f"{self._where}, {what}"), job=self.job.name)
        except ContractError as error:
            error.next = error.next or f"the resident there is of another version: dflash-ops deploy {self.job.name}"
            raise

    def _stream(self, command: str, *options: str, idle: float) -> Iterator[bytes]:
        """Lines of a command of the resident; an error as its last line is raised as the class that it names."""
        said: Mapping[str, Any] | None = None
        try:
            for raw in self.host.stream(self._argv(command, *options), idle=idle):
                if (
                    raw.startswith(_ERROR)
                    and (said := _error(_object(raw.decode("utf-8", "replace")) or {})) is not None
                ):
                    continue  # kept back: whether it is the resident's or a trainer's own line, the exit code says
                yield raw
        except CommandFailed as failed:
            if said is not None:
                raise rebuilt(said, self.host.name) from None
            self._refuse_undeployed(failed.rc, failed.stderr)
            raise
        if said is not None:
            yield json.dumps({"schema": 1, "error": said}).encode()

    def _refuse_undeployed(self, rc: int, stderr: str) -> None:
        """Python's own words for a resident that is not there.

        Raises:
            CommandFailed: they are these.
        """
        if rc == 2 and "can't open file" in stderr:
            raise CommandFailed(
                f"job {self.job.name} was never deployed", self._where, f"dflash-ops deploy {self.job.name}", rc=2
            )

    @property
    def _where(self) -> str:
        return f"{self.host.name}: {self.job.root}"

    def _argv(self, command: str, *options: str) -> Sequence[str]:
        return (self.python, "-I", "-S", self.pyz, command, "--root", self.job.root, *options)

    def _strange(self, done: Completed, tried: str) -> DflashError:
        text = (done.error_text or done.text).strip()[-500:]
        return CommandFailed(
            f"could not {tried}: exit code {done.rc}" + (f"\n{text}" if text else ""),
            self._where,
            "a shell with date, stat and cat is needed there; `dflash-ops doctor` checks the machine",
            rc=done.rc,
            stderr=done.error_text,
        )


def _never(job: str, now: float) -> Snapshot:
    return Snapshot(job, now, State.UNKNOWN, now, f"never deployed: dflash-ops deploy {job}")


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _error(said: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The error in an answer. A snapshot has an `error` as well, the trainer's; only ours names its class."""
    error = said.get("error")
    return error if isinstance(error, dict) and "type" in error else None


def answer(done: Completed, host: str, python: str, tried: str) -> dict[str, Any]:
    """The JSON object on the last line of standard output; an error in it is raised as the class it names.

    Raises:
        DflashError: as said by the other side; CommandFailed where it said nothing that can be understood.
    """
    last = done.text.strip().rpartition("\n")[2]
    said = _object(last)
    if said is not None and (error := _error(said)) is not None:
        raise rebuilt(error, host)
    if done.rc == 0 and said is not None:
        return said
    if done.rc in (126, 127):
        there = "there is no" if done.rc == 127 else "it may not run"
        raise CommandFailed(
            f"could not {tried}: {there} {python}",
            host,
            "install python3 there, or name it as `python` of the host in the inventory",
            rc=done.rc,
            stderr=done.error_text,
        )
    if done.rc == 0:
        raise ContractError(f"could not {tried}: the answer is no JSON object: {last[:200]!r}", host, "deploy again")
    tail = done.error_text.strip()[-2000:] or done.text.strip()[-500:]
    raise CommandFailed(
        f"could not {tried}: exit code {done.rc}" + (f"\n{tail}" if tail else ""),
        host,
        "read the lines above; `dflash-ops doctor` checks the machine",
        rc=done.rc,
        stderr=done.error_text,
    )


def rebuilt(error: Mapping[str, Any], host: str) -> DflashError:
    """An error said as JSON, as the exception it was there."""
    what = str(error.get("what", "an error without text"))
    where = str(error.get("where") or "")
    cls = BY_NAME.get(str(error.get("type", "")), CommandFailed)
    return cls(what, f"{host}: {where}" if where else host, str(error.get("next") or ""))
