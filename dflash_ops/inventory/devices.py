"""Devices by role: `0,1,2`, `0-4`, `cuda:0`, `cpu,cpu` -> names that torch knows; one process a GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_ops.errors import UsageError

_CUDA = re.compile(r"(?:cuda:)?(\d{1,4})", re.ASCII)
_RANGE = re.compile(r"(?:cuda:)?(\d{1,4})-(\d{1,4})", re.ASCII)


@dataclass(frozen=True)
class RoleFault:
    """What is wrong with a choice of devices and how to mend it; `role` is the one to be changed."""

    what: str
    fix: str
    role: str


def parse_device(text: str) -> tuple[str, ...] | None:
    """One entry -> its devices (a range gives several), or None where it names no device."""
    word = text.strip().lower()
    if word == "cpu":
        return ("cpu",)
    if match := _CUDA.fullmatch(word):
        return (f"cuda:{int(match[1])}",)
    if match := _RANGE.fullmatch(word):
        first, last = int(match[1]), int(match[2])
        return tuple(f"cuda:{n}" for n in range(first, last + 1)) if first <= last else None
    return None


def parse_devices(text: str, option: str) -> tuple[str, ...]:
    """An option's value -> device names.

    Raises:
        UsageError: it is empty or holds a word that is no device.
    """
    devices: list[str] = []
    for word in text.split(",") if text.strip() else []:
        found = parse_device(word)
        if found is None:
            raise UsageError(f"{word.strip()!r} is no device", f"{option} {text}", DEVICE_HELP)
        devices += found
    return tuple(devices)


DEVICE_HELP = "write GPU numbers (0,1,2 or 0-4), cuda:N, or cpu once for each process"


def check_roles(target: Sequence[str], drafter: Sequence[str], *, features: bool = False) -> RoleFault | None:
    """The first thing that makes this choice impossible, or None."""
    return next(iter(role_faults(target, drafter, features=features)), None)


def role_faults(target: Sequence[str], drafter: Sequence[str], *, features: bool = False) -> list[RoleFault]:
    """All that makes this choice impossible. `features`: it trains from features on disk, so it needs no target."""
    found: list[RoleFault] = []
    for role, devices in (("target", target), ("drafter", drafter)):
        if not devices and not (features and role == "target"):
            fix = f"name at least one device for the {role}"
            fix += ", or trainer.features.path to train without targets" if role == "target" else ""
            found.append(RoleFault(f"there are 0 {role}s", fix, role))
        twice = sorted({d for d in devices if d != "cpu" and list(devices).count(d) > 1}, key=_number)
        if twice:
            fault = f"{', '.join(twice)} is named twice as a {role}"
            found.append(RoleFault(fault, "one process a GPU: name it once", role))
    both = sorted({d for d in target if d != "cpu"} & set(drafter), key=_number)
    if both:
        one = both[0] if len(both) == 1 else "devices"
        fault = f"{', '.join(both)} cannot be target and drafter at once"
        found.append(RoleFault(fault, f"take {one} out of one of the two roles", "drafter"))
    if len({d.partition(":")[0] for d in drafter}) > 1:
        fault = "drafters on the CPU and on GPUs cannot average with each other"
        found.append(RoleFault(fault, "put all drafters on one kind", "drafter"))
    return found


def _number(device: str) -> int:
    return int(device.partition(":")[2] or -1)
