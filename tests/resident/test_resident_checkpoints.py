"""Checkpoints: what is whole is known by its hashes, what is set aside comes back, and nothing is ever lost."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from resident_lab import Lab  # type: ignore[import-not-found]

from dflash_ops.resident import checkpoints


def save(folder: Path, step: int, text: str = "weights") -> Path:
    """As the bundled trainer does."""
    made = folder / f"step-{step:08d}"
    made.mkdir(parents=True)
    files = {}
    for name in ("weights.safetensors", "state.json"):
        data = f"{text} {name} {step}".encode()
        (made / name).write_bytes(data)
        files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (made / "manifest.json").write_text(json.dumps({"schema": 1, "files": files}))
    return made


def everything(root: Path) -> dict[str, bytes]:
    return {
        p.name + str(p.parent.name): p.read_bytes() for p in root.rglob("*") if p.is_file() and "run" not in p.parts
    }


def test_whole_cut_changed_and_foreign_ones_are_told_apart(one: Lab) -> None:
    folder = one.root / "checkpoints"
    save(folder, 100)
    (save(folder, 200) / "weights.safetensors").write_bytes(b"cut")
    changed = save(folder, 300) / "state.json"
    changed.write_bytes(bytes(len(changed.read_bytes())))
    (folder / "checkpoint-400").mkdir()
    (folder / "checkpoint-400/model.pt").write_bytes(b"theirs")
    (save(folder, 500) / "manifest.json").write_text("{")
    (folder / ".step-00000600.partial").mkdir()
    (folder / ".lock").touch()
    listed = one.ok("checkpoints", "list")["checkpoints"]
    assert [(c["step"], c["verified"]) for c in listed] == [(s, None) for s in (500, 400, 300, 200, 100)]
    said = {c["step"]: (c["verified"], c["fault"]) for c in one.ok("checkpoints", "verify")["checkpoints"]}
    assert said[100] == (True, "")
    assert said[200] == (False, "weights.safetensors has 3 bytes, the manifest says 31")
    assert said[300] == (False, "state.json does not have the hash that the manifest says")
    assert said[400] == (None, "it has no manifest.json")
    assert said[500][0] is False
    assert [c["step"] for c in one.ok("checkpoints", "verify", "--step", "200")["checkpoints"]] == [200]
    assert "no checkpoint of step 7" in one.run("checkpoints", "verify", "--step", "7").error["what"]
    found = checkpoints.down_to_whole(folder, one.layout)
    assert [f.step for f in found if f.verified] == [100]
    assert [f.verified for f in found] == [False, None, False, False, True]
    assert not any(f.verified for f in checkpoints.down_to_whole(folder, one.layout, until=99))


def test_what_was_hashed_is_hashed_again_only_if_it_changed(one: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = one.root / "checkpoints"
    made = save(folder, 100)
    one.layout.run.mkdir()
    hashed: list[Path] = []
    real = checkpoints._sha256
    monkeypatch.setattr(checkpoints, "_sha256", lambda path: (hashed.append(path), real(path))[1])
    for _ in range(3):
        assert checkpoints.listing(folder, verify=True, layout=one.layout)[0].verified
    assert len(hashed) == 2
    weights = made / "weights.safetensors"
    before = weights.stat()
    weights.write_bytes(b"x" * before.st_size)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # a disk that lies about the time of change
    assert checkpoints.listing(folder, verify=True, layout=one.layout)[0].verified is False


def test_aside_and_back_loses_nothing(one: Lab) -> None:
    folder = one.root / "checkpoints"
    for step in (100, 200, 300):
        save(folder, step)
    before = everything(folder)
    said = one.ok("checkpoints", "aside", "--newer-than", "100", "--reason", "newer ones are damaged")
    assert (said["moved"], said["files"]) == (True, 6)
    assert [p.name for p in sorted(folder.iterdir())] == ["step-00000100"]
    listed = one.ok("checkpoints", "list")
    (aside,) = listed["aside"]
    assert (aside["reason"], aside["files"], aside["path"]) == ("newer ones are damaged", 6, said["to"])
    save(folder, 200, "another history")
    refused = one.run("checkpoints", "restore")
    assert "step-00000200 is there now" in refused.error["what"]
    assert len(list(Path(said["to"]).iterdir())) == 2, "nothing was moved"
    again = one.ok("checkpoints", "aside", "--step", "200")
    assert one.ok("checkpoints", "restore", "--stamp", aside["stamp"])["restored"] == 2
    assert everything(folder) == before
    assert [a["stamp"] for a in one.ok("checkpoints", "list")["aside"]] == [Path(again["to"]).parent.name]
    assert one.ok("checkpoints", "aside")["moved"]
    assert one.ok("checkpoints", "list")["checkpoints"] == []
    assert not one.ok("checkpoints", "aside")["moved"]
    assert one.ok("checkpoints", "restore")["restored"] == 3
    assert everything(folder) == before
    names = [e.event for e in one.events()]
    assert names == [
        "checkpoints_aside",
        "checkpoints_aside",
        "checkpoints_restored",
        "checkpoints_aside",
        "checkpoints_restored",
    ]


def test_never_under_a_job_that_runs(one: Lab) -> None:
    save(one.root / "checkpoints", 100)
    one.start()
    one.stepping()
    for what in (["aside"], ["aside", "--step", "100"], ["restore"]):
        refused = one.run("checkpoints", *what)
        assert (refused.rc, refused.error["type"]) == (4, "JobBusy")
    assert len(one.ok("checkpoints", "verify")["checkpoints"]) == 1
