"""`reset`: a person has looked; what the supervisor counted is forgotten, and it judges the job anew.

The rule here: it is written under the lease, so that no pass that began before it can write its old verdict after it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dflash_ops.contracts import Layout, to_dict
from dflash_ops.errors import JobBusy, UsageError
from dflash_ops.resident import attempts, daemon, journal, lease
from dflash_ops.resident.answer import say
from dflash_ops.supervise.ledger import by_supervisor, rebuild

#: Seconds for which a pass that acts is waited for.
PATIENCE_S = 15.0


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="reset")
    parser.add_argument("--root", required=True, type=Path)
    parser.add_argument("--reason", required=True)
    parser.add_argument("--actor", default="operator")
    options = parser.parse_args(args)
    if not options.reason.strip() or by_supervisor(options.actor):
        raise UsageError("a person clears the counts, and says why", "reset", "--reason TEXT")
    layout = Layout(options.root.absolute())
    if attempts.last(layout) is None:
        raise UsageError("nothing was ever started here", str(layout.root), "dflash-ops deploy")
    say({"schema": 1, **reset(layout, options.reason, options.actor)})
    return 0


def reset(layout: Layout, reason: str, actor: str) -> dict[str, object]:
    """Write the event, have the job judged at once; what was cleared.

    Raises:
        JobBusy: a pass of the supervisor acts for longer than PATIENCE_S: nothing was changed.
    """
    held = lease.take_within(layout, "reset", PATIENCE_S)
    if held is None:
        raise JobBusy(
            "the supervisor acts on this job at this moment: nothing was cleared",
            str(layout.lease),
            "dflash-ops incidents list shows what it does; say it again after that",
        )
    try:
        before = rebuild(journal.read(layout.journal)[0])
        event = journal.append(layout.journal, "supervise_reset", actor=actor, data={"reason": reason.strip()})
        # What the last pass said of this end holds no more: without it the loop has another one made.
        (layout.run / "repair.json").unlink(missing_ok=True)
    finally:
        held.release()
    running = daemon.ensure(layout)
    tried = [t for case in before.cases.values() for t in case.tried]
    return {
        "kind": "reset",
        "event": to_dict(event),
        "cleared": {"failures": len(before.cases), "actions": len(tried), "told": len(before.held)},
        "stopped": before.stopped,
        "watched": running,
    }
