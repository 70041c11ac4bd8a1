"""The dry run: exactly what would be done, one step a line, as `carry_out` will do it."""

from __future__ import annotations

import shlex
from typing import Any

from dflash_ops.contracts import GOES_BACK, RULES, Action, JobSpec, Ledger, Overlay
from dflash_ops.contracts.overlay import Layer
from dflash_ops.supervise.remedies import apply
from dflash_ops.supervise.situation import Situation

_WAITS = {
    Action.WAIT_MEMORY: "wait until the GPU memory of ended processes is given back",
    Action.WAIT_DISK: "wait until there is room on the job's disk",
    Action.WAIT_NETWORK: "wait until the network answers",
}


def dry_run(
    action: Action,
    situation: Situation,
    ledger: Ledger,
    *,
    params: dict[str, Any],
    layer: Layer | None,
    drop: tuple[str, ...],
    ends_first: bool,
    starts: bool,
) -> str:
    """Lines of text; a line that stands for a command is one that a person could type."""
    number = situation.attempt
    if action is Action.DUMP_STACKS:
        return f"write the stacks of all workers of attempt {number} to its evidence folder"
    lines: list[str] = []
    if ends_first or situation.left:
        lines.append(
            f"end attempt {number}: TERM to its recorded launcher (pid and start time), KILL after the grace time"
        )
    if action in _WAITS:
        lines.append(_WAITS[action])
    if action in GOES_BACK:
        lines.append(
            f"move checkpoints newer than step {params.get('step')} to checkpoints.aside/, whole, with a manifest"
        )
    elif action is Action.FRESH_START_ASIDE:
        lines.append("move all checkpoints to checkpoints.aside/, whole, with a manifest")
    overlay = Overlay(ledger.layers)
    for gone in drop:
        was = next((x for x in overlay.layers if x.id == gone), None)
        lines.append(f"take the change {was.action if was else gone} ({gone}) off run/overlay.json")
    if layer is not None and layer.nofile is not None:
        lines.append(f"ulimit -n {layer.nofile}")
    if action is Action.ROLLBACK_RELEASE:
        lines.append(f"use release {params.get('release')}")
    if starts:
        fresh = action is Action.FRESH_START_ASIDE
        words = command(situation, overlay.without(drop).with_layer(layer), fresh=fresh)
        lines.append(f"start attempt {(number or 0) + 1}: {words}")
    return "\n".join(lines) or RULES[action].text


def command(situation: Situation, overlay: Overlay, *, fresh: bool = False) -> str:
    """The launcher's command as `apply` makes it, quoted for a shell; the job's own environment is not repeated."""
    plain = JobSpec("", "", "", situation.argv, "", remedies=situation.table)
    job = apply(plain, overlay, fresh=fresh)
    return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in job.env.items()), *(shlex.quote(w) for w in job.argv)])
