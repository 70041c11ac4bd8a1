"""`dflash-ops demo`: the whole way on this machine with a tiny target: train, watch, evaluate, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dflash_ops.cli.common import InventoryOption


def command(
    root: Annotated[
        Path | None, typer.Option("--root", metavar="DIR", help="A folder of its own, with an inventory of its own.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, metavar="N", help="Optimiser steps of the drafter.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller target, less data, fewer steps.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Stop a demo that runs and start anew; else it is followed.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Train anew although nothing has changed.")] = False,
    inventory: InventoryOption = None,
) -> int:
    """The whole way on this machine with a tiny target: train, watch, export, evaluate.

    Takes minutes on two cores; what is there already is reused. The last line of standard output is a JSON object.
    """
    import os
    import sys

    from dflash_ops.cli.common import console
    from dflash_ops.cli.live import watch
    from dflash_ops.cli.watching import actor, stages
    from dflash_ops.demo.report import table
    from dflash_ops.demo.run import Demo, TrainingFailed, plan_of
    from dflash_ops.demo.setup import find
    from dflash_ops.hosts.factory import open_host

    setup, sizes = plan_of(find(inventory, root, environ=os.environ, cwd=Path.cwd()), steps=steps, quick=quick)
    host = open_host(setup.inventory, setup.job.host)
    demo = Demo(
        setup,
        host,
        setup.inventory.host_of(setup.job).python,
        stages(),
        lambda client: watch(setup.inventory, [client.job], until_end=True),
        os.environ,
        actor=actor(),
        sizes=sizes,
        replace=replace,
        again=again,
    )
    try:
        outcome = demo.run()
    except TrainingFailed as failed:
        print(failed.outcome.last_line(), flush=True)
        raise
    except KeyboardInterrupt:
        print(demo.interrupted(), file=sys.stderr)
        return 130
    finally:
        host.close()
    out = console()
    out.print(table(outcome))
    for fault in outcome.faults():
        out.print(f"failed: {fault}", style="bold red")
    print(outcome.last_line(), flush=True)
    return 1 if outcome.faults() else 0
