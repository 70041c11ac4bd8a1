"""A deploy from its first question to a trainer that runs (docs/deploy.md).

The rule here: a running job is touched last. Everything that can be refused (arguments, the machine, the config, the
data, the checkpoint) is refused before the first change that a person would notice; `current` is switched by rename.
"""

from __future__ import annotations

import secrets
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_ops.client import JobClient, Seen
from dflash_ops.contracts import JobSpec, State, from_dict, to_dict
from dflash_ops.deploy import boot, spec
from dflash_ops.deploy.decide import Options, Steps, busy, decide, describe, refusal
from dflash_ops.deploy.release import Built, tar_bytes, tar_end, tar_stream
from dflash_ops.errors import DflashError, PreflightError, StartError
from dflash_ops.hosts.base import Host
from dflash_ops.inventory import Job
from dflash_ops.resident.preflight import Check, Request
from dflash_ops.resident.probe import Probe
from dflash_ops.view.stages import Stage, Stages
from dflash_ops.view.stopped import stopped_text
from dflash_ops.view.text import counted, size

PROBE_S = 60.0
PREFLIGHT_S = 600.0

#: Slowest way to the machine for which an upload is waited, bytes a second.
SLOWEST = 50_000

#: Seconds for which a new attempt is watched for an end at once.
WATCH_S = 3.0
WATCH_EVERY_S = 0.25


@dataclass(frozen=True)
class Pack:
    """The resident's zipapp."""

    id: str
    content: bytes

    @property
    def sha256(self) -> str:
        import hashlib

        return hashlib.sha256(self.content).hexdigest()


def build_pack() -> Pack:
    from dflash_ops.deploy.zipapp import build_resident

    with tempfile.TemporaryDirectory(prefix="dflash-resident-") as folder:
        place = Path(folder) / "resident.pyz"
        id = build_resident(place)
        return Pack(id, place.read_bytes())


@dataclass
class Result:
    """What came of a deploy; the fields of `deploy --json`."""

    job: str
    host: str
    plan: bool
    release: str | None = None
    resident: str = ""
    files: int = 0
    bytes: int = 0
    checks: tuple[Check, ...] = ()
    refused: list[str] = field(default_factory=list)
    replaced: dict[str, Any] | None = None
    aside: dict[str, Any] | None = None
    attempt: int | None = None
    state: str | None = None
    devices: dict[str, list[str]] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, "kind": "deploy", **to_dict(self)}


