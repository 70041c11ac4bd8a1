"""Telling a person, from beside the trainer: the journal, resident.log, and a notifier where the job names one.

The rule here: a sink that is down never holds anything up and never fails an action; it is said in resident.log.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dflash_ops.contracts import Layout
from dflash_ops.errors import DflashError
from dflash_ops.resident import journal
from dflash_ops.supervise.ledger import SUPERVISOR

#: Seconds for which the same title is not told again.
COOLDOWN_S = 600.0


def tell_person(layout: Layout, title: str, text: str, say: Callable[[str], None]) -> None:
    """Once in a while for each title."""
    say(f"{title}: {text}")
    now = time.time()
    try:
        journal.append_unless(
            layout.journal,
            lambda e: e.event == "told" and e.data.get("title") == title and now - e.t < COOLDOWN_S,
            "told",
            actor=SUPERVISOR,
            data={"title": title, "text": text},
        )
    except (OSError, DflashError) as error:
        say(f"telling it: {error}")
