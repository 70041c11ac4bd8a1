"""`dflash-ops doctor`: what this machine and a job's host still need, and what to do for each thing missing."""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_ops.cli.common import InventoryOption, JobArgument, JsonOption, console, is_plain, load_inventory
from dflash_ops.errors import InventoryError, UsageError

if TYPE_CHECKING:
    from dflash_ops.doctor.report import Report

#: Sign and style of each status; the words stand beside the signs, so that nothing is said by colour alone.
SIGNS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("fail", "bold red"), "skip": ("skip", "dim")}


def command(
    job: JobArgument = None,
    accept_new: Annotated[
        bool,
        typer.Option(
            "--accept-new",
            help="Take and remember host keys that known_hosts does not know yet (compare the fingerprint first). "
            "A changed key is refused all the same.",
        ),
    ] = False,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check this machine and a job's host, and say what to do for each thing missing. Exits 3 if anything fails."""
    report = _report(inventory, job, accept_new=accept_new)
    if as_json:
        print(json.dumps(report.to_dict(), ensure_ascii=False))
    else:
        _render(report)
    return 0 if report.ok else 3


def _report(inventory: Path | None, name: str | None, *, accept_new: bool) -> Report:
    from dflash_ops.doctor.examine import examine, without_job
    from dflash_ops.hosts.factory import open_host

    try:
        loaded = load_inventory(inventory)
        job = loaded.job(name)
        host = open_host(loaded, job.host, accept_new=accept_new)
    except InventoryError as error:
        return without_job(error)  # this machine can be looked at all the same
    except UsageError as error:
        if name is not None:
            raise  # a job was named, and it is not there
        return without_job(error)
    try:
        with _busy(f"looking at host {job.host} (importing torch there takes a while)"):
            return examine(loaded, job, host, os.environ)
    finally:
        host.close()


def _busy(text: str) -> AbstractContextManager[object]:
    """A spinner on a terminal: the first import of torch from a cold disk takes half a minute."""
    return nullcontext() if is_plain(sys.stderr) else console(stderr=True).status(text)


def _render(report: Report) -> None:
    from rich.text import Text

    out = console()  # soft_wrap below: a command that rich breaks into lines cannot be copied
    for section in report.sections:
        out.print(Text(section.place, style="bold"))
        width = max(len(c.name) for c in section.checks)
        for check in section.checks:
            sign, style = SIGNS[check.status]
            out.print(
                Text.assemble("  ", (sign, style), f"  {check.name:<{width}}  ", check.what.replace("\n", " ")),
                soft_wrap=True,
            )
            if check.next:
                out.print(Text.assemble(" " * (width + 10), ("next: ", "green"), check.next), soft_wrap=True)
    failed, warned = report.count("fail"), report.count("warn")
    if failed:
        out.print(Text(f"{failed} to mend" + (f", {warned} to look at" if warned else ""), style="bold red"))
    else:
        out.print(Text("all is ready" + (f"; {warned} to look at" if warned else ""), style="bold green"))
