"""Every command of the README and of the tutorial is run here, in the order of the text, in a scratch folder.

A line of a block without a language (or `sh`, `bash`, `console`) whose first word is a program is a command.
`dflash-ops` and `python -m trainer` are run as they stand and must end with 0, unless a RULE says otherwise; any other
program needs a rule. So a line that nobody has thought of fails.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ending import end_supervisors

REPO = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "docs/tutorial.md")
LANGUAGES = ("", "sh", "bash", "console")
PYTHON = os.path.realpath(sys.executable)

TRAINER = """
import os, signal, sys, time
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
os.makedirs("logs", exist_ok=True)
for step in range(1, 3000):
    time.sleep(0.1)
    print(f"step {step}/3000 loss {4 / step:.3f}", flush=True)
    open(os.environ["ATTEMPT"] + "/logs/drafter0.log", "a").write(f"drafter0 at {step}\\n")
    if stop:
        sys.exit(3)
"""


@dataclass(frozen=True)
class Rule:
    """What to do with the lines that `pattern` matches.

    Args:
        codes: exit codes that are right. more: words behind the line. lasts: it does not end by itself; it is
        interrupted once it has said this. skip: why it is not run. proof: the test that runs it instead.
        after: what happens to the scratch folder behind it.
    """

    pattern: str
    codes: tuple[int, ...] = (0,)
    more: str = ""
    lasts: str | None = None
    skip: str = ""
    proof: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    after: Callable[[Path], None] | None = None


def own_job(scratch: Path) -> None:
    """`main`, the reader's own job, instead of the demo that `init` writes: short, and no torch."""
    (scratch / "src").mkdir()
    (scratch / "src/train.py").write_text(TRAINER)
    job = {
        "host": "local", "root": str(scratch / "root"), "session": "main", "source": str(scratch / "src"),
        "socket": socket_of(scratch), "command": [PYTHON, "{release}/train.py"], "grace_s": 20,
        "progress": r"step (?P<step>\d+)/(?P<total>\d+) loss (?P<loss>\S+)", "env": {"ATTEMPT": "{attempt}"},
    }  # fmt: skip
    gpus = {"target_devices": [0, 1], "drafter_devices": [2]}
    trainer = {**gpus, "target": {"path": "/models/target"}, "data": {"path": "/data/train.jsonl"}}
    for name, keys in (("inventory.toml", job), ("gpus.toml", {**bundled(scratch), "trainer": trainer})):
        write_inventory(scratch / name, keys)


def bundled(scratch: Path) -> dict[str, object]:
    return {"host": "local", "root": str(scratch / "gpus"), "interpreter": PYTHON, "socket": socket_of(scratch)}


def write_inventory(path: Path, job: dict[str, object]) -> None:
    from dflash_ops.deploy.toml import dump_toml

    hosts = {"local": {"kind": "local", "python": PYTHON}}
    path.write_text(dump_toml({"schema": 1, "hosts": hosts, "jobs": {"main": job}}))


def socket_of(scratch: Path) -> str:
    return (scratch / ".socket").read_text()


RULES = (
    Rule(r"make (demo|demo-crash|chaos|bench|venv.*|lab)$", skip="minutes, or a network: its target is looked up only"),
    Rule(r"make test$", skip="this is it"),
    Rule(r"make golden$|DFLASH_GOLDEN=DIR make golden", skip="tests/trainer/test_golden.py"),
    Rule(r"dflash-ops init$", after=own_job),
    Rule(r"dflash-ops doctor", codes=(0, 3)),  # what this machine lacks is no fault of the text
    Rule(r"dflash-ops status main --watch", lasts="stepping"),
    Rule(r"dflash-ops logs main -f", lasts="drafter0 at"),
    Rule(r"dflash-ops exporter", lasts="", more="--listen 127.0.0.1:0"),
    Rule(r"dflash-ops supervise --all", lasts=""),
    Rule(r"dflash-ops deploy .*--target-gpus", more="--plan", codes=(3,), environ={"DFLASH_INVENTORY": "gpus.toml"}),
    Rule(r"dflash-ops rebalance", proof="tests/deploy/test_rebalance.py"),  # a run of the bundled trainer, measured
    Rule(r"dflash-ops enable", proof="tests/lab/test_wire_boot.py"),  # writes into this machine's start
    Rule(r"dflash-ops --install-completion", codes=(0, 1)),  # 1: whose shell this is cannot be told under a test
    Rule(r"python -m trainer check", proof="tests/trainer/test_found_by_trying.py"),
    Rule(r"python -m trainer verify", proof="tests/trainer/test_average_memory.py"),
    Rule(r"python -m trainer features", proof="tests/trainer/test_features.py"),
    Rule(r"python benchmarks/", skip="a measurement of minutes"),
)


