"""`notify`: hand one message to apprise, in a process of its own that nobody waits for.

The rules here: a sink that is slow or down costs its deadline and a line in resident.log, nothing else; where it leads
and its secrets stand in apprise's own config file (or in its environment), never in an argument list, a journal or a
log. Standard input gives `{file, title, text, program}`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

#: Seconds that apprise has for all its sinks.
DEADLINE_S = 30.0
#: Characters of a title and of a text that are sent.
_TITLE, _TEXT = 200, 4000


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="notify", description="{file, title, text, program} on standard input")
    parser.add_argument("--root", required=True, type=Path)
    parser.parse_args(args)
    given = json.load(sys.stdin)
    failed = deliver(given["file"], given["title"], given["text"], program=given.get("program") or "apprise")
    if failed is not None:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        print(when, f"{given['title']}: nobody was notified: {failed}".replace("\n", "; "), file=sys.stderr, flush=True)
    return 0 if failed is None else 1


def program(beside: str = "") -> str:
    """apprise: from PATH, else from where `beside` (the job's interpreter) lies; its bare name where it is nowhere."""
    folder = os.path.dirname(beside)  # noqa: PTH120  # "" stays "": a bare name has no folder
    return shutil.which("apprise") or (shutil.which("apprise", path=folder) if folder else None) or "apprise"


def deliver(file: str, title: str, text: str, *, program: str = "apprise", deadline: float = DEADLINE_S) -> str | None:
    """Run apprise once, the text on its standard input.

    Args:
        file: apprise's config file; "" where its environment (APPRISE_URLS) says where to.

    Returns:
        Why nobody was notified; None where apprise says that it went out.
    """
    argv = [program, f"--title={title[:_TITLE]}"]
    if file:
        if not os.access(file, os.R_OK):
            return f"{file} cannot be read (policy key notify)"
        argv.append(f"--config={file}")
    try:
        child = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except FileNotFoundError:
        return "apprise is not installed there: pip install apprise"
    except OSError as error:
        return f"{program} cannot be run: {error.strerror}"
    try:
        child.communicate(text[:_TEXT].encode("utf-8", "replace"), timeout=deadline)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return f"apprise did not end within {deadline:g} s"
    # What it says may hold an address with its secret: the code is all that is told.
    return None if child.returncode == 0 else f"apprise ended with {child.returncode}; try: apprise -vv -c {file}"
