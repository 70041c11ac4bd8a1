"""What the supervisor does to this machine: `supervise.Effects` over the resident's own commands.

The rules here: nothing is done without the lease's newest token and never after a person's stop; each call may be
repeated; and what cannot be brought about within its deadline is an EffectFailed, never a silent success.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_ops.contracts import Event, JobSpec, Layout, Overlay, dumps
from dflash_ops.errors import DflashError, LeaseLost
from dflash_ops.resident import attempts, checkpoints, journal, machine, spec, stacks, start, stop
from dflash_ops.resident.aside import aside, folder_of, move_some, refuse_if_alive
from dflash_ops.resident.files import run_lock, write_atomic
from dflash_ops.resident.lease import TTL_S, Lease
from dflash_ops.resident.records import activate
from dflash_ops.resident.situation import persons_job
from dflash_ops.resident.tell import tell_person
from dflash_ops.supervise.effects import EffectFailed
from dflash_ops.supervise.ledger import SUPERVISOR, by_supervisor
from dflash_ops.supervise.remedies import apply

#: Bytes that a job's disk must have free again, and bytes of a GPU that may stay taken.
DISK_FREE = 2 << 30
GPU_LEFT = 1 << 30
#: Seconds between two looks while something is waited for, and for which a GPU's memory must stand still.
EVERY_S = 1.0
STILL_S = 10.0


class ResidentEffects:
    """Implements `supervise.effects.Effects`.

    Args:
        layout: the job's folders. lease: held by this process. secrets: values of the job's secret variables, which
        are in no file. say: one line into resident.log.
    """

    def __init__(
        self, layout: Layout, lease: Lease, secrets: Mapping[str, str], say: Callable[[str], None] = print
    ) -> None:
        self._layout = layout
        self._lease = lease
        self._secrets = dict(secrets)
        self._say = say
        self._since = self._still = time.monotonic()
        self._taken: dict[int, int] = {}

    def fenced(self) -> bool:
        """As the protocol says; renews the lease on the way, so that a long wait does not lose it."""
        try:
            self._lease.check()
            if time.monotonic() - self._since > TTL_S / 4:
                self._lease.renew()
                self._since = time.monotonic()
        except LeaseLost as lost:
            self._say(lost.what)
            return False
        last = attempts.last(self._layout)
        if last is None:
            return True
        if last.stop is not None and not by_supervisor(last.stop.actor):
            return False
        asked = ("stop_requested", last.number)
        events = journal.read(self._layout.journal)[0]
        return not any((e.event, e.attempt) == asked and not by_supervisor(e.actor) for e in events)

    def journal(self, event: str, data: dict[str, Any], attempt: int | None) -> Event:
        return journal.append(self._layout.journal, event, actor=SUPERVISOR, attempt=attempt, data=data)

    def dump_stacks(self, attempt: int, seconds: float) -> str:
        found = attempts.read(self._layout, attempt)
        taken = stacks.dump(found, seconds)
        if not taken:
            raise EffectFailed("no process of the attempt lives, so none has a stack", str(found.layout.path), "")
        try:
            stacks.save(found, taken)
        except OSError as error:
            raise EffectFailed(
                f"the stacks cannot be written: {error.strerror}", str(found.layout.path), "make room there"
            ) from error
        return stacks.render(taken)

    def end(self, attempt: int, seconds: float) -> None:
        last = attempts.last(self._layout)
        if last is None or last.number != attempt:
            raise EffectFailed(f"attempt {attempt} is not the newest one any more", str(self._layout.attempts), "")
        grace = min(last.spec.grace_s if last.spec is not None else 60.0, seconds / 2)
        try:
            said = stop.stop(self._layout, grace, "ended before it is started again", SUPERVISOR)
        except DflashError as error:
            raise EffectFailed(error.what, error.where, error.next) from error
        if any("do not end" in warning for warning in said["warnings"]):
            raise EffectFailed(said["warnings"][-1], str(last.layout.path), "look at driver and disks (state D in ps)")

    def wait_for(self, what: str, seconds: float) -> None:
        ready = {"memory": self._memory_back, "disk": self._disk_free, "network": self._network_there}[what]
        end = time.monotonic() + seconds
        why = ready()
        if why is not None and what != "memory":
            # Room is made by a person, and a wait may take hours: they are told what is missing, at once.
            self.tell(f"waits for {what}", f"{why}; it is started again once that has changed")
        while why is not None:
            if time.monotonic() > end:
                raise EffectFailed(f"{what} was waited for {seconds:.0f} s: {why}", str(self._layout.root), "")
            if not self.fenced():
                raise LeaseLost("the lease was lost while it waited", str(self._layout.lease), "nothing was started")
            time.sleep(EVERY_S)
            why = ready()

    def set_aside(self, newer_than: int | None, reason: str) -> str:
        folder = folder_of(self._layout)
        try:
            with run_lock(self._layout.lock, "set checkpoints aside"):
                refuse_if_alive(self._layout)
                if newer_than is None:
                    return str(aside(self._layout, reason, SUPERVISOR, folder)["to"] or "")
                names = [f.path.name for f in checkpoints.listing(folder) if f.step > newer_than]
                return str(move_some(self._layout, folder, names, reason, SUPERVISOR)["to"] or "")
        except (DflashError, OSError) as error:
            raise EffectFailed(f"the checkpoints cannot be set aside: {error}", str(folder), "") from error

    def free_port(self) -> int:
        with socket.socket() as free:
            free.bind(("", 0))
            return int(free.getsockname()[1])

    def write_overlay(self, overlay: Overlay) -> None:
        write_atomic(self._layout.overlay, dumps(overlay).encode() + b"\n")

    def start(self, overlay: Overlay, *, fresh: bool, release: str | None, decision: str, reason: str) -> int:
        if (done := self._started_by(decision)) is not None:
            return done
        job = self._base(release)
        if missing := sorted(set(job.secret_env) - set(self._secrets)):
            raise EffectFailed(
                f"the secrets {', '.join(missing)} of this job are not known any more (its resident was started anew)",
                "secret_env of the job",
                "dflash-ops deploy, which hands them over again",
            )
        job = replace(job, env={**job.env, **{name: self._secrets[name] for name in job.secret_env}})
        job = replace(
            apply(job, overlay, fresh=fresh),
            actor=SUPERVISOR,
            reason=reason,
            decision=decision,
            nofile=overlay.nofile,
        )
        try:
            if job.release is not None:
                with run_lock(self._layout.lock, "supervise"):
                    activate(self._layout, job.release, SUPERVISOR)
            return int(start.start(self._layout.root, job)["attempt"])
        except (DflashError, OSError) as error:
            raise EffectFailed(f"the job cannot be started: {error}", str(self._layout.root), "") from error

    def tell(self, title: str, text: str, fingerprint: str = "") -> None:
        last = attempts.last(self._layout)
        job = last.spec if last is not None else None
        name = job.job if job is not None else self._layout.root.name
        tell_person(self._layout, job, f"{name}: {title}", text, self._say, fingerprint)

    # -- what they need

    def _started_by(self, decision: str) -> int | None:
        last = attempts.last(self._layout)
        if last is None or last.spec is None or last.spec.decision != decision:
            return None
        return last.number if last.start is not None else None

    def _base(self, release: str | None) -> JobSpec:
        """The job as a person last started it (with this release): without any change of ours.

        Raises:
            EffectFailed: its file is not there whole.
        """
        found = persons_job(self._layout, release)
        if found is not None:
            last = attempts.last(self._layout)
            # A release that we went back to stays until a person deploys another.
            held = last.spec.release if last is not None and last.spec is not None else found.release
            return found if release is not None else replace(found, release=held)
        raise EffectFailed(
            "the job as a person started it is not known any more"
            + (f" (release {release} never ran)" if release is not None else ""),
            str(self._layout.attempts),
            "dflash-ops deploy",
        )

    def _memory_back(self) -> str | None:
        """None once no process of the newest attempt lives and its GPUs' memory is given back."""
        last = attempts.last(self._layout)
        if last is None or last.spec is None or not spec.on_gpus(last.spec):
            return None
        found, why = machine.gpus(10.0)
        if found is None:
            # Without a driver there is nothing to wait for; one that does not answer is no place to start on.
            return None if "is not there" in why else why
        numbers = (device.rpartition(":")[2] for device in spec.devices(last.spec))
        wanted = {int(number) for number in numbers if number.isdigit()}
        taken = {g.index: g.used for g in found if not wanted or g.index in wanted}
        before, self._taken = self._taken, taken
        if all(used <= GPU_LEFT for used in taken.values()):
            return None
        # Somebody else's memory stands still; ours is on its way back.
        if before != taken:
            self._still = time.monotonic()
        if time.monotonic() - self._still >= STILL_S:
            self._say("GPU memory stands still above 1 GiB: it is taken by others")
            return None
        worst = max(taken, key=lambda index: taken[index])
        return f"GPU {worst} still has {taken[worst] / (1 << 30):.1f} GiB taken"

    def _disk_free(self) -> str | None:
        for folder in {self._layout.root, folder_of(self._layout)}:
            place = machine.nearest_folder(folder)
            usage = shutil.disk_usage(place)
            if usage.free < min(DISK_FREE, usage.total // 20):
                return f"{place} has {usage.free / (1 << 20):.0f} MiB free"
        return None

    def _network_there(self) -> str | None:
        """A default route: more than that no two jobs have in common."""
        with contextlib.suppress(OSError):
            routes = Path("/proc/net/route").read_text("ascii").splitlines()[1:]
            if not any(line.split()[1:2] == ["00000000"] for line in routes):
                return "there is no default route"
        return None
