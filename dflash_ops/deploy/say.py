"""`deploy --plan` in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_ops.deploy.decide import Steps, describe
from dflash_ops.deploy.window import window
from dflash_ops.resident.probe import Probe

if TYPE_CHECKING:
    from dflash_ops.deploy.run import Deployment


def say_plan(deployment: Deployment, probe: Probe, steps: Steps, refused: Sequence[str]) -> None:
    """What would happen on one machine, one note a step; `refused` = why it would not."""
    say = deployment.stages.note
    if steps.gate:
        say("gate: would try the release beside the running job first" if steps.stop else "gate: would try it first")
    if steps.stop:
        grace = deployment.options.grace(deployment.job)
        now = describe(probe.snapshot, probe.now)
        verb = "would stop" if deployment.options.replace else "would refuse:"
        say(f"stop: {verb} {now}" + (f" (TERM, KILL after {grace:g} s)" if deployment.options.replace else ""))
    if steps.aside:
        say("aside: would set the checkpoints aside, whole")
    if deployment.result.release is not None:
        say(f"activate: current -> {deployment.result.release} (now: {probe.current or 'nothing'})")
    for role, devices in deployment.result.devices.items():
        say(f"devices: {role} {', '.join(devices)}")
    for key, value in deployment.result.overrides.items():
        say(f"override: {key} = {value}")
    if refused:
        say("start: would be refused, as said below")
    else:
        seconds = window(deployment, deployment.options.watch_s)
        say(f"start: would start a new attempt, watched until its first step, for at most {seconds:g} s")
        say(f"in all {steps.execs} commands on {deployment.host.name}")
