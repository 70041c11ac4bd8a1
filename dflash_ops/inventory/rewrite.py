"""Changes to an inventory that a person wrote: as text, so that every comment and every other byte stays as it is.

The rule here: what comes out is loaded, and compared with what was meant, before it replaces what is there, by rename.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dflash_ops.errors import DflashError, InventoryError
from dflash_ops.inventory.lines import value_spans
from dflash_ops.inventory.loader import load
from dflash_ops.inventory.model import Inventory, Job, quote_key

ROLES = ("target", "drafter")


def replace_checked(place: Path, data: bytes, check: Callable[[Path], None]) -> None:
    """`data` in the place of a file, once `check` has accepted it under another name in the same folder.

    Raises:
        OSError: it cannot be written. Whatever `check` raises: nothing was changed.
    """
    # In the same folder: relative paths of the inventory are relative to it.
    beside = place.with_name(f".{place.name}.{os.getpid()}.new")
    try:
        mode = place.stat().st_mode & 0o777
        beside.write_bytes(data)
        beside.chmod(mode)
        check(beside)
        with beside.open("rb") as written:
            os.fsync(written.fileno())
        beside.replace(place)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def set_devices(job: Job, target: Sequence[str], drafter: Sequence[str]) -> bool:
    """The job's two lists of devices in its inventory; False where they stand there so already.

    Raises:
        DflashError: it cannot be done safely, and nothing was changed; `next` has the lines to write by hand.
    """
    devices = dict(zip(ROLES, (tuple(target), tuple(drafter)), strict=True))
    place = Path(os.path.realpath(job.inventory))

    def no(why: str) -> DflashError:
        lines = "\n  ".join(f"{role}_devices = {devices_text(devices[role])}" for role in ROLES)
        where = f"[jobs.{quote_key(job.name)}.trainer]"
        return DflashError(
            f"the inventory still has the old split: {why}", str(place), f"write into its {where}:\n  {lines}"
        )

    try:
        raw = place.read_bytes().decode("utf-8")
        before = load(place)
        meant = _meant(before, job, devices)
        if meant is None:
            raise no("it was changed meanwhile, and its job has other devices than at the start")
        if _plain(meant) == _plain(before):
            return False
        text = _rewritten(raw, job.name, devices)
        if text is None:
            raise no("the lists do not stand there in a form that can be changed without touching anything else")

        def check(path: Path) -> None:
            if _plain(load(path)) != _plain(meant):
                raise no("the change would have changed more than them")

        replace_checked(place, text.encode("utf-8"), check)
    except (OSError, UnicodeDecodeError) as error:
        raise no(f"it cannot be written ({getattr(error, 'strerror', None) or error})") from None
    except InventoryError as error:
        raise no(f"it cannot be read any more ({error.what})") from None
    return True


def devices_text(devices: Sequence[str], *, quoted: bool = False) -> str:
    """Devices as an inventory has them: numbers of GPUs, or names in quotes."""
    numbers = all(d.startswith("cuda:") for d in devices) and not quoted
    return "[" + ", ".join(d.partition(":")[2] if numbers else f'"{d}"' for d in devices) + "]"


def _meant(before: Inventory, job: Job, devices: dict[str, tuple[str, ...]]) -> Inventory | None:
    now = before.jobs.get(job.name)
    if now is None or now.trainer is None or job.trainer is None or now.nodes:
        return None
    known = {(job.trainer.target_devices, job.trainer.drafter_devices), (devices["target"], devices["drafter"])}
    if (now.trainer.target_devices, now.trainer.drafter_devices) not in known:
        return None
    trainer = replace(now.trainer, target_devices=devices["target"], drafter_devices=devices["drafter"])
    return replace(before, jobs={**before.jobs, job.name: replace(now, trainer=trainer)})


def _plain(inventory: Inventory) -> Inventory:
    """Without the name of its file, which a copy beside it does not share."""

    def one(job: Job) -> Job:
        return replace(job, inventory="", nodes=tuple(map(one, job.nodes)))

    return replace(inventory, file="", jobs={name: one(job) for name, job in inventory.jobs.items()})


def _rewritten(raw: str, name: str, devices: dict[str, tuple[str, ...]]) -> str | None:
    text = raw.replace("\r\n", "\n")
    spans = value_spans(text)
    changes: list[tuple[int, int, str]] = []
    for role in ROLES:
        span = spans.get(("jobs", name, "trainer", f"{role}_devices"))
        if span is None:
            return None
        old = text[slice(*span)]
        if not (old.startswith("[") and old.endswith("]")) or "#" in old:
            return None  # a comment in there would be lost
        changes.append((*span, devices_text(devices[role], quoted="cuda:" in old)))
    for begin, end, new in sorted(changes, reverse=True):
        first, last = (_in_raw(raw, i) for i in (begin, end)) if text is not raw else (begin, end)
        raw = raw[:first] + new + raw[last:]
    return raw


def _in_raw(raw: str, index: int) -> int:
    """Where the character `index` of the text with `\\n` only stands in the text with `\\r\\n`."""
    at = 0
    for _ in range(index):
        at += 2 if raw.startswith("\r\n", at) else 1
    return at