class Deployment:
    """One deploy of one job.

    Args:
        host, python: the job's machine and the Python there that runs the resident.
        environ: where the job's secrets are looked up.
    """

    def __init__(
        self, host: Host, job: Job, options: Options, stages: Stages, *, python: str, environ: Mapping[str, str]
    ) -> None:
        self.host, self.job, self.options, self.stages, self.python = host, job, options, stages, python
        self.environ = environ
        self.client = JobClient(host, job, python)
        self.result = Result(job.name, host.name, options.plan, overrides=dict(job.overrides))
        self.where = f"{host.name}: {job.root}"
        self._refusals: list[DflashError] = []
        self._touched = ""

    def run(self) -> Result:
        """All stages in order.

        Raises:
            JobBusy, PreflightError: refused, nothing changed (with `plan`: after everything was said).
            ReleaseError, TransferError, StartError, HostError, ...: as each stage's text says.
        """
        pack, built, config, job_secrets = self._plan()
        probe = self._connect(pack, built)
        steps = decide(probe)
        self._refuse(busy(probe, self.options, self.job.name, self.where))
        try:
            self._send(pack, built, steps)
        except PreflightError as error:
            # The place cannot be written. What else is wrong is asked as well, so that it is all told at once.
            _, checks = self._preflight(pack, built, config, job_secrets, probe, steps, sent=False)
            raise refusal(tuple(checks), self.where) or error from error
        job_spec, checks = self._preflight(pack, built, config, job_secrets, probe, steps, sent=not self.options.plan)
        self.result.checks = tuple(checks)
        self._refuse(refusal(self.result.checks, self.where))
        if self.options.plan:
            self._say_plan(probe, steps)
            if self._refusals:
                raise self._refusals[0]
            return self.result
        self._use(pack)
        self._stop(probe, steps)
        self._aside()
        self._start(job_spec, stopped=steps.stop)
        return self.result

    def interrupted(self) -> str:
        """What a person who pressed Ctrl-C in the middle of `run` needs to know."""
        job = shlex.quote(self.job.name)
        if not self._touched:
            return f"interrupted: the job {job} was not touched"
        return f"interrupted while it was being {self._touched}; what is true now: dflash-ops status {job}"

    def _refuse(self, error: DflashError | None) -> None:
        if error is not None and not self.options.plan:
            raise error
        if error is not None:
            self._refusals.append(error)
            self.result.refused += [e.what for e in getattr(error, "errors", (error,))]

    # -- stages --------------------------------------------------------------------------------------------------

    def _plan(self) -> tuple[Pack, Built | None, spec.Config | None, dict[str, str]]:
        with self.stages.stage("plan", "reading the release") as stage:
            job_secrets = self.job.secrets(self.environ)
            config = spec.run_config(self.job)
            built = spec.build_release(self.job)
            pack = build_pack()
            self.result.resident = pack.id
            if self.job.trainer is not None:
                self.result.devices = {
                    "target": list(self.job.trainer.target_devices),
                    "drafter": list(self.job.trainer.drafter_devices),
                }
            if built is None:
                stage.done("no release: the command is there already")
            else:
                self.result.release = built.release.id
                count = counted(len(built.release.files), "file")
                stage.done(f"release {built.release.id}: {count}, {size(built.bytes)}, {built.release.source}")
        return pack, built, config, job_secrets

    def _connect(self, pack: Pack, built: Built | None) -> Probe:
        request = {
            "root": self.job.root,
            "release": to_dict(built.release) if built else None,
            "resident": pack.id,
        }
        with self.stages.stage("connect", f"asking {self.host.name} what is there") as stage:
            said = boot.call(
                self.host, self.python, pack.content, "dflash_ops.resident.probe", request, deadline=PROBE_S
            )
            probe = from_dict(Probe, said, "probe")
            state = describe(probe.snapshot, probe.now) if probe.snapshot is not None else "nothing was started yet"
            stage.done(f"{self.host.name} ({probe.machine}, Python {probe.python}): {state}")
        if probe.release == "damaged":
            self.stages.note(f"release {self.result.release} is damaged there: {', '.join(probe.damaged)}; sent anew")
        return probe

    def _send(self, pack: Pack, built: Built | None, steps: Steps) -> None:
        send = built if steps.send_release else None
        self.result.files = len(send.release.files) if send else 0
        self.result.bytes = (send.bytes if send else 0) + (len(pack.content) if steps.send_resident else 0)
        parts = [f"resident {pack.id}"] if steps.send_resident else []
        parts += [f"release {send.release.id} ({counted(len(send.release.files), 'file')})"] if send else []
        what = f"{' and '.join(parts)}, {size(self.result.bytes)}" if parts else "everything is there already"
        if self.options.plan:
            self.stages.note(f"send: would send {what}" if parts else f"send: {what}")
            return
        with self.stages.stage("send", what) as stage:
            if parts:
                self._transfer(pack, send, steps, stage)
            stage.done(what)

    def _transfer(self, pack: Pack, send: Built | None, steps: Steps, stage: Stage) -> None:
        request = {
            "root": self.job.root,
            "token": secrets.token_hex(4),
            "release": to_dict(send.release) if send else None,
            "resident": {"id": pack.id, "size": len(pack.content), "sha256": pack.sha256}
            if steps.send_resident
            else None,
        }

        def payload() -> Iterator[bytes]:
            if steps.send_resident:
                yield from tar_bytes("resident", pack.content)
            if send is not None:
                yield from tar_stream(send, "release")
            yield tar_end()

        total = (send.stream_bytes if send else 0) + (len(pack.content) if steps.send_resident else 0)
        boot.call(
            self.host,
            self.python,
            pack.content,
            "dflash_ops.resident.receive",
            request,
            deadline=PROBE_S + total / SLOWEST,
            payload=payload(),
            on_bytes=lambda sent: stage.bytes(min(sent, total), total),
        )

    def _preflight(
        self,
        pack: Pack,
        built: Built | None,
        config: spec.Config | None,
        job_secrets: Mapping[str, str],
        probe: Probe,
        steps: Steps,
        *,
        sent: bool,
    ) -> tuple[JobSpec, list[Check]]:
        pending = None if sent or not steps.send_release else built
        trainer = self.job.trainer

        def spec_for(config_name: str) -> JobSpec:
            return spec.job_spec(
                self.job,
                built.release.id if built else None,
                config,
                config_name,
                job_secrets,
                reason=self.options.reason,
                actor=self.options.actor,
            )

        request = Request(
            spec=spec_for("run.toml"),
            interpreter=self.job.interpreter,
            bundled=trainer is not None,
            config_toml=config.toml if config else "",
            config_json=config.json if config else "",
            send_files=len(pending.release.files) if pending else 0,
            send_bytes=pending.bytes if pending else 0,
            devices=(*trainer.target_devices, *trainer.drafter_devices) if trainer else (),
            targets=len(trainer.target_devices) if trainer else 0,
            requires=dict(spec.REQUIRES) if trainer else {},
            begin=self.options.begin,
            pid=probe.launcher,
            touch=sent and not self.options.plan,
        )
        text = "interpreter, imports, devices, disk, memory, config, data"
        with self.stages.stage("preflight", text) as stage:
            said = boot.call(
                self.host,
                self.python,
                pack.content,
                "dflash_ops.resident.preflight",
                to_dict(request),
                deadline=PREFLIGHT_S,
            )
            checks = [from_dict(Check, c, "preflight check") for c in said["checks"]]
            counts = {s: sum(c.status == s for c in checks) for s in ("ok", "warn", "failed", "skipped")}
            parts = [f"{n} {word}" for word, n in counts.items() if n or word == "ok"]
            stage.done(", ".join(parts))
        for check in checks:
            if self.options.plan or check.status == "warn":
                mark = "" if check.status == "ok" else f"{check.status}: "
                self.stages.note(f"  {check.name:<12} {mark}{check.what}" + (f"; {check.next}" if check.next else ""))
        return spec_for(str(said.get("config_name", "run.toml"))), checks

    def _say_plan(self, probe: Probe, steps: Steps) -> None:
        say = self.stages.note
        if steps.stop:
            grace = self.options.grace_s or self.job.grace_s
            running = describe(probe.snapshot, probe.now)
            verb = "would stop" if self.options.replace else "would refuse:"
            say(f"stop: {verb} {running}" + (f" (TERM, KILL after {grace:g} s)" if self.options.replace else ""))
        if self.options.begin == "fresh":
            say("aside: would set the checkpoints aside, whole")
        if self.result.release is not None:
            say(f"activate: current -> {self.result.release} (now: {probe.current or 'nothing'})")
        for role, devices in self.result.devices.items():
            say(f"devices: {role} {', '.join(devices)}")
        for key, value in self.result.overrides.items():
            say(f"override: {key} = {value}")
        say("start: would start a new attempt" if not self._refusals else "start: would be refused, as said below")

    def _stop(self, probe: Probe, steps: Steps) -> None:
        if not steps.stop:
            return
        self._touched = "stopped"
        grace = self.options.grace_s or self.job.grace_s
        text = f"{describe(probe.snapshot, probe.now)}: save and stop, up to {grace:g} s"
        with self.stages.stage("stop", text) as stage:
            reason = self.options.reason or "replaced by a new deploy"
            self.result.replaced = self.client.stop(grace=grace, reason=reason, actor=self.options.actor)
            stage.done(stopped_text(self.result.replaced, self.client.snapshot().snapshot))

    def _aside(self) -> None:
        if self.options.begin != "fresh":
            return
        self._touched = "made fresh"
        with self.stages.stage("aside", "setting the checkpoints aside") as stage:
            reason = self.options.reason or "deploy --fresh"
            self.result.aside = self.client.aside(reason=reason, actor=self.options.actor)
            moved = self.result.aside.get("to")
            stage.done(f"checkpoints set aside: {moved}" if moved else "there were no checkpoints")

    def _start(self, job_spec: JobSpec, *, stopped: bool) -> None:
        self._touched = "started"
        with self.stages.stage("start", "switching the release, starting the session") as stage:
            try:
                self.client.record("deployed", self._deployed(), actor=self.options.actor)
                if job_spec.release is not None:
                    self.client.activate(job_spec.release, actor=self.options.actor)
                stage.say("waiting for the launcher")
                started = self.client.start(job_spec)
            except DflashError as error:
                if stopped:
                    error.next = f"{error.next}; the old attempt is stopped: deploy again to go on".lstrip("; ")
                raise
            self.result.attempt = int(started["attempt"])
            stage.say(f"attempt {self.result.attempt} runs; watching its first seconds")
            seen = self._watch(self.result.attempt)
            self.result.state = seen.snapshot.state.value
            self._judge(seen)
            stage.done(f"attempt {self.result.attempt}: {seen.snapshot.state.value}")

    def _use(self, pack: Pack) -> None:
        """`resident/current.pyz` -> this resident: everything from here on is asked through it."""
        request = {"root": self.job.root, "token": secrets.token_hex(4), "use": pack.id}
        boot.call(self.host, self.python, pack.content, "dflash_ops.resident.receive", request, deadline=PROBE_S)

    def _deployed(self) -> dict[str, Any]:
        return {
            "release": self.result.release,
            "resident": self.result.resident,
            "overrides": self.result.overrides,
            "devices": self.result.devices,
            "begin": self.options.begin,
            "reason": self.options.reason,
        }

    def _watch(self, attempt: int) -> Seen:
        """The state after a few seconds, or as soon as the attempt has ended or makes steps."""
        end = time.monotonic() + WATCH_S
        while True:
            seen = self.client.snapshot()
            snapshot = seen.snapshot
            ours = snapshot.attempt == attempt
            stepping = snapshot.state in (State.STEPPING, State.SLOW)
            if (ours and (snapshot.exit is not None or stepping)) or time.monotonic() >= end:
                return seen
            time.sleep(WATCH_EVERY_S)

    def _judge(self, seen: Seen) -> None:
        """A trainer that failed at once is an error that shows its last words.

        Raises:
            StartError: it ended by itself with a failure.
        """
        snapshot = seen.snapshot
        if snapshot.state is not State.CRASHED:
            return
        how = snapshot.exit.describe() if snapshot.exit is not None else snapshot.detail
        lines = [line.decode("utf-8", "replace") for line in self.client.logs(attempt=self.result.attempt, lines=15)]
        text = "\n".join(line for line in lines if line.strip())
        first = f"; first cause in {snapshot.error.worker}: {snapshot.error.message}" if snapshot.error else ""
        raise StartError(
            f"attempt {self.result.attempt} ended at once: {how}{first}\n{text}",
            f"{self.where}/run/attempts/{self.result.attempt}/log",
            f"see the cause: dflash-ops triage --job {self.job.name}; then: dflash-ops deploy {self.job.name}",
        )