def commands(text: str) -> list[str]:
    """The command lines of a document: comments and prompts gone, continued lines joined."""
    found, fence, language = [], False, ""
    waiting = ""
    for line in text.splitlines():
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
    return found


def looks_like_one(words: str) -> bool:
    """In a block without a language there may be output as well: only programs that this text uses are commands."""
    return words.split()[0].partition("=")[0] in (
        "dflash-ops", "make", "python", "pip", "git", "cd", "mkdir", "cp", "export", "ssh", "tmux", "DFLASH_GOLDEN",
    )  # fmt: skip


def rule_of(line: str) -> Rule:
    """
    Raises:
        AssertionError: nothing says what to do with this line.
    """
    for rule in RULES:
        if re.match(rule.pattern, line):
            return rule
    known = line.startswith(("dflash-ops ", "python -m trainer "))
    assert known, f"the text has a command that no rule of {Path(__file__).name} knows: {line}"
    return Rule(line)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home of its own, with `dflash-ops` and `python` as this checkout has them, and the files that a text names."""
    at = tmp_path_factory.mktemp("reader")
    (at / ".socket").write_text(f"dflash-test-{secrets.token_hex(4)}")
    (at / "bin").mkdir()
    for name, words in (("dflash-ops", "-m dflash_ops.cli.main"), ("python", "")):
        (at / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (at / "bin" / name).chmod(0o755)
    (at / "train.log").write_text("OSError: [Errno 28] No space left on device\n")
    (at / "other.gz").write_bytes(gzip.compress(b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"))
    try:
        yield at
    finally:
        end_supervisors(at)
        subprocess.run(["tmux", "-L", socket_of(at), "kill-server"], capture_output=True, timeout=20)
        for start in at.glob("*/run/attempts/*/start.json"):
            for one in ("wrapper", "launcher"):
                pid = json.loads(start.read_text())[one]["pid"]
                with contextlib.suppress(OSError):
                    if str(at).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_of_the_text_does_what_it_says(document: str, scratch: Path) -> None:
    if not (REPO / document).exists():
        pytest.skip(f"{document} is not written yet")
    lines = commands((REPO / document).read_text("utf-8"))
    assert lines
    targets = (REPO / "Makefile").read_text("utf-8")
    for line in lines:
        rule = rule_of(line)
        if line.startswith("make "):
            assert re.search(rf"^{line.split()[1]}:", targets, re.MULTILINE), line
        if rule.proof:
            text = (REPO / rule.proof).read_text("utf-8")
            word = line.split()[3 if line.startswith("python") else 1]
            assert f'"{word}"' in text or f" {word} " in text, f"{rule.proof} does not run: {line}"
        elif not rule.skip:
            said = obeyed(line, rule, scratch)
            assert said.returncode in rule.codes, f"{line}\n{said.stdout}{said.stderr}"
            assert "Traceback" not in said.stderr, f"{line}\n{said.stderr}"
        if rule.after is not None:
            rule.after(scratch)


def obeyed(line: str, rule: Rule, scratch: Path) -> subprocess.CompletedProcess[str]:
    """The line typed by somebody in the scratch folder; one that lasts is interrupted once it has said its word."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DFLASH_", "XDG_", "TMUX"))}
    env = {**kept, "PATH": f"{scratch / 'bin'}:{kept['PATH']}", "PYTHONPATH": str(REPO), "HOME": str(scratch)}
    words = f"exec {line} {rule.more}"
    process = subprocess.Popen(
        ["bash", "-c", words], cwd=scratch, env={**env, **rule.environ}, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        if rule.lasts is None:
            out, err = process.communicate(timeout=120)
            return subprocess.CompletedProcess(line, process.returncode, out, err)
        assert process.stdout is not None
        seen = ""
        if rule.lasts:
            for text in process.stdout:
                seen += text
                if rule.lasts in text:
                    break
        else:
            time.sleep(1.5)  # it has nothing to say; that it goes on is what is wanted
            assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        ended = 0 if process.returncode == 130 else process.returncode
        return subprocess.CompletedProcess(line, ended if rule.lasts in seen + out else 1, seen + out, err)


def test_a_command_that_nobody_knows_fails_and_comments_are_none() -> None:
    plain = "```\nmake test     # all\nsome output: yes\n$ dflash-ops status \\\n  main\n```\n"
    text = plain + "```toml\nx = 1\n```\n```sh\nrm -rf x\n```\n"
    assert commands(text) == ["make test", "dflash-ops status main", "rm -rf x"]
    with pytest.raises(AssertionError, match="rm -rf x"):
        rule_of("rm -rf x")
