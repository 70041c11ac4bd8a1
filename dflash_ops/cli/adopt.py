"""`dflash-ops adopt`: watch a tmux session that dflash-ops did not start."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_ops.cli import complete
from dflash_ops.cli.common import InventoryOption, JsonOption, load_inventory
from dflash_ops.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from dflash_ops.inventory import Inventory


def command(
    host: Annotated[
        str,
        typer.Argument(
            metavar="HOST", help="Host of the inventory on which the session is.", autocompletion=complete.hosts
        ),
    ],
    session: Annotated[str, typer.Option("--session", metavar="NAME", help="The tmux session (tmux ls shows it).")],
    socket: Annotated[
        str, typer.Option("--socket", metavar="NAME", help="Its tmux socket, as in tmux -L NAME.")
    ] = "default",
    name: Annotated[
        str | None, typer.Option("--name", metavar="JOB", help="Its name here; else the session's.")
    ] = None,
    progress: Annotated[
        str, typer.Option("--progress", metavar="REGEX", help="How its lines tell progress, if in no known way.")
    ] = "",
    root: Annotated[
        str | None,
        typer.Option("--root", metavar="DIR", help="Folder there for its log; else ~/.dflash-ops/adopted/JOB."),
    ] = None,
    json: JsonOption = False,
    inventory: InventoryOption = None,
) -> int:
    """Watch a tmux session that dflash-ops did not start: status and logs from its pane and processes alone.

    It is added to the inventory, and only observed: nothing of it is ended, typed into or changed.
    """
    from dflash_ops.adopted import AdoptedClient
    from dflash_ops.cli.watching import print_json, stages
    from dflash_ops.contracts import clock, to_dict
    from dflash_ops.deploy import boot, transfer
    from dflash_ops.hosts.factory import open_host
    from dflash_ops.inventory.append import append_job

    loaded = load_inventory(inventory)
    job = name or session
    _refuse_taken(loaded, job, host, session, socket)
    _check_progress(progress)
    way = open_host(loaded, host)
    python = loaded.hosts[host].python
    pack = transfer.build_pack()
    request: dict[str, Any] = {"root": root, "job": job, "session": session, "socket": socket, "progress": progress}
    try:
        with stages().stage("adopt", f"looking for session {session} on {host}") as stage:

            def ask(**more: Any) -> dict[str, Any]:
                return boot.call(
                    way, python, pack.content, "dflash_ops.resident.adopted", {**request, **more}, deadline=60.0
                )

            found = ask(look=True)
            request["root"] = found["root"]
            if job not in loaded.jobs:
                values = {"host": host, "adopted": True, "root": found["root"], "session": session, "socket": socket}
                comment = f"adopted {clock(time.time())}: docs/adopt.md"
                append_job(Path(loaded.file), job, {**values, **({"progress": progress} if progress else {})}, comment)
            loaded = load_inventory(Path(loaded.file))
            stage.say("installing what looks at it")
            transfer.send(way, python, pack, found["root"], None, resident=True)
            boot.call(
                way, python, pack.content, transfer.RECEIVE,
                {"root": found["root"], "token": "adopt", "use": pack.id}, deadline=60.0,
            )  # fmt: skip
            said = ask(limits=to_dict(loaded.jobs[job].limits))
            seen = AdoptedClient(way, loaded.jobs[job], python).snapshot()
            what = said["command"] or "only a shell so far"
            stage.done(f"{job}: {what} in pane {said['pane']}, {seen.snapshot.state.value}: {seen.snapshot.detail}")
        if said["foreign_pipe"]:
            stages().note("the pane has a pipe already, which stays: only what the pane still shows is seen")
    finally:
        way.close()
    stages().note(f"added to {loaded.file}; observed only. Look: dflash-ops status {shlex.quote(job)}")
    if json:
        facts = {k: said[k] for k in ("root", "pane", "command", "pid", "dialect", "step", "piped")}
        state = {"state": seen.snapshot.state.value, "detail": seen.snapshot.detail}
        print_json({"schema": 1, "kind": "adopt", "job": job, "host": host, "inventory": loaded.file, **facts, **state})
    return 0


def _refuse_taken(loaded: Inventory, job: str, host: str, session: str, socket: str) -> None:
    """Names that cannot be meant.

    Raises:
        UsageError: no such host, or the name is another job's.
    """
    if host not in loaded.hosts:
        known = ", ".join(loaded.hosts) or "none"
        near = did_you_mean(host, loaded.hosts)
        raise UsageError(f"there is no host {host!r}{near}", loaded.file, f"name one of: {known}")
    there = loaded.jobs.get(job)
    if there is None:
        return
    if not there.adopted or (there.host, there.session, there.socket) != (host, session, socket):
        raise UsageError(f"there is a job {job!r} already", loaded.file, "give it another name: --name JOB")


def _check_progress(progress: str) -> None:
    from dflash_ops.contracts import ProgressPattern
    from dflash_ops.errors import ContractError

    if progress:
        try:
            ProgressPattern(progress)
        except ContractError as error:
            raise UsageError(error.what, "--progress", error.next) from None
