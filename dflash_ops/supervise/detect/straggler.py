"""straggler: one worker is busy while its peers wait for it.

The rule: busy = 1 - wait - sync, averaged over the newest 5 records. Among the workers of one role, of which there
are two at least, one is busy more than 0.2 above the median of the others. Sums over a whole interval, so that a
single long batch says nothing.
"""

from __future__ import annotations

from dflash_ops.contracts import Finding
from dflash_ops.supervise.detect.history import History, Skipped, middle

NAME = "straggler"
RECORDS, MORE = 5, 0.2


def detect(h: History) -> list[Finding] | Skipped:
    records = h.shares(RECORDS)
    if len(records) < RECORDS:
        return Skipped(NAME, f"workers' shares of {len(records)} records so far, {RECORDS} are needed")
    busy: dict[str, list[float]] = {}
    for record in records:
        for name, shares in record.items():
            if shares.wait is not None:
                busy.setdefault(name, []).append(1.0 - shares.wait - (shares.sync or 0.0))
    mean = {name: sum(v) / len(v) for name, v in busy.items() if len(v) == RECORDS}
    roles: dict[str, list[str]] = {}
    for name in mean:
        roles.setdefault(name.rstrip("0123456789"), []).append(name)
    found: list[Finding] = []
    for names in roles.values():
        if len(names) < 2:
            continue
        worst = max(names, key=lambda n: mean[n])
        others = middle(mean[n] for n in names if n != worst)
        if mean[worst] - others > MORE:
            text = f"{worst} is busy {mean[worst]:.0%} of the time, its peers {others:.0%}: they wait for it"
            numbers = {"busy": mean[worst], "others": others}
            found.append(Finding(NAME, text, h.now, worker=worst, severity="note", numbers=numbers))
    return found
