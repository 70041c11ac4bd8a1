"""Full disks, read-only roots, missing programs, secrets: a clear error, and nothing half-done left behind."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from resident_lab import Lab, lab, wait_for

from dflash_ops.contracts import State, dumps
from dflash_ops.errors import DflashError
from dflash_ops.resident import attempts, daemon, proc
from dflash_ops.resident.start import start


def _mount(folder: Path, *options: str) -> bool:
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, timeout=30, check=False)
    return done.returncode == 0


@pytest.fixture
def small(pyz: Path, tmp_path: Path) -> Iterator[tuple[Lab, bool]]:
    """A root on a file system of 512 KB; without the right to mount, a limit of that size on each file (False)."""
    with lab(pyz, tmp_path) as made:
        mounted = _mount(made.root, "-t", "tmpfs", "-o", "size=512k", "none")
        try:
            yield made, mounted
        finally:
            made.close()
            if mounted:
                subprocess.run(["umount", "-l", str(made.root)], check=True, timeout=30)


def _fill(folder: Path) -> Path:
    """Take every block that is left."""
    place = folder / "ballast"
    with place.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    return place


def test_a_disk_that_fills_up_costs_log_bytes_and_nothing_else(small: tuple[Lab, bool]) -> None:
    one, mounted = small
    limit = None if mounted else (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000)))
    done = subprocess.run(
        one.argv("start"),
        input=dumps(one.job()).encode(),
        capture_output=True,
        timeout=60,
        preexec_fn=limit,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    one.stepping()
    one.ask("flood")  # 3 MB
    wait_for(lambda: not (one.control / "flood").exists(), "the flood")
    if mounted:
        _fill(one.root)
    one.ask("exit7")  # it lives: it reads its orders and obeys
    wait_for(lambda: one.layout.attempt(1).exit.exists(), "exit.json on a full disk")
    said = one.snapshot()
    assert said.state is State.CRASHED
    assert said.exit is not None and said.exit.rc == 7
    assert said.exit.log_bytes == one.layout.attempt(1).log.stat().st_size
    assert said.exit.log_lost_bytes > 2_000_000
    assert any("bytes of the log were lost" in w for w in said.warnings)


def test_a_full_disk_can_be_stopped_on(small: tuple[Lab, bool]) -> None:
    one, mounted = small
    if not mounted:
        _limit_only()
        return
    one.start("save-on-term")
    one.stepping()
    _fill(one.root)
    said = one.ok("stop")
    assert said["exit"]["rc"] == 3
    assert said["state"] == "stopped"
    assert any("could not be written down" in w for w in said["warnings"])


def test_a_full_disk_starts_nothing(small: tuple[Lab, bool]) -> None:
    one, mounted = small
    if not mounted:
        _limit_only()
        return
    ballast = _fill(one.root)
    refused = one.run("start", stdin=dumps(one.job()))
    assert (refused.rc, refused.error["type"]) == (1, "StartError")
    assert "No space left" in refused.error["what"]
    assert "make room" in refused.error["next"]
    assert attempts.numbers(one.layout) == []
    assert not one.has_session()
    assert one.snapshot().state is State.UNKNOWN
    ballast.unlink()
    assert one.start()["attempt"] == 1


def _limit_only() -> None:
    """Without a mount: the journal and every record are refused as by a full disk, by the limit on a file's size."""
    code = """
import resource, sys, pathlib, tempfile
from dflash_ops.resident import journal
from dflash_ops.resident.files import write_atomic
folder = pathlib.Path(tempfile.mkdtemp())
journal.append(folder / "journal.jsonl", "note")
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for write in (lambda: journal.append(folder / "journal.jsonl", "note"), lambda: write_atomic(folder / "x", b"y" * 200)):
    try:
        write()
    except OSError:
        continue
    raise SystemExit("written")
assert sorted(p.name for p in folder.iterdir()) == ["journal.jsonl"]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_read_only_root(one: Lab) -> None:
    bound = _mount(one.root, "--bind", str(one.root)) and _mount(one.root, "-o", "remount,bind,ro")
    if not bound:
        one.root.chmod(0o555)
    try:
        refused = one.run("start", stdin=dumps(one.job()))
        assert (refused.rc, refused.error["type"]) == (1, "StartError")
        assert "Read-only" in refused.error["what"] or "Permission" in refused.error["what"]
        assert str(one.root) in refused.error["where"]
        assert one.snapshot().detail == "never started"
        assert one.run("record", "--event", "deployed", stdin="{}").error["what"]
        assert not one.has_session()
    finally:
        if bound:
            subprocess.run(["umount", str(one.root)], check=True, timeout=30)
        else:
            one.root.chmod(0o755)


def test_a_trainer_that_cannot_be_started(one: Lab) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"argv": ("/no/such/python", "-m", "trainer")}, "/no/such/python: No such file or directory"),
        ({"argv": ("nosuchprogram",)}, "nosuchprogram: No such file or directory"),
        ({"argv": ("/tmp",)}, "/tmp: Permission denied"),
        ({"cwd": "/no/such/folder"}, "/no/such/folder: No such file or directory"),
    ]
    for changes, says in cases:
        refused = one.run("start", stdin=dumps(one.job(**changes)))
        assert (refused.rc, refused.error["type"]) == (1, "StartError")
        assert says in refused.error["what"]
        assert not one.has_session()
        said = one.snapshot()
        assert said.state is State.CRASHED
        assert said.exit is not None and said.exit.rc == 127
        assert says in said.detail
        assert says.encode() in one.layout.attempt(said.attempt or 0).log.read_bytes()
    assert [e.attempt for e in one.events("start_failed")] == [1, 2, 3, 4]
    # a number is never used twice, not even when somebody cleans up
    shutil.rmtree(one.layout.attempt(4).path)
    assert one.start()["attempt"] == 5


def test_a_wrapper_that_dies_at_once_is_told_with_the_panes_last_words(one: Lab, tmp_path: Path) -> None:
    """Here: a zipapp of which the wrapper's part is missing, as after a bad copy."""
    import zipfile

    broken = tmp_path / "broken.pyz"
    with zipfile.ZipFile(one.pyz) as whole, zipfile.ZipFile(broken, "w") as part:
        for name in whole.namelist():
            if name != "dflash_ops/resident/wrap.py":
                part.writestr(name, whole.read(name))
    one.pyz = broken
    refused = one.run("start", stdin=dumps(one.job()))
    assert refused.error["type"] == "StartError"
    assert "wrap" in refused.error["what"]
    assert not one.has_session()
    assert one.snapshot().state is State.CRASHED


