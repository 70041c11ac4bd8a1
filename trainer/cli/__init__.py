"""The trainer's commands. A command's module is imported only when it is asked for, so `--help` needs no torch.

Each module has `add_arguments(parser)` and `main(args) -> int` (the exit code), and says what it does in its docstring.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Sequence

from trainer.errors import TrainerError, say

#: command -> (module, one line for --help)
COMMANDS = {
    "run": ("trainer.cli.run", "train a drafter"),
    "check": ("trainer.cli.check", "look whether a run could start, and what it would take"),
    "audit": ("trainer.cli.audit", "say whether every sample was trained once an epoch"),
    "verify": ("trainer.cli.verify", "read checkpoints whole, and say which are not"),
    "evaluate": ("trainer.cli.evaluate", "measure a drafter in the real speculative loop"),
    "export": ("trainer.cli.export", "write a checkpoint's drafter as servers load it"),
    "import": ("trainer.cli.import_drafter", "print the [drafter] table that goes on from a drafter's folder"),
    "features": ("trainer.cli.features", "write the target's features to disk, to train from them later"),
    "regenerate": ("trainer.cli.regenerate", "let the target itself write the responses"),
    "demo-target": ("trainer.cli.demo_target", "train the tiny target of the demo"),
    "smoke": ("trainer.cli.smoke", "a few real steps at tiny size, before a job is replaced"),
}


def main(argv: Sequence[str]) -> int:
    """Runs one command; an error that the trainer understands is told without a traceback."""
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Trains a DFlash drafter.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked_for = parser
    asked = next((word for word in argv if not word.startswith("-")), None)
    for name, (module, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        if name == asked:
            importlib.import_module(module).add_arguments(sub)
            asked_for = sub
    if asked is not None and asked not in COMMANDS:
        parser.error(f"there is no command {asked!r}{_near(asked, COMMANDS)}; there are: {', '.join(COMMANDS)}")
    arguments, strangers = parser.parse_known_args(argv)
    if strangers:
        known = [option for action in asked_for._actions for option in action.option_strings]
        asked_for.error(f"unrecognized arguments: {' '.join(strangers)}{_near(strangers[0], known)}")
    try:
        code: int = importlib.import_module(COMMANDS[arguments.command][0]).main(arguments)
    except TrainerError as error:
        say(error)
        return error.exit_code
    return code


def _near(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing where no known word is near."""
    import difflib

    close = difflib.get_close_matches(word.partition("=")[0], list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
