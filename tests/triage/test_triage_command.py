"""`dflash-ops triage` and `dflash-ops playbooks` as a person uses them: files, folders, pipes, packed logs, own kinds."""
# ruff: noqa: E501 - lines of logs are as long as they are

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dflash_ops.cli import main as frame
from dflash_ops.cli import playbooks as playbooks_cli
from dflash_ops.cli import triage as triage_cli
from dflash_ops.collect.files import Found, ReadError, chunks, expand

ROOT = Path(__file__).resolve().parents[2]
APP = typer.Typer()
APP.command()(triage_cli.command)
RUN = CliRunner()
DISK = 'Traceback (most recent call last):\n  File "/root/w.py", line 3, in save\n    f()\nOSError: [Errno 28] No space left on device\n'
FIELDS = {
    "path", "class", "root_exception", "root_rank", "user_frame", "confidence", "fingerprint", "evidence", "remedies", "auto_safe", "schema",
    "entity", "meaning", "fetch",
}  # fmt: skip


def rows(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_json_lines_have_every_field_for_every_path(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(DISK)
    (tmp_path / "b.log").write_text("step 3 loss 2.1\n")
    result = RUN.invoke(APP, ["--json", str(tmp_path / "a.log"), str(tmp_path / "b.log")])
    assert result.exit_code == 0
    found = rows(result.stdout)
    assert [row["class"] for row in found] == ["disk_full", "healthy"]
    assert all(set(row) >= FIELDS for row in found)
    assert found[0]["path"] == str(tmp_path / "a.log")
    assert found[0]["evidence"][0]["number"] == 4  # type: ignore[index]


def test_folders_gz_and_standard_input(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/0.log").write_text("step 3 loss 2.1\n")
    (tmp_path / "run/1.log.gz").write_bytes(gzip.compress(DISK.encode()))
    (tmp_path / "run/weights.bin").write_bytes(b"\x00" * 100)
    result = RUN.invoke(APP, ["--json", str(tmp_path / "run")])
    assert [(Path(str(r["path"])).name, r["class"]) for r in rows(result.stdout)] == [
        ("0.log", "healthy"),
        ("1.log.gz", "disk_full"),
    ]
    piped = subprocess.run(
        [sys.executable, "-m", "dflash_ops.cli.triage", "--json", "-"],
        input=DISK.encode(), capture_output=True, cwd=ROOT, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert rows(piped.stdout.decode())[0]["class"] == "disk_full", piped.stderr


def test_a_gz_that_was_cut_gives_what_it_holds(tmp_path: Path) -> None:
    packed = gzip.compress(("quiet line\n" * 500 + DISK + "more\n" * 20_000).encode())
    (tmp_path / "cut.gz").write_bytes(packed[: len(packed) - 30])
    assert rows(RUN.invoke(APP, ["--json", str(tmp_path / "cut.gz")]).stdout)[0]["class"] == "disk_full"


def test_a_path_that_is_not_there_is_said_and_the_others_are_answered(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(DISK)
    result = RUN.invoke(APP, ["--json", str(tmp_path / "no.log"), str(tmp_path / "a.log"), str(tmp_path)])
    assert result.exit_code != 0
    assert [r["class"] for r in rows(result.stdout)] == ["disk_full", "disk_full"]
    assert "no such file" in result.output and "no.log" in result.output


def test_zst_without_its_package_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + b"\x00" * 20)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ReadError, match="zstandard") as error:
        list(chunks(Found("a.zst", path)))
    assert "zstd -dc" in str(error.value)
    (tmp_path / "b.log").write_text(DISK)
    result = RUN.invoke(APP, ["--json", str(path), str(tmp_path / "b.log")])
    assert result.exit_code == 1 and rows(result.stdout)[0]["class"] == "disk_full"


def test_the_kind_of_a_source_is_told_by_its_name(tmp_path: Path) -> None:
    for name in ("error.json", "exit.json", "dmesg.txt", "train.log"):
        (tmp_path / name).write_text("")
    found, errors = expand([str(tmp_path)])
    assert {f.path.name: f.kind for f in found if f.path} == {
        "error.json": "error_json", "exit.json": "exit_json", "dmesg.txt": "kernel", "train.log": "log",
    }  # fmt: skip
    assert not errors
    (tmp_path / "empty").mkdir()
    assert "holds no log" in str(expand([str(tmp_path / "empty")])[1][0])


def test_what_a_person_sees_names_the_line_the_meaning_and_the_steps(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("quiet\n" * 9 + DISK)
    plain = RUN.invoke(APP, [str(path)]).stdout
    assert "disk_full" in plain and "OSError: [Errno 28] No space left on device" in plain and "/root/w.py:3" in plain
    assert "     13  " in plain and "What to do" in plain and "What it means" in plain
    assert "\x1b[" not in plain, "no colours where there is no terminal"
    assert len(plain.splitlines()) <= 40, "one screen"
    longer = RUN.invoke(APP, [str(path), "--explain"]).stdout
    assert "fingerprint" in longer and len(longer) > len(plain)


def test_coloured_on_a_terminal() -> None:
    import io

    from rich.console import Console

    from dflash_ops.contracts.diagnosis import Diagnosis
    from dflash_ops.view.triage import show

    out = io.StringIO()
    show(
        "a.log",
        Diagnosis(kind="disk_full", title="No space"),
        console=Console(file=out, force_terminal=True, color_system="standard"),
    )
    assert "\x1b[" in out.getvalue()


OWN = """
schema = 1
family = "own"
title = "Our own"
[[kind]]
id = "license_server"
title = "The licence server does not answer"
role = "root"
grade = "N"
meaning = "Ask Anna."
[[kind.signature]]
literal = "FlexLM: cannot checkout"
[[kind.example]]
text = "FlexLM: cannot checkout feature train"
[[kind]]
id = "disk_full"
title = "Our disk"
role = "root"
grade = "N"
meaning = "Ours."
[[kind.signature]]
literal = "No space left on device"
[[kind.example]]
text = "OSError: [Errno 28] No space left on device"
"""


def test_a_folder_of_ones_own_adds_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/own.toml").write_text(OWN)
    (tmp_path / "a.log").write_text("FlexLM: cannot checkout feature x\n")
    (tmp_path / "b.log").write_text(DISK)
    args = ["--json", "--playbooks", str(tmp_path / "own"), str(tmp_path / "a.log"), str(tmp_path / "b.log")]
    found = rows(RUN.invoke(APP, args).stdout)
    assert [(r["class"], r["title"]) for r in found] == [
        ("license_server", "The licence server does not answer"),
        ("disk_full", "Our disk"),
    ]
    assert frame.run(["triage", "--playbooks", str(tmp_path / "none"), "--json", str(tmp_path / "a.log")]) == 2


def test_playbooks_list_show_lint_and_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cuda_oom" in RUN.invoke(playbooks_cli.app, ["list"]).stdout
    shown = RUN.invoke(playbooks_cli.app, ["show", "cuda_oom"])
    assert "Tried to allocate" in shown.stdout and shown.exit_code == 0
    assert frame.run(["playbooks", "show", "cuda_om"]) == 2
    assert "did you mean 'cuda_oom'?" in capsys.readouterr().err
    assert RUN.invoke(playbooks_cli.app, ["lint"]).exit_code == 0
    own = tmp_path / "own.toml"
    own.write_text(OWN)
    assert RUN.invoke(playbooks_cli.app, ["test", str(own)]).exit_code == 0
    own.write_text(
        OWN.replace(
            'text = "FlexLM: cannot checkout feature train"', 'text = "OSError: [Errno 24] Too many open files"'
        )
    )
    wrong = RUN.invoke(playbooks_cli.app, ["test", str(own)])
    assert wrong.exit_code == 1 and "wants license_server, is too_many_open_files" in wrong.stdout
    own.write_text("this is no toml [")
    assert frame.run(["playbooks", "test", str(own)]) == 6
    assert "own.toml" in capsys.readouterr().err


def test_the_decoded_form_is_kept_and_made_anew_when_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_ops.playbooks import load_documents

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own.toml").write_text(OWN)
    first = load_documents([folder], bundle=False)
    assert load_documents([folder], bundle=False) == first
    (folder / "own.toml").write_text(OWN.replace("Ask Anna", "Ask Berta, now"))
    assert "Berta" in json.dumps(load_documents([folder], bundle=False))
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert "Berta" in json.dumps(load_documents([folder], bundle=False)), (
        "a cache that cannot be written costs time only"
    )
