"""`dflash-ops attach`: the job's tmux session in this terminal."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from dflash_ops.cli.common import InventoryOption, JobArgument
from dflash_ops.cli.several import NodeOption
from dflash_ops.errors import CommandFailed


def command(
    job: JobArgument = None,
    show: Annotated[bool, typer.Option("--print", help="Only print the command to type on the job's machine.")] = False,
    node: NodeOption = None,
    inventory: InventoryOption = None,
) -> int:
    """Open the tmux session of a job (or of node 0) in this terminal; leave it with Ctrl-b d, the job goes on."""
    from dflash_ops.cli.watching import asking, job_client, waiting
    from dflash_ops.view.status import attach_argv

    client = job_client(inventory, job, node)
    argv = attach_argv(client.job.session, client.job.socket)
    try:
        if show or not (sys.stdin.isatty() and sys.stdout.isatty()):
            print(shlex.join(argv))
            return 0
        with waiting().stage("attach", asking([client.job])):
            probe = client.host.run([*argv[:3], "has-session", "-t", f"={client.job.session}"], deadline=20.0)
        if probe.rc != 0:
            raise CommandFailed(
                f"there is no session {client.job.session} on socket {client.job.socket}",
                client.job.host,
                f"the trainer may live without it: dflash-ops status {client.job.name}; "
                f"its output: dflash-ops logs -f {client.job.name}",
            )
        # inside another tmux it would refuse to nest; this server is a different one
        return client.host.terminal(["env", "-u", "TMUX", *argv])
    finally:
        client.host.close()
