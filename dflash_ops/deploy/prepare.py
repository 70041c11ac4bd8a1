"""The first half of a deploy: all that a running job does not notice (docs/deploy.md).

The rule here: everything that can be refused (arguments, the machine, the config, the data, the checkpoint) is refused
here, and all that is wrong is told at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dflash_ops.client import Seen
from dflash_ops.contracts import JobSpec, from_dict, to_dict
from dflash_ops.deploy import boot, spec
from dflash_ops.deploy.decide import Options, Steps, busy, clock, decide, describe, refusal
from dflash_ops.deploy.lock import read_lock
from dflash_ops.deploy.operation import Operation
from dflash_ops.deploy.release import Built
from dflash_ops.deploy.result import Result
from dflash_ops.deploy.transfer import Upload
from dflash_ops.deploy.window import window
from dflash_ops.errors import DflashError, PreflightError
from dflash_ops.hosts.base import Host
from dflash_ops.inventory import Job
from dflash_ops.resident.preflight import Check, Request
from dflash_ops.resident.probe import Probe
from dflash_ops.view.stages import Stage, Stages
from dflash_ops.view.text import counted, size

PROBE_S = 60.0
PREFLIGHT_S = 600.0

#: Seconds of silence of the maker of an environment: one large file may come slowly.
VENV_IDLE_S = 900.0


@dataclass(frozen=True)
class Ready:
    """What is known once everything was checked, and nothing has been touched."""

    built: Built | None
    probe: Probe
    steps: Steps
    request: Request
    config_name: str


class Preparation(Operation):
    """A deploy up to the point where something would be touched (see `Operation` for the other arguments).

    Args:
        build: makes the release, where several deployments send the same one; None: it is made here.
    """

    def __init__(
        self,
        host: Host,
        job: Job,
        options: Options,
        stages: Stages,
        *,
        python: str,
        environ: Mapping[str, str],
        build: Callable[[], Built | None] | None = None,
    ) -> None:
        super().__init__(host, job, stages, python=python, environ=environ)
        self._build = build or (lambda: spec.build_release(job))
        self.options = options
        self.result = Result(job.name, host.name, options.plan, overrides=dict(job.overrides))
        self.config: spec.Config | None = None
        self.lock: str | None = None
        self.clock: Check | None = None
        self._refusals: list[DflashError] = []
        #: What a person who pressed Ctrl-C needs to know; empty: nothing was touched.
        self.touched = ""
        self.ready: Ready
        self.seen: Seen | None = None
        #: Seconds that the clock there is ahead of ours.
        self.offset = 0.0

    def prepare(self) -> None:
        """All that a running job does not notice: ask, send, check. `ready` is what the next steps need.

        Raises:
            JobBusy, PreflightError, ...: refused, and with `plan` only kept for `say_plan`.
        """
        built = self._plan()
        # One exec asks, and takes what is lacking once all that can be refused by then was.
        with contextlib.ExitStack() as stack:
            probe, upload = self._connect(built, stack)
            steps = decide(probe, self.options, self._topology(), can_gate=self._can_gate())
            self._refuse(busy(probe, self.options, self.job.name, self.where))
            try:
                self._send(built, probe, steps, upload)
            except PreflightError as error:
                # The place cannot be written. What else is wrong is asked as well, so that it is all told at once.
                _, checks = self._preflight(self._request(built, probe, steps, sent=False))
                raise refusal(tuple(checks), self.where) or error from error
        self._venv(probe, steps)
        request = self._request(built, probe, steps, sent=not self.options.plan)
        config_name, checks = self._preflight(request)
        self.result.checks = tuple(checks)
        self.ready = Ready(built, probe, steps, request, config_name)
        self._refuse(refusal(self.result.checks, self.where))

    def _refuse(self, error: DflashError | None) -> None:
        if error is not None and not self.options.plan:
            raise error
        if error is not None:
            self._refusals.append(error)
            self.result.refused += [e.what for e in getattr(error, "errors", (error,))]

    def _topology(self) -> tuple[int, int] | None:
        trainer = self.job.trainer
        return (len(trainer.target_devices), len(trainer.drafter_devices)) if trainer is not None else None

    def _can_gate(self) -> bool:
        return (self.job.trainer is not None and self.job.source is None) or self.job.gate is not None

    def _plan(self) -> Built | None:
        with self.stages.stage("plan", "reading the release") as stage:
            self.secrets = self.job.secrets(self.environ)
            self.lock = read_lock(self.job)
            self.config = spec.run_config(self.job)
            built = self._build()
            self.result.resident = self.pack.id
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
        return built

    def _connect(self, built: Built | None, stack: contextlib.ExitStack) -> tuple[Probe, Upload]:
        venv = {"python": self.job.venv.python, "lock": self.lock} if self.job.venv is not None else None
        with self.stages.stage("connect", f"asking {self.host.name} what is there") as stage:
            before = time.time()
            upload = stack.enter_context(self.question(built, deadline=PROBE_S, venv=venv))
            probe = from_dict(Probe, upload.said, "probe")
            after = time.time()
            self.clock, self.offset = clock(probe.now, before, after), probe.now - (before + after) / 2
            state = describe(probe.snapshot, probe.now) if probe.snapshot is not None else "nothing was started yet"
            stage.done(f"{self.host.name} ({probe.machine}, Python {probe.python}): {state}")
        if probe.release == "damaged":
            self.stages.note(f"release {self.result.release} is damaged there: {', '.join(probe.damaged)}; sent anew")
        if probe.resident:
            self.found()
        if error := probe.venv.get("error"):
            raise PreflightError(str(error["what"]), f"{self.host.name}: {error['where']}", str(error["next"]))
        return probe, upload

    def _send(self, built: Built | None, probe: Probe, steps: Steps, upload: Upload) -> None:
        send = built if steps.send_release else None
        only = probe.lacking if send else ()
        self.result.files = len(only)
        self.result.kept = len(send.release.files) - len(only) if send else 0
        self.result.bytes = sum(send.release.files[i].size for i in only) if send else 0
        self.result.bytes += len(self.pack.content) if steps.send_resident else 0
        parts = [f"resident {self.pack.id}"] if steps.send_resident else []
        if send:
            some = f"{len(only)} of " if self.result.kept else ""
            parts.append(f"release {send.release.id} ({some}{counted(len(send.release.files), 'file')})")
        what = f"{' and '.join(parts)}, {size(self.result.bytes)}" if parts else "everything is there already"
        if self.options.plan:
            upload.end()
            self.stages.note(f"send: would send {what}" if parts else f"send: {what}")
            return
        with self.stages.stage("send", what) as stage:
            if parts:
                sent = upload.send(
                    release=send is not None, only=only, resident=steps.send_resident, on_bytes=stage.bytes
                )
                self.result.files, self.result.bytes, self.result.kept = sent.files, sent.bytes, sent.kept
            else:
                upload.end()
            stage.done(what)
        self.found()

    def _venv(self, probe: Probe, steps: Steps) -> None:
        """The environment that the lock file means; the job then runs in it."""
        if self.job.venv is None:
            return
        path = str(probe.venv["path"])
        self.result.venv = str(probe.venv["id"])
        name = f"environment {self.result.venv} (Python {probe.venv['python']})"
        if steps.make_venv and self.options.plan:
            self.stages.note(f"venv: would make {name}")
        elif steps.make_venv:
            with self.stages.stage("venv", f"making {name}") as stage:
                self._make_venv(stage)
                stage.done(name)
        env = self.job.env
        path_before = env.get("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        self.job = replace(
            self.job,
            interpreter=f"{path}/bin/python",
            env={**env, "PATH": f"{path}/bin:{path_before}", "VIRTUAL_ENV": path},
        )

    def _make_venv(self, stage: Stage) -> None:
        assert self.job.venv is not None
        request = {"root": self.job.root, "python": self.job.venv.python, "lock": self.lock}
        module = "dflash_ops.resident.venv"
        said = boot.follow(
            self.host, self.python, self.pack.content, module, request, idle=VENV_IDLE_S, at=self.at
        )  # fmt: skip
        for line in said:
            if "progress" in line:
                stage.say(str(line["progress"]))

    def _spec(self, built: Built | None, config_name: str) -> JobSpec:
        return spec.job_spec(
            self.job,
            built.release.id if built else None,
            self.config,
            config_name,
            self.secrets,
            reason=self.options.reason,
            actor=self.options.actor,
            watch_s=window(self, self.options.watch_s),
            playbooks=self.options.playbooks,
        )

    def _request(self, built: Built | None, probe: Probe, steps: Steps, *, sent: bool) -> Request:
        pending = None if sent or not steps.send_release else built
        trainer = self.job.trainer
        return Request(
            spec=self._spec(built, "run.toml"),
            interpreter=self.job.interpreter,
            bundled=trainer is not None,
            config_toml=self.config.toml if self.config else "",
            config_json=self.config.json if self.config else "",
            send_files=len(pending.release.files) if pending else 0,
            send_bytes=pending.bytes if pending else 0,
            devices=(*trainer.target_devices, *trainer.drafter_devices) if trainer else (),
            targets=len(trainer.target_devices) if trainer else 0,
            requires=dict(spec.REQUIRES) if trainer else {},
            begin=self.options.begin,
            pid=probe.launcher,
            touch=sent and not self.options.plan,
            venv_pending=steps.make_venv and not sent,
        )

    def _preflight(self, request: Request) -> tuple[str, list[Check]]:
        """The name under which the interpreter reads its config, and the checks."""
        with self.stages.stage("preflight", "interpreter, imports, devices, disk, memory, config, data") as stage:
            said = self.ask("preflight", to_dict(request), deadline=PREFLIGHT_S)
            checks = [from_dict(Check, c, "preflight check") for c in said["checks"]]
            checks += [self.clock] if self.clock is not None else []
            counts = {s: sum(c.status == s for c in checks) for s in ("ok", "warn", "failed", "skipped")}
            stage.done(", ".join(f"{n} {word}" for word, n in counts.items() if n or word == "ok"))
        for check in checks:
            if self.options.plan or check.status == "warn":
                mark = "" if check.status == "ok" else f"{check.status}: "
                self.stages.note(f"  {check.name:<12} {mark}{check.what}" + (f"; {check.next}" if check.next else ""))
        return str(said.get("config_name", "run.toml")), checks
