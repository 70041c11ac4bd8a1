"""`dflash-ops`: the frame around the commands.

The rule here: a command's module is imported only when that command is called. The table below has what `--help`
needs to list it; `command` of `dflash_ops.cli.<module>` has the rest. A command returns its exit code (None is 0),
or raises a DflashError, which is rendered here and nowhere else: for people on standard error, and with `--json` also
as an object on standard output, where the error leaves no other answer.
"""

from __future__ import annotations

from dflash_ops.cli import early  # isort: skip  # first: what follows takes a while, and Ctrl-C may come meanwhile

import errno
import functools
import importlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from dflash_ops import __version__
from dflash_ops.cli.common import colours, discard_output, error_json, print_json, render_error
from dflash_ops.errors import EXIT_CODES, DflashError, UsageError, did_you_mean

early.over()


@dataclass(frozen=True)
class Entry:
    """One command: its module under dflash_ops.cli, and its line in `--help`."""

    module: str
    help: str


COMMANDS: dict[str, Entry] = {
    "init": Entry("init", "Write a commented inventory.toml to start from."),
    "doctor": Entry("doctor", "Check this machine and a job's host, and say what to do for each thing missing."),
    "deploy": Entry("deploy", "Send the code, check the machine, start the job."),
    "status": Entry("status", "State, progress and rates of a job."),
    "logs": Entry("logs", "The job's output, from one worker or all."),
    "stop": Entry("stop", "Stop a job: save, then exit; by force only after the grace time."),
    "releases": Entry("releases", "List a job's releases: which is current, which ran in which attempt."),
    "rollback": Entry("rollback", "Back to a release that ran before, with its config, from the newest checkpoint."),
    "rebalance": Entry("rebalance", "Divide the devices of a running job anew: predict, apply, measure."),
    "checkpoints": Entry("checkpoints", "A job's checkpoints: list, verify, set aside, bring back."),
    "adopt": Entry("adopt", "Watch a tmux session that dflash-ops did not start."),
    "enable": Entry("enable", "Watch a job again after its machine has booted (systemd or cron)."),
    "attach": Entry("attach", "Open the job's tmux session in this terminal."),
    "triage": Entry("triage", "Name the cause of a crash from logs, a pane, standard input or a job."),
    "incidents": Entry("incidents", "What failed, what was done about it, and what it cost."),
    "supervise": Entry("supervise", "Watch jobs from outside: host, container, resident, kernel log."),
    "report": Entry("report", "One html file of a run: curves, shares, incidents, config."),
    "exporter": Entry("exporter", "Metrics of jobs for Prometheus."),
    "playbooks": Entry("playbooks", "The kinds of failure: list, show, lint, test."),
    "demo": Entry("demo", "The whole way on this machine with a tiny target: train, watch, evaluate, export."),
}

#: click's own exception, wherever this version of typer keeps it (newer ones carry their own copy of click).
_CLICK_ERROR: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

#: What a full disk says of standard output.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO)

#: Set by main(): an exception's traceback is shown.
DEBUG_VARIABLE = "DFLASH_DEBUG"

#: Set by the shell's script while it completes a line (typer's name for it).
COMPLETE_VARIABLE = "_DFLASH_OPS_COMPLETE"

#: Words that people know from other tools, and the command that does it here.
ELSEWHERE = {
    "start": "deploy", "run": "deploy", "restart": "deploy --replace --resume", "kill": "stop", "ps": "status --all",
    "top": "status --watch", "watch": "status --watch", "list": "status --all", "tail": "logs -f", "diagnose": "triage",
    "evaluate": "python -m trainer evaluate", "export": "python -m trainer export",
    "regenerate": "python -m trainer regenerate",
}  # fmt: skip


