"""A deploy from its first question to a trainer that runs (docs/deploy.md).

The rule here: a running job is touched last. Everything that can be refused (arguments, the machine, the config, the
data, the checkpoint, the first steps) is refused before the first change that a person would notice; `current` is
switched by rename.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace

from dflash_ops.contracts import JobSpec, from_dict, to_dict
from dflash_ops.deploy import boot, spec, transfer
from dflash_ops.deploy.back import go_back
from dflash_ops.deploy.decide import Options, Steps, busy, clock, decide, describe, refusal
from dflash_ops.deploy.lock import read_lock
from dflash_ops.deploy.operation import Operation
from dflash_ops.deploy.release import Built
from dflash_ops.deploy.result import Result
from dflash_ops.deploy.transfer import Pack, build_pack
from dflash_ops.deploy.window import crash, watch, window
from dflash_ops.errors import DflashError, PreflightError
from dflash_ops.hosts.base import Host
from dflash_ops.inventory import Job
from dflash_ops.resident.preflight import Check, Request
from dflash_ops.resident.probe import Probe
from dflash_ops.view.stages import Stage, Stages
from dflash_ops.view.stopped import stopped_text
from dflash_ops.view.text import counted, size

PROBE_S = 60.0
PREFLIGHT_S = 600.0
START_S = 120.0

#: Seconds of silence of the maker of an environment: one large file may come slowly.
VENV_IDLE_S = 900.0

__all__ = ["Deployment", "Pack", "Result", "build_pack"]


class Deployment(Operation):
    """One deploy of one job (see `Operation` for the arguments)."""

    def __init__(
        self, host: Host, job: Job, options: Options, stages: Stages, *, python: str, environ: Mapping[str, str]
    ) -> None:
        super().__init__(host, job, stages, python=python, environ=environ)
        self.options = options
        self.result = Result(job.name, host.name, options.plan, overrides=dict(job.overrides))
        self.config: spec.Config | None = None
        self.lock: str | None = None
        self.clock: Check | None = None
        self._refusals: list[DflashError] = []
        self._touched = ""

    def run(self) -> Result:
        """All stages in order.

        Raises:
            JobBusy, PreflightError: refused, nothing changed (with `plan`: after everything was said).
            RolledBack: the new attempt crashed, and the one before runs again.
            ReleaseError, TransferError, StartError, HostError, ...: as each stage's text says.
        """
        try:
            return self._run()
        finally:
            self.result.execs = self.host.execs

    def _run(self) -> Result:
        built = self._plan()
        probe = self._connect(built)
        steps = decide(probe, self.options, self._topology(), can_gate=self._can_gate())
        self._refuse(busy(probe, self.options, self.job.name, self.where))
        try:
            self._send(built, probe, steps)
        except PreflightError as error:
            # The place cannot be written. What else is wrong is asked as well, so that it is all told at once.
            _, checks = self._preflight(self._request(built, probe, steps, sent=False))
            raise refusal(tuple(checks), self.where) or error from error
        self._venv(probe, steps)
        request = self._request(built, probe, steps, sent=not self.options.plan)
        config_name, checks = self._preflight(request)
        self.result.checks = tuple(checks)
        self._refuse(refusal(self.result.checks, self.where))
        if self.options.plan:
            self._say_plan(probe, steps)
            if self._refusals:
                raise self._refusals[0]
            return self.result
        self._gate(request, config_name, steps)
        self._stop(probe, steps)
        self._aside(steps)
        self._start(self._spec(built, config_name), stopped=steps.stop)
        self._watch(probe)
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

    def _topology(self) -> tuple[int, int] | None:
        trainer = self.job.trainer
        return (len(trainer.target_devices), len(trainer.drafter_devices)) if trainer is not None else None

    def _can_gate(self) -> bool:
        return (self.job.trainer is not None and self.job.source is None) or self.job.gate is not None

    # -- stages --------------------------------------------------------------------------------------------------

    def _plan(self) -> Built | None:
        with self.stages.stage("plan", "reading the release") as stage:
            self.secrets = self.job.secrets(self.environ)
            self.lock = read_lock(self.job)
            self.config = spec.run_config(self.job)
            built = spec.build_release(self.job)
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

    def _connect(self, built: Built | None) -> Probe:
        request = {
            "root": self.job.root,
            "release": to_dict(built.release) if built else None,
            "resident": self.pack.id,
            "venv": {"python": self.job.venv.python, "lock": self.lock} if self.job.venv is not None else None,
        }
        with self.stages.stage("connect", f"asking {self.host.name} what is there") as stage:
            before = time.time()
            said = self.ask("probe", request, deadline=PROBE_S)
            probe = from_dict(Probe, said, "probe")
            self.clock = clock(probe.now, before, time.time())
            state = describe(probe.snapshot, probe.now) if probe.snapshot is not None else "nothing was started yet"
            stage.done(f"{self.host.name} ({probe.machine}, Python {probe.python}): {state}")
        if probe.release == "damaged":
            self.stages.note(f"release {self.result.release} is damaged there: {', '.join(probe.damaged)}; sent anew")
        if probe.resident:
            self.found()
        if error := probe.venv.get("error"):
            raise PreflightError(str(error["what"]), f"{self.host.name}: {error['where']}", str(error["next"]))
        return probe

    def _send(self, built: Built | None, probe: Probe, steps: Steps) -> None:
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
            self.stages.note(f"send: would send {what}" if parts else f"send: {what}")
            return
        with self.stages.stage("send", what) as stage:
            if parts:
                sent = transfer.send(
                    self.host,
                    self.python,
                    self.pack,
                    self.job.root,
                    send,
                    only=only,
                    resident=steps.send_resident,
                    on_bytes=stage.bytes,
                    at=self.at,
                )
                self.result.files, self.result.bytes, self.result.kept = sent.files, sent.bytes, sent.kept
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

    def _say_plan(self, probe: Probe, steps: Steps) -> None:
        say = self.stages.note
        if steps.gate:
            say(
                "gate: would try the release beside the running job first" if steps.stop else "gate: would try it first"
            )
        if steps.stop:
            grace = self.options.grace_s or self.job.grace_s
            now = describe(probe.snapshot, probe.now)
            verb = "would stop" if self.options.replace else "would refuse:"
            say(f"stop: {verb} {now}" + (f" (TERM, KILL after {grace:g} s)" if self.options.replace else ""))
        if steps.aside:
            say("aside: would set the checkpoints aside, whole")
        if self.result.release is not None:
            say(f"activate: current -> {self.result.release} (now: {probe.current or 'nothing'})")
        for role, devices in self.result.devices.items():
            say(f"devices: {role} {', '.join(devices)}")
        for key, value in self.result.overrides.items():
            say(f"override: {key} = {value}")
        if self._refusals:
            say("start: would be refused, as said below")
        else:
            seconds = window(self, self.options.watch_s)
            say(f"start: would start a new attempt, watched until its first step, for at most {seconds:g} s")
            say(f"in all {steps.execs} commands on {self.host.name}")

    def _gate(self, request: Request, config_name: str, steps: Steps) -> None:
        if not steps.gate:
            if steps.stop and self.options.gate is None and not self._can_gate():
                self.stages.note("gate: the job has no `gate` command: whether the new release runs was not tried")
            return
        data = {
            "request": to_dict(request),
            "argv": list(self.job.gate) if self.job.gate is not None else None,
            "config_name": config_name,
            "deadline_s": self.job.gate_s,
        }
        where = "beside the running job" if steps.stop else "at tiny size"
        with self.stages.stage("gate", f"trying the new release {where}, up to {self.job.gate_s:g} s") as stage:
            said = self.ask("gate", data, deadline=self.job.gate_s + PROBE_S)
            said["log"] = [self.mask(line) for line in said["log"]]
            self.result.gate = said
            if not said["ok"]:
                untouched = "; the running job was not touched" if steps.stop else ""
                raise PreflightError(
                    f"the new release failed its smoke gate: {self.mask(said['cause'])}{untouched}\n"
                    + "\n".join(said["log"]),
                    f"{self.host.name}: {said['folder']}",
                    "correct the cause; --no-gate deploys without trying",
                )
            stage.done(said["what"])
        if said["not_exercised"]:
            self.stages.note(f"gate: on the CPU these were not tried: {', '.join(said['not_exercised'])}")

    def _stop(self, probe: Probe, steps: Steps) -> None:
        if not steps.stop:
            return
        self._touched = "stopped"
        grace = self.options.grace_s or self.job.grace_s
        text = f"{describe(probe.snapshot, probe.now)}: save and stop, up to {grace:g} s"
        with self.stages.stage("stop", text) as stage:
            reason = self.options.reason or "replaced by a new deploy"
            self.result.replaced = self.client.stop(grace=grace, reason=reason, actor=self.options.actor)
            stage.done(stopped_text(self.result.replaced))

    def _aside(self, steps: Steps) -> None:
        if not steps.aside:
            return
        self._touched = "made fresh"
        with self.stages.stage("aside", "setting the checkpoints aside") as stage:
            reason = self.options.reason or "deploy --fresh"
            self.result.aside = self.client.aside(reason=reason, actor=self.options.actor)
            moved = self.result.aside.get("to")
            stage.done(f"checkpoints set aside: {moved}" if moved else "there were no checkpoints")

    def _start(self, job_spec: JobSpec, *, stopped: bool) -> None:
        self._touched = "started"
        request = {
            "use": self.pack.id,
            "deployed": {
                "release": self.result.release,
                "resident": self.result.resident,
                "overrides": self.result.overrides,
                "devices": self.result.devices,
                "begin": self.options.begin,
                "reason": self.options.reason,
                "gate": self.result.gate["what"] if self.result.gate else None,
            },
            "spec": to_dict(job_spec),
            "keep_releases": self.job.keep_releases,
        }
        with self.stages.stage("start", "switching the release, starting the session") as stage:
            try:
                stdin = json.dumps(request).encode() + b"\n"
                started = self.client.ask("begin", stdin=stdin, deadline=START_S)
            except DflashError as error:
                if stopped:
                    error.next = f"{error.next}; the old attempt is stopped: deploy again to go on".lstrip("; ")
                raise
            self.result.attempt = int(started["attempt"])
            self.result.removed = list(started["removed"])
            stage.done(f"attempt {self.result.attempt} runs")
        if self.result.removed:
            names = ", ".join(self.result.removed)
            self.stages.note(f"releases removed (keep_releases = {self.job.keep_releases}): {names}")

    def _watch(self, probe: Probe) -> None:
        """The watch window, and the way back if the attempt does not survive it."""
        self._touched = "watched"
        attempt = self.result.attempt
        assert attempt is not None
        seconds = window(self, self.options.watch_s)
        with self.stages.stage("watch", f"attempt {attempt}: until its first step, {seconds:g} s at most") as stage:
            seen = watch(self, attempt, seconds, stage)
            self.result.state = seen.snapshot.state.value
            failed = crash(self, attempt, seen)
            stage.done(f"attempt {attempt} is {seen.snapshot.state.value}" if failed is None else "it crashed")
        if failed is None:
            return
        if self.options.rollback:
            go_back(self, failed, probe.snapshot, self.result, self.options)
        raise failed
