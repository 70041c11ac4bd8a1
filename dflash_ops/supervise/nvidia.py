"""What nvidia-smi is asked, and its answers as GpuInfo: the one place that reads them. Pure.

The rule here: what a card does not tell (`[N/A]`, `[Not Supported]`, `[Unknown Error]`, `ERR!`, a column too few) is
None, never 0; a line that is none of a card's is kept as words, since a driver in trouble says there what is wrong.

Names of the columns: `nvidia-smi --help-query-gpu`. Bits of the clocks' reasons: nvml.h, nvmlClocksEventReasons.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dflash_ops.contracts import GpuHolder, GpuInfo

#: Why clocks are held down, by the driver's age (renamed with 535): the first that it knows is asked.
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active", "")

_COLUMNS = (
    "index",
    "name",
    "uuid",
    "utilization.gpu",
    "memory.used",
    "memory.total",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "ecc.errors.corrected.volatile.total",
    "ecc.errors.uncorrected.volatile.total",
)

#: Bit -> reason. Idle (bit 0) is none: nothing is held down that wants to run.
_BITS = (
    (0x2, "applications_clocks_setting"),
    (0x4, "sw_power_cap"),
    (0x8, "hw_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "sw_thermal_slowdown"),
    (0x40, "hw_thermal_slowdown"),
    (0x80, "hw_power_brake_slowdown"),
    (0x100, "display_clock_setting"),
)
_IDLE = 0x1

#: Characters of what is no card's line that are worth telling, and of a name.
_WORDS, _NAME = 300, 80

#: Holders of a card that are told, the largest ones.
HOLDERS = 16


@dataclass(frozen=True)
class Cards:
    """The cards, and what was said besides."""

    gpus: tuple[GpuInfo, ...] = ()
    words: str = ""


def ask_cards(reasons: str = REASONS[0]) -> tuple[str, ...]:
    """Arguments of nvidia-smi for `read_cards`; `reasons` as in REASONS."""
    columns = ",".join((*_COLUMNS, *([reasons] if reasons else [])))
    return (f"--query-gpu={columns}", "--format=csv,noheader,nounits")


def ask_holders() -> tuple[str, ...]:
    """Arguments of nvidia-smi for `read_holders`."""
    return ("--query-compute-apps=gpu_uuid,pid,used_memory,process_name", "--format=csv,noheader,nounits")


def older(reasons: str, said: str) -> str | None:
    """The next of REASONS, where the driver said that it does not know the one that was asked; None: no such thing."""
    if not reasons or "not a valid field" not in said:
        return None
    return REASONS[REASONS.index(reasons) + 1]


def read_cards(text: str) -> Cards:
    """The answer to `ask_cards`; a card of which no number is left still is one."""
    gpus: dict[int, GpuInfo] = {}
    words = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if not parts[0].isdecimal() or len(parts) < 2:
            words.append(line.strip())
            continue
        parts += [""] * (len(_COLUMNS) + 1 - len(parts))
        util, used, total, temp, power, limit, corrected, uncorrected = map(_number, parts[3:11])
        gpus[int(parts[0])] = GpuInfo(
            index=int(parts[0]),
            name=_text(parts[1]),
            uuid=_text(parts[2]),
            util=util / 100 if util is not None else None,
            mem_used=_mib(used),
            mem_total=_mib(total),
            temp_c=temp,
            power_w=power,
            power_limit_w=limit,
            throttle=_reasons(parts[11]),
            ecc_corrected=_whole(corrected),
            ecc_uncorrected=_whole(uncorrected),
        )
    told = "; ".join(word for word in words if word)[:_WORDS]
    return Cards(tuple(gpus[index] for index in sorted(gpus)), told)


def read_holders(text: str) -> dict[str, tuple[GpuHolder, ...]]:
    """The answer to `ask_holders`: processes that hold memory, by the card's uuid."""
    found: dict[str, list[GpuHolder]] = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",", 3)]  # a path may hold commas, and comes last
        if len(parts) < 2 or not parts[1].isdecimal():
            continue
        used = _mib(_number(parts[2])) if len(parts) > 2 else None
        found.setdefault(parts[0], []).append(GpuHolder(int(parts[1]), used, name=parts[3] if len(parts) > 3 else ""))
    return {uuid: tuple(holders) for uuid, holders in found.items()}


def held(gpus: Iterable[GpuInfo], holders: Mapping[str, Sequence[GpuHolder]] | None) -> tuple[GpuInfo, ...]:
    """Each card with its holders, the largest first; None: they are not known."""
    if holders is None:
        return tuple(replace(gpu, holders=None) for gpu in gpus)
    return tuple(replace(gpu, holders=tuple(sorted(holders.get(gpu.uuid, ()), key=_most)[:HOLDERS])) for gpu in gpus)


def _most(holder: GpuHolder) -> tuple[int, int]:
    return -(holder.bytes or 0), holder.pid


def _number(text: str) -> float | None:
    """`63.5`, `63.5 W`; None of anything else."""
    try:
        value = float(text.split()[0])
    except (ValueError, IndexError):
        return None
    return value if math.isfinite(value) and value >= 0 else None


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None else None


def _mib(value: float | None) -> int | None:
    return int(value) << 20 if value is not None else None


def _text(text: str) -> str:
    return "" if text.startswith("[") or text in ("N/A", "ERR!") else text[:_NAME]


def _reasons(text: str) -> tuple[str, ...] | None:
    """`0x0000000000000024` -> its reasons; a bit without a name is told as it is."""
    try:
        bits = int(text, 16)
    except ValueError:
        return None
    if bits < 0:
        return None
    known = [(bit, name) for bit, name in _BITS if bits & bit]
    rest = bits & ~_IDLE & ~sum(bit for bit, _ in _BITS)
    return (*(name for _, name in known), *((f"{rest:#x}",) if rest else ()))