@pytest.mark.parametrize(
    ("changes", "error", "key"),
    [
        ({"session": "a.b"}, "UsageError", "session"),
        ({"socket": "../x"}, "UsageError", "socket"),
        ({"argv": ()}, "UsageError", "argv"),
        ({"root": "/elsewhere"}, "UsageError", "root"),
        ({"files": {"../x": ""}}, "UsageError", "files"),
        ({"files": {"exit.json": ""}}, "UsageError", "files"),
        ({"secret_env": ("NOPE",)}, "UsageError", "secret_env"),
        ({"progress": "("}, "ContractError", "("),
        ({"argv": ("{release}/x",)}, "UsageError", "current"),
    ],
)
def test_a_job_that_cannot_be_meant(one: Lab, changes: dict[str, Any], error: str, key: str) -> None:
    with pytest.raises(DflashError) as refused:
        start(one.root, one.job(**changes))
    assert type(refused.value).__name__ == error
    assert key in refused.value.where
    assert refused.value.exit_code in (2, 6)
    assert attempts.numbers(one.layout) == []


def test_standard_input_that_is_no_job(one: Lab) -> None:
    for text, says in (("", "no JSON"), ("{", "no JSON"), ("[]", "expected a JSON object"), ("{}", "'job' is missing")):
        refused = one.run("start", stdin=text)
        assert (refused.rc, refused.error["type"]) == (6, "ContractError")
        assert says in refused.error["what"]


def test_secrets_are_nowhere_but_in_the_trainers_environment(one: Lab) -> None:
    secret = "hunter2-hunter2"
    env = {"CONTROL": str(one.control), "API_TOKEN": secret, "PLAIN": "x"}
    one.start(env=env, secret_env=("API_TOKEN",))
    one.stepping()
    needle = secret.encode()
    holders = set()
    for process in proc.every():
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                if needle in Path(f"/proc/{process.pid}/{name}").read_bytes():
                    holders.add((process.pid, name))
    holders -= {(os.getpid(), "cmdline")}
    assert holders == {(one.launcher().pid, "environ")}
    assert secret not in one.tmux("show-environment", "-g") + one.tmux("show-environment", "-t", "trainer")
    assert secret not in one.tmux("list-panes", "-a", "-F", "#{pane_start_command}")
    for path in one.root.rglob("*"):
        if path.is_file():
            assert needle not in path.read_bytes(), path
    assert one.events("attempt_started")[0].data["env"] == ["API_TOKEN", "CONTROL", "PLAIN"]
    assert json.loads(one.layout.job.read_text())["env"] == {"CONTROL": str(one.control), "PLAIN": "x"}


def test_a_foreign_program_without_progress_lines_is_running(one: Lab) -> None:
    one.start(argv=("/bin/sleep", "300"), progress="")
    said = one.until(lambda s: s.started is not None, "the start")
    assert (said.state, said.detail) == (State.LOADING, "running, no progress lines seen yet")


def test_the_loop_leaves_when_its_folder_is_gone(one: Lab) -> None:
    one.start(argv=("/bin/true",))
    record = wait_for(lambda: daemon.running(one.layout), "the loop")
    one.ok("stop")
    one.layout.run.rename(one.root / "moved")
    wait_for(lambda: not proc.alive(record.process), "the loop's end")
    assert not one.layout.run.exists()
