"""The smoke gate from the operator's side (docs/deploy.md): a few real steps, beside whatever runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dflash_ops.contracts import to_dict
from dflash_ops.deploy import spec
from dflash_ops.deploy.operation import Operation
from dflash_ops.errors import PreflightError
from dflash_ops.resident.preflight import Request

#: Seconds beyond `gate_s` for asking and answering.
MORE_S = 60.0


def ask_gate(operation: Operation, request: Request, argv: Sequence[str] | None, config_name: str) -> dict[str, Any]:
    """What resident/gate.py says, without the values of secrets.

    Args:
        argv: the job's own gate command; None: the bundled trainer's smoke test.

    Raises:
        HostError, DflashError: as `Operation.ask`.
    """
    data = {
        "request": to_dict(replace(request, spec=spec.alone(request.spec))),
        "argv": list(argv) if argv is not None else None,
        "config_name": config_name,
        "deadline_s": operation.job.gate_s,
    }
    said = operation.ask("gate", data, deadline=operation.job.gate_s + MORE_S)
    return {**said, "log": [operation.mask(line) for line in said["log"]]}


def gate_failed(
    operation: Operation, said: Mapping[str, Any], what: str, untouched: str, advice: str
) -> PreflightError:
    """The refusal that a failed gate is."""
    text = f"{what}: {operation.mask(said['cause'])}" + (f"; {untouched}" if untouched else "")
    return PreflightError(text + "\n" + "\n".join(said["log"]), f"{operation.host.name}: {said['folder']}", advice)


def say_untried(operation: Operation, said: Mapping[str, Any]) -> None:
    if said["not_exercised"]:
        operation.stages.note(f"gate: on the CPU these were not tried: {', '.join(said['not_exercised'])}")
