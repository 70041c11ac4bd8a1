"""`python -m trainer run`: trains until the plan is done, or until TERM or INT asks for a checkpoint and an end."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import STOPPED, TrainerError, say, write_error_file
from trainer.node_args import add_node_arguments, node_args

if TYPE_CHECKING:
    from trainer.signals import StopSignals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, type=Path, help="run.toml or run.json (docs/run-config.md)")
    parser.add_argument("--out", required=True, type=Path, help="folder of this attempt: metrics, plan, logs, errors")
    parser.add_argument("--checkpoints", required=True, type=Path, help="folder of the checkpoints")
    parser.add_argument("--resume", default="auto", help="auto (default), none, or a checkpoint's folder")
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="table.key=value", help="override one key"
    )
    add_node_arguments(parser)
    device_arguments(parser)


def device_arguments(parser: argparse.ArgumentParser) -> None:
    """--targets and --drafters, the same for `run` and `check`."""
    parser.add_argument(
        "--targets", type=int, default=None, metavar="N", help="only the first N target devices; 0: train from features"
    )
    parser.add_argument("--drafters", type=int, default=None, metavar="N", help="only the first N drafter devices")


def main(args: argparse.Namespace) -> int:
    if args.nnodes <= 1:
        return _run(args)
    code = 1
    try:
        code = _run(args)
    except Exception as error:  # noqa: BLE001  told as the interpreter would, and the process ends with it
        sys.excepthook(type(error), error, error.__traceback__)
    # A thread may still wait in torch for a wire that was cut, and would abort the interpreter's own end.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def _run(args: argparse.Namespace) -> int:
    from trainer.config import load_config
    from trainer.hub import is_hub_id
    from trainer.prepare import gpus_missing, prepare, raise_if_any
    from trainer.progress import Output
    from trainer.signals import StopSignals

    faulthandler.register(signal.SIGUSR2, all_threads=True)  # "where do you stand?", as in the workers
    with StopSignals() as signals:
        try:
            place = node_args(args)
            config = load_config(args.config, args.overrides, targets=args.targets, drafters=args.drafters)
            raise_if_any(gpus_missing(config))
            if place.several:
                from trainer.several import run_several

                folders = args.out.absolute(), args.checkpoints.absolute()
                return run_several(place, config, *folders, args.resume, signals, _progress(signals))
            if is_hub_id(config.target.path):
                Output().stage("loading", 0, 1, f"hub:{config.target.path}")  # a fetch may take its time
            prepared = prepare(config, args.checkpoints, args.resume, progress=_progress(signals))
            from trainer.launcher import launch

            return launch(prepared, args.out.absolute(), args.checkpoints.absolute(), signals)
        except _StopAsked:
            Output().event("stopped")
            return STOPPED
        except TrainerError as error:
            say(error)
            _record(args.out, error)
            return error.exit_code
        except Exception as error:
            _record(args.out, error)
            raise


class _StopAsked(Exception):
    """TERM or INT while the data are made ready: nothing has been trained, so there is nothing to save."""


def _progress(signals: StopSignals) -> Callable[[int, int, str], None]:
    from trainer.progress import Output

    output = Output()

    def tell(done: int, total: int, pace: str) -> None:
        if signals.waiting():
            raise _StopAsked
        output.stage("tokenizing", done, total, pace)

    return tell


def _record(out: Path, error: Exception) -> None:
    """error.json of the launcher, unless a worker's own says it already."""
    if any(out.glob("errors/*/error.json")):
        return
    try:
        write_error_file(out / "errors" / "launcher" / "error.json", error)
    except OSError as second:
        say(TrainerError(f"error.json could not be written: {second}", str(out)))
