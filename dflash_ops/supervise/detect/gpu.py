"""gpu_xid, gpu_ecc: what the driver says of a card.

The rule: each Xid line of the kernel log is a finding of its card; Xids of the hardware (48, 63, 64, 74, 79, 94, 95,
119, 120) are alarms, those of the application (13, 31) warnings, those that only follow (43, 45) are not told. ECC
and row remapping lines without an Xid are told once a card.
"""

from __future__ import annotations

import re

from dflash_ops.contracts import Finding
from dflash_ops.supervise.detect.history import History, Skipped

NAME = "gpu"
XID = re.compile(r"NVRM: Xid \((?P<card>[^)]+)\): (?P<number>\d+)\b")
OFF_BUS = re.compile(r"NVRM: GPU (?P<card>[0-9A-Fa-f:.]+): GPU has fallen off the bus")
ECC = re.compile(r"NVRM: .*?(?P<card>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f.]+).*(?:ECC|[Rr]ow [Rr]emap)")
HARDWARE = frozenset({48, 63, 64, 74, 79, 94, 95, 119, 120})
FOLLOWS = frozenset({43, 45})
MOST = 16


def detect(h: History) -> list[Finding] | Skipped:
    if h.kernel is None:
        return Skipped(
            NAME, "the kernel log could not be read here (it is the host's: `dflash-ops supervise` reads it)"
        )
    found: dict[tuple[str, str], Finding] = {}
    for line in h.kernel:
        text = line.strip()[:300]
        if (match := XID.search(line)) is not None:
            number = int(match["number"])
            if number in FOLLOWS:
                continue
            name, card, severity = "gpu_xid", match["card"], "alarm" if number in HARDWARE else "warn"
            finding = Finding(
                name, f"Xid {number} of card {card}", h.now, None, card, severity, {"xid": float(number)}, (text,)
            )
            found.setdefault((f"{name}{number}", card), finding)
        elif (match := OFF_BUS.search(line)) is not None:
            card = match["card"]
            finding = Finding("gpu_xid", f"card {card} has fallen off the bus", h.now, None, card, "alarm", {}, (text,))
            found.setdefault(("off", card), finding)
        elif (match := ECC.search(line)) is not None:
            card = match["card"]
            finding = Finding("gpu_ecc", f"memory errors on card {card}", h.now, None, card, "warn", {}, (text,))
            found.setdefault(("ecc", card), finding)
    return list(found.values())[:MOST]
