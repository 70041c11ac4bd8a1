"""Telling a person, from beside the trainer: the journal, resident.log, and apprise where the job's policy names its
config file.

The rule here: a sink that is down never holds anything up and never fails an action; it is said in resident.log.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable

from dflash_ops.contracts import JobSpec, Layout, Policy
from dflash_ops.errors import DflashError
from dflash_ops.resident import itself, journal, notify
from dflash_ops.supervise.ledger import SUPERVISOR


def tell_person(
    layout: Layout, spec: JobSpec | None, title: str, text: str, say: Callable[[str], None], fingerprint: str = ""
) -> None:
    """Once in a while (`policy.cooldown_s`) for each title and fingerprint.

    Args:
        spec: the job, whose policy says whom to notify; None where it is not known.
    """
    say(f"{title}: {text}")
    policy = spec.policy if spec is not None else Policy()
    now = time.time()
    key = {"title": title, "fingerprint": fingerprint}
    try:
        told = journal.append_unless(
            layout.journal,
            lambda e: (
                e.event == "told" and 0 <= now - e.t < policy.cooldown_s and {k: e.data.get(k, "") for k in key} == key
            ),
            "told",
            actor=SUPERVISOR,
            data={**key, "text": text},
        )
    except (OSError, DflashError) as error:
        say(f"telling it: {error}")
        return
    if told is not None and spec is not None and policy.notify:
        _notify(layout, spec, title, text, say)


def _notify(layout: Layout, spec: JobSpec, title: str, text: str, say: Callable[[str], None]) -> None:
    given = {
        "file": spec.policy.notify,
        "title": title,
        "text": text,
        "program": notify.program(spec.argv[0] if spec.argv else ""),
    }
    try:
        with layout.resident_log.open("ab") as log:
            child = subprocess.Popen(
                itself.argv("notify", "--root", str(layout.root)),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
    except OSError as error:
        say(f"nobody was notified: {error}")
        return
    assert child.stdin is not None
    with contextlib.suppress(OSError), child.stdin:  # it died at once, and says so itself
        child.stdin.write(json.dumps(given).encode())
