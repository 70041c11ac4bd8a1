"""Follows a text: every command in it is run, in its order, in a scratch folder.

A line of a block without a language (or `sh`, `bash`, `console`) whose first word is a program is a command.
`dflash-ops` and `python -m trainer` are run as they stand and must end with 0, unless a RULE says otherwise; any other
program needs a rule. So a line that nobody has thought of fails.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ending import end_supervisors

REPO = Path(__file__).resolve().parents[1]
LANGUAGES = ("", "sh", "bash", "console")


@dataclass(frozen=True)
class Rule:
    """What to do with the lines that `pattern` matches.

    Args:
        codes: exit codes that are right. more: words behind the line. lasts: it does not end by itself; it is
        interrupted once it has said this, on either stream. skip: why it is not run. proof: the test that runs it
        instead. after: what happens to the scratch folder behind it. instead: what is done in its place.
    """

    pattern: str
    codes: tuple[int, ...] = (0,)
    more: str = ""
    lasts: str | None = None
    skip: str = ""
    proof: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    after: Callable[[Reader], None] | None = None
    instead: Callable[[Reader], None] | None = None


def commands(text: str) -> list[str]:
    """The command lines of a document: comments and prompts gone, continued lines joined."""
    found, fence, language = [], False, ""
    waiting, here = "", ""
    for line in text.splitlines():
        if here:  # the lines of a here-document belong to its command as they stand
            found[-1] += f"\n{line}"
            here = "" if line == here else here
            continue
        if match := re.match(r"\s*```(\w*)", line):
            fence, language, waiting = not fence, match[1], ""
            continue
        if not fence or language not in LANGUAGES:
            continue
        words = waiting + re.sub(r"\s+#( .*)?$", "", line.strip().removeprefix("$ "))
        if words.endswith("\\"):
            waiting = words[:-1].rstrip() + " "
            continue
        waiting = ""
        if re.match(r"([A-Z_]+=\S+ )*[a-z][\w.-]* ?", words) and (language or looks_like_one(words)):
            found.append(words)
            here = match[1] if (match := re.search(r"<<'?(\w+)'?", words)) else ""
    return found


def looks_like_one(words: str) -> bool:
    """In a block without a language there may be output as well: only programs that this text uses are commands."""
    return words.split()[0].partition("=")[0] in (
        "dflash-ops", "make", "python", "pip", "git", "cd", "mkdir", "cp", "export", "ssh", "tmux", "DFLASH_GOLDEN",
    )  # fmt: skip


def rule_of(line: str, rules: Sequence[Rule]) -> Rule:
    """
    Raises:
        AssertionError: nothing says what to do with this line.
    """
    for rule in rules:
        if re.match(rule.pattern, line):
            return rule
    known = line.startswith(("dflash-ops ", "python -m trainer "))
    assert known, f"the text has a command that no rule knows (tests/docs, tests/reader.py): {line}"
    return Rule(line)


def follow(text: str, rules: Sequence[Rule], reader: Reader) -> None:
    """Every command of the text, in its order.

    Raises:
        AssertionError: one is unknown, ends with another exit code than it should, or its proof does not run it.
    """
    lines = commands(text)
    assert lines
    targets = (REPO / "Makefile").read_text("utf-8")
    for line in lines:
        rule = rule_of(line, rules)
        if line.startswith("make "):
            assert re.search(rf"^{line.split()[1]}:", targets, re.MULTILINE), line
        if rule.proof:
            proof = (REPO / rule.proof).read_text("utf-8")
            word = line.split()[3 if line.startswith("python") else 1]
            assert f'"{word}"' in proof or f" {word} " in proof, f"{rule.proof} does not run: {line}"
        elif rule.instead is not None:
            rule.instead(reader)
        elif not rule.skip:
            said = reader.obey(line, rule)
            assert said.returncode in rule.codes, f"{line}\n{said.stdout}{said.stderr}"
            assert "Traceback" not in said.stderr, f"{line}\n{said.stderr}"
        if rule.after is not None:
            rule.after(reader)


@dataclass
class Reader:
    """Somebody who types the lines in a scratch folder: a home of its own, with `dflash-ops` and `python` as this
    checkout has them."""

    home: Path
    cwd: Path
    environ: dict[str, str]
    #: tmux socket of his jobs on this machine.
    socket: str = field(default_factory=lambda: f"dflash-test-{secrets.token_hex(4)}")

    def obey(self, line: str, rule: Rule) -> subprocess.CompletedProcess[str]:
        """The line, typed; one that lasts is interrupted once it has said its word. `cd` holds for the next ones."""
        if line.startswith("cd "):
            self.cwd = self.cwd / line.split()[1]
            return subprocess.CompletedProcess(line, 0 if self.cwd.is_dir() else 1, "", "")
        process = subprocess.Popen(
            ["bash", "-c", f"{line} {rule.more}".strip()], cwd=self.cwd, env={**self.environ, **rule.environ},
            text=True, errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        with process:
            if rule.lasts is None:
                out, err = process.communicate(timeout=150)
                return subprocess.CompletedProcess(line, process.returncode, out, err)
            seen, told = until_said(process, rule.lasts)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            out, err = process.communicate(timeout=60)
            ended = 0 if process.returncode in (130, -signal.SIGINT) else process.returncode
            return subprocess.CompletedProcess(line, ended, seen + out, told + err)

    def end(self) -> None:
        """Nothing that its commands started lives on."""
        end_supervisors(self.home)
        kill = ["tmux", "-L", self.socket, "kill-server"]
        subprocess.run(kill, capture_output=True, timeout=20, env=self.environ)
        Path(f"/tmp/tmux-{os.getuid()}/{self.socket}").unlink(missing_ok=True)
        own = str(self.home).encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if any(word.startswith(own) for word in (entry / "cmdline").read_bytes().split(b"\0")):
                        os.kill(int(entry.name), signal.SIGKILL)


def until_said(process: subprocess.Popen[str], word: str, within: float = 150.0) -> tuple[str, str]:
    """Both its streams so far, once one of them has said `word`.

    Raises:
        AssertionError: it did not say so in time, or ended before; it is killed then.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    seen = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    ended: set[int] = set()
    deadline = time.monotonic() + within
    while not any(word.encode() in said for said in seen.values()):
        ready, _, _ = select.select(seen.keys() - ended, [], [], max(0.0, deadline - time.monotonic()))
        for stream in ready:
            data = os.read(stream, 1 << 16)
            seen[stream] += data
            ended |= set() if data else {stream}
        if not ready or ended == seen.keys():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"{process.args} did not say {word!r}: {seen}")
    out, err = (said.decode("utf-8", "replace") for said in seen.values())
    return out, err


def reader_in(home: Path) -> Reader:
    """A reader whose home is this new folder; his tmux servers lie in it, too."""
    (home / "bin").mkdir()
    for name, words in (("dflash-ops", "-m dflash_ops.cli.main"), ("python", "")):
        (home / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (home / "bin" / name).chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DFLASH_", "XDG_", "TMUX"))}
    own = {"PATH": f"{home / 'bin'}:{kept['PATH']}", "PYTHONPATH": str(REPO), "HOME": str(home)}
    return Reader(home, home, {**kept, **own})
