"""`python3 resident.pyz COMMAND --root ROOT ...`: a table of commands, each imported only when it is called.

Answers are JSON on standard output (`logs` gives raw bytes). An expected failure is one line
`{"schema":1,"error":{"type","what","where","next"}}` there, with the exit code of its class (dflash_ops/errors.py).
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from pathlib import Path

#: command -> (module, function, what it does)
COMMANDS = {
    "start": ("start", "main", "start the next attempt of the job on standard input"),
    "begin": ("begin", "main", "switch resident and release, then start, in one step"),
    "stop": ("stop", "main", "TERM, then KILL after the grace time"),
    "snapshot": ("snapshot", "main", "the job's state"),
    "follow": ("snapshot", "follow_main", "the job's state, one line a change"),
    "loop": ("loop", "main", "keep snapshot.json fresh (a daemon)"),
    "wrap": ("wrap", "main", "run the trainer (called by start)"),
    "logs": ("logs", "main", "an attempt's log, raw"),
    "evidence": ("evidence", "main", "all texts of an attempt, for triage"),
    "journal": ("records", "journal_main", "what was done, and when"),
    "history": ("history", "main", "the course of attempts, for a report"),
    "record": ("records", "record_main", "write an operator's event into the journal"),
    "attempts": ("records", "attempts_main", "list all attempts"),
    "activate": ("records", "activate_main", "switch `current` to a release"),
    "releases": ("releases", "main", "list the releases that are there"),
    "rollback": ("rollback", "main", "back to what ran before"),
    "pace": ("pace", "main", "what a change of the split is decided from"),
    "switch": ("switch", "main", "stop, then start another way, in one deed"),
    "adopted-snapshot": ("adopted", "snapshot_main", "state of a session that we did not start"),
    "adopted-follow": ("adopted_follow", "main", "the same, one line a second"),
    "adopted-logs": ("adopted", "logs_main", "its pane's output, raw"),
    "adopted-stop": ("adopted", "stop_main", "TERM to its trainer, never KILL"),
    "aside": ("aside", "main", "move the checkpoints aside, whole"),
    "enable": ("enable", "main", "have the machine start the resident at boot"),
    "boot": ("enable", "boot_main", "what the machine calls at boot"),
    "checkpoints": ("checkpoints", "main", "list, verify, set aside, bring back"),
    "repair": ("repair", "main", "one pass of the supervisor"),
    "reset": ("reset", "main", "clear what the supervisor counted: a person has looked"),
    "notify": ("notify", "main", "hand one message to apprise"),
    "preflight": ("preflight", "main", "is the machine ready for the job"),
}


def usage() -> str:
    lines = [f"  {name:16} {what}" for name, (_, _, what) in COMMANDS.items()]
    return "usage: resident COMMAND --root ROOT ...\n\n" + "\n".join(lines) + "\n"


def main(args: list[str]) -> int:
    from dflash_ops.errors import DflashError, UsageError
    from dflash_ops.resident import answer

    if not args or args[0] in ("-h", "--help"):
        sys.stdout.write(usage())
        return 0 if args else 2
    try:
        if args[0] not in COMMANDS:
            raise UsageError(f"no command {args[0]!r}", "resident", f"use one of {', '.join(COMMANDS)}")
        module, function, _ = COMMANDS[args[0]]
        run = getattr(importlib.import_module(f"dflash_ops.resident.{module}"), function)
        return int(run(args[1:]))
    except DflashError as failure:
        return answer.error(failure)
    except BrokenPipeError:
        # The reader went away: nothing to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as failure:
        advice = {errno.ENOSPC: "make room on that disk", errno.EROFS: "make that file system writable"}
        text = f"`{args[0]}` failed: {failure.strerror or failure}"
        place = str(failure.filename or "")
        return answer.error(DflashError(text, place, advice.get(failure.errno or 0, "see whether it may be accessed")))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    # By its real name from here on: `current.pyz` may be switched while we run, and zipimport reads by name.
    if sys.path and Path(sys.path[0]).is_file():
        sys.path[0] = os.path.realpath(sys.path[0])
    sys.exit(main(sys.argv[1:]))
