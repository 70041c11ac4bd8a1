"""docs/kinds/ has a page for each kind, made from the playbooks as they are now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dflash_ops.collect.pages import differences, main, pages
from dflash_ops.playbooks import load_documents

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "kinds"
HEADINGS = ["What you see", "What it means", "What we do", "Is it safe", "Torch versions", "References"]


def test_the_pages_are_complete_and_current() -> None:
    assert differences(FOLDER, pages(load_documents())) == [], "run `python -m dflash_ops.collect.pages docs/kinds`"


def test_every_kind_has_a_page_with_all_its_parts() -> None:
    kinds = [kind for document in load_documents() for kind in document["kind"]]
    for kind in kinds:
        text = (FOLDER / f"{kind['id']}.md").read_text(encoding="utf-8")
        found = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert [h for h in found if h in HEADINGS] == HEADINGS, kind["id"]
        assert kind["title"] in text
        for step in kind.get("remedy", []):
            assert step["text"] in text
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\]\((\w+)\.md\)", index)) == sorted(kind["id"] for kind in kinds)


def test_links_between_pages_lead_somewhere() -> None:
    for page in FOLDER.glob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), f"{page.name}: {target}"


def test_check_tells_what_is_missing_stale_and_left_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 0
    assert main([str(tmp_path), "--check"]) == 0
    (tmp_path / "cuda_oom.md").unlink()
    (tmp_path / "segfault.md").write_text("by hand\n")
    (tmp_path / "no_such_kind.md").write_text("left over\n")
    capsys.readouterr()
    assert main([str(tmp_path), "--check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "cuda_oom.md is missing",
        "no_such_kind.md has no kind",
        "segfault.md is stale",
    ]
    assert main([str(tmp_path)]) == 0
    assert main([str(tmp_path), "--check"]) == 0