class LazyGroup(TyperGroup):
    """A group whose commands are names in a table until one is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = COMMANDS.get(cmd_name)
        return None if entry is None else load_command(cmd_name, entry)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}.{_meant(args[0])}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        # From the table: click would import the module of every command that begins so, for its line of help.
        if incomplete.startswith("-"):
            return list(super().shell_complete(ctx, incomplete))
        items = importlib.import_module(f"{_CLICK_ERROR.__module__.rpartition('.')[0]}.shell_completion")
        there = COMMANDS.items()
        return [items.CompletionItem(name, help=entry.help) for name, entry in there if name.startswith(incomplete)]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), text) for code, text in EXIT_CODES.items()])


def _meant(word: str) -> str:
    """What to say after "No such command"."""
    if word in ELSEWHERE:
        return f" Did you mean {ELSEWHERE[word]!r}?"
    near = did_you_mean(word, COMMANDS, cutoff=0.5).removeprefix("; did")
    return f" Did{near}" if near else f" There are: {', '.join(COMMANDS)}."


def load_command(name: str, entry: Entry) -> Any:
    """The click command of one entry, its module imported now."""
    module = importlib.import_module(f"dflash_ops.cli.{entry.module}")
    if (group := getattr(module, "app", None)) is not None:  # a command with commands of its own
        made = get_command(group)
        for command in (made, *made.commands.values()):  # type: ignore[attr-defined]
            command.callback = _interruptible(command.callback) if command.callback is not None else None
        return made
    app = typer.Typer(add_completion=False, rich_markup_mode=None)  # completion is the whole program's
    app.command(name, help=module.command.__doc__ or entry.help)(_interruptible(module.command))
    return get_command(app)


def _interruptible(command: Callable[..., Any]) -> Callable[..., Any]:
    """Ctrl-C ends a command with 130 and a word: typer would end it with 130 and an empty line."""

    @functools.wraps(command)
    def run_it(*args: Any, **options: Any) -> Any:
        try:
            return command(*args, **options)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130

    return run_it


def _version(value: bool) -> None:
    if value:
        print(f"dflash-ops {__version__}")
        raise typer.Exit


# rich_markup_mode=None: typer's own help; rich's panels would cost an import of 0.1 s and more on every --help.
app = typer.Typer(
    cls=LazyGroup,
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _frame(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Supervises long multi-GPU training jobs on remote machines, names each crash and repairs what can be repaired."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and leave with its exit code (docs/contracts.md, Exit codes)."""
    args = list(sys.argv[1:] if argv is None else argv)
    # Closed by the caller (`>&-`): what would be said has nowhere to go, which is no reason to fail.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 must not end a command
    code = run(args)
    # All is said and done: a Ctrl-C while the interpreter goes away has nothing to interrupt, and 130 would be wrong.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    # CPython remembers a Ctrl-C that left an `exec` (each dataclass that is imported runs one) and ends `python -m` by
    # the signal instead of with our exit code; an `exec` that ends well makes it forget.
    exec("")
    sys.exit(code)


def run(args: list[str]) -> int:
    """One command to its end: its exit code. Errors are rendered here."""
    args, debug = _take_debug(args)
    as_json = "--json" in (args[: args.index("--")] if "--" in args else args)
    try:
        result = get_command(app).main(
            args=args, prog_name="dflash-ops", standalone_mode=False, color=colours(sys.stdout)
        )
        _flush()
    except DflashError as error:
        if debug:
            traceback.print_exc()
        return _failed(error, error.exit_code, as_json)
    except _CLICK_ERROR as error:
        error.show()  # type: ignore[attr-defined]
        code = int(error.exit_code)  # type: ignore[attr-defined]
        if as_json:
            what = error.format_message()  # type: ignore[attr-defined]
            _tell_json(UsageError(what, "arguments", "see them with: --help"), code)
        return code
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.filename is not None or error.errno not in _NO_ROOM:
            return _unexpected(error, args, debug, as_json)
        discard_output()
        what = f"what the command says cannot be written: {error.strerror}"
        render_error(DflashError(what, "standard output", "free some space there, or send it elsewhere"), sys.stderr)
        return 1
    except Exception as error:  # noqa: BLE001  # the last line of defence: a person sees a sentence, not a traceback
        return _unexpected(error, args, debug, as_json)
    return result if isinstance(result, int) and not isinstance(result, bool) else 0


def _failed(error: DflashError, code: int, as_json: bool) -> int:
    """Tell an error; while the shell completes a line nobody reads it, and it would spoil the prompt."""
    if os.environ.get(COMPLETE_VARIABLE):
        return code
    render_error(error, sys.stderr)
    if as_json:
        _tell_json(error, code)
    return code


def _tell_json(error: DflashError, code: int) -> None:
    """What came of it before it failed, where the error has that; else the error itself."""
    try:
        print_json(error.result or error_json(error, code))
    except OSError:  # the sentence on standard error has to do
        discard_output()


def _flush() -> None:
    """What was printed is written now, where a failure can still be told; a reader that left (`| head`) is none."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()


def _unexpected(error: Exception, args: list[str], debug: bool, as_json: bool) -> int:
    if debug:
        traceback.print_exc()
    told = DflashError(
        f"unexpected {type(error).__name__}: {error}",
        f"dflash-ops {' '.join(args[:1])}",
        "this is a fault of dflash-ops; see the traceback with: dflash-ops --debug ...",
    )
    if not debug:
        return _failed(told, 1, as_json)
    if as_json:
        _tell_json(told, 1)
    return 1


def _take_debug(args: list[str]) -> tuple[list[str], bool]:
    """`--debug` may stand anywhere before a `--`: who needs it adds it to the end of the line that failed."""
    end = args.index("--") if "--" in args else len(args)
    kept = [a for a in args[:end] if a != "--debug"]
    debug = len(kept) != end or os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
    return kept + args[end:], debug


if __name__ == "__main__":
    main()
