"""One file that any Python from 3.10 on can run."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from resident_lab import Lab, wait_for

from dflash_ops.contracts import State, dumps
from dflash_ops.deploy.zipapp import build_resident, resident_bytes
from dflash_ops.resident import daemon, proc
from dflash_ops.resident.compiled import place_beside, write_compiled

SYSTEM = "/usr/bin/python3"


def test_the_same_content_is_the_same_bytes(tmp_path: Path) -> None:
    first = build_resident(tmp_path / "a" / "one.pyz")
    assert build_resident(tmp_path / "two.pyz") == first
    assert len(first) == 12
    assert (tmp_path / "a" / "one.pyz").read_bytes() == (tmp_path / "two.pyz").read_bytes() == resident_bytes()
    with zipfile.ZipFile(tmp_path / "two.pyz") as archive:
        assert {(i.date_time, i.external_attr) for i in archive.infolist()} == {((1980, 1, 1, 0, 0, 0), 0o644 << 16)}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "two.pyz"]


def test_what_is_in_it_stands_alone(pyz: Path) -> None:
    """Standard library, libtmux and our own parts; Python 3.10 syntax; libtmux's licence travels with it."""
    with zipfile.ZipFile(pyz) as archive:
        names = archive.namelist()
        assert any(n.startswith("libtmux-") and "LICENSE" in n for n in names)
        assert not any("paramiko" in n or "/cli/" in n or "/hosts/" in n for n in names)
        for name in names:
            if name.startswith("dflash_ops/"):
                tree = ast.parse(archive.read(name), name, feature_version=(3, 10))
                for module in _imports(tree):
                    top = module.split(".")[0]
                    assert top in sys.stdlib_module_names | {"dflash_ops", "libtmux"}, (name, module)
                    assert top != "tomllib", name


def test_its_compiled_form_answers_as_it_does(one: Lab, pyz: Path) -> None:
    """What is read beside the modules (the playbooks) is there as well: without it nothing is ever repaired."""
    folder = one.root / "resident"
    folder.mkdir()
    shutil.copy(pyz, folder / "x.pyz")
    write_compiled(place_beside(str(folder / "x.pyz")), pyz.read_bytes())
    one.pyz = folder / "x.pyz"
    one.start()
    one.stepping()
    assert one.ok("repair")["decision"]["verdict"] == "none"
    one.ok("stop")


def _imports(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


@pytest.mark.skipif(not Path(SYSTEM).exists(), reason="no system Python here")
def test_the_systems_own_python_runs_it_with_nothing_installed(one: Lab) -> None:
    run = ["env", "-i", "PATH=/usr/bin:/bin", SYSTEM, str(one.pyz)]
    root = ["--root", str(one.root)]
    job = dumps(one.job(argv=(SYSTEM, str(Path(__file__).parent / "foreign.py")))).encode()
    started = subprocess.run([*run, "start", *root], input=job, capture_output=True, timeout=60, check=False)
    assert started.returncode == 0, (started.stdout, started.stderr)
    one.stepping()
    said = subprocess.run([*run, "snapshot", *root], capture_output=True, timeout=60, check=True)
    assert json.loads(said.stdout)["state"] == "stepping"
    stopped = subprocess.run([*run, "stop", *root], capture_output=True, timeout=60, check=True)
    assert json.loads(stopped.stdout)["state"] == "stopped"
    assert subprocess.run([*run, "--help"], capture_output=True, timeout=60, check=True).stdout.startswith(b"usage")


def test_a_new_version_takes_over_the_loop_and_leaves_the_trainer(one: Lab) -> None:
    """`current.pyz` is switched under everything that runs."""
    folder = one.root / "resident"
    folder.mkdir()
    shutil.copy(one.pyz, folder / "old.pyz")
    shutil.copy(one.pyz, folder / "new.pyz")
    with zipfile.ZipFile(folder / "new.pyz", "a") as archive:
        archive.writestr("later.txt", "another version")
    current = folder / "current.pyz"
    current.symlink_to("old.pyz")
    one.pyz = current
    one.start()
    before = one.stepping()
    old = daemon.running(one.layout)
    current.unlink()
    current.symlink_to("new.pyz")
    assert old is not None
    assert one.run("start", stdin=dumps(one.job())).error["type"] == "JobBusy"
    proc.send(old.process, 9)
    wait_for(lambda: not proc.alive(old.process), "its end")
    said = one.snapshot()
    assert said.state is State.STEPPING
    new = wait_for(lambda: daemon.running(one.layout), "the new loop")
    assert new.version != old.version
    assert proc.alive(one.launcher())
    assert before.attempt == one.stepping().attempt == 1
    one.ok("stop")
    assert one.start()["attempt"] == 2
