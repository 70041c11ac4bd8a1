"""What deploy, status, logs, stop and attach share: the client of a job, stages on standard error, JSON out."""

from __future__ import annotations

import getpass
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_ops.cli.common import console, is_plain, load_job
from dflash_ops.cli.common import print_json as print_json

if TYPE_CHECKING:
    from dflash_ops.client import JobClient
    from dflash_ops.inventory import Job
    from dflash_ops.view.stages import Stages


def job_client(inventory: Path | None, name: str | None, node: int | None = None) -> JobClient:
    """The client of the job that is meant, or of one of its nodes (None: node 0); nothing is connected yet.

    Raises:
        InventoryError, UsageError: as `load_job`.
    """
    from dflash_ops.cli.adopted import client_of
    from dflash_ops.hosts.factory import open_host

    loaded, whole = load_job(inventory, name)
    job = whole.at_node(node).parts[0]
    return client_of(open_host(loaded, job.host), job, loaded.host_of(job).python)


def stages() -> Stages:
    """Progress goes to standard error, so that standard output holds the answer only."""
    if is_plain(sys.stderr):
        from dflash_ops.view.stages import Plain

        return Plain(sys.stderr)
    from dflash_ops.view.live import Live

    return Live(console(stderr=True), person_asked)


def waiting() -> Stages:
    """For commands that ask and answer: what takes long shows itself on standard error, and nothing of it stays."""
    from dflash_ops.view.stages import Waiting

    return Waiting(sys.stderr, terminal=not is_plain(sys.stderr), asked=person_asked)


def person_asked() -> bool:
    """Whether a key's passphrase is being asked for: what is drawn meanwhile would wipe the question away."""
    keys = sys.modules.get("dflash_ops.hosts.keys")  # where nobody has imported it (paramiko), nobody asks
    return keys is not None and keys.SHARED.asking


def asking(jobs: Sequence[Job]) -> str:
    """Who is asked, in a few words."""
    hosts = list(dict.fromkeys(host for job in jobs for host in job.hosts))
    return f"asking {', '.join(hosts)}" if len(hosts) <= 3 else f"asking {len(hosts)} hosts"


def actor() -> str:
    """Who asks, for the journal: `operator ada@desk`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a passwd entry
        user = "?"
    return f"operator {user}@{socket.gethostname()}"
