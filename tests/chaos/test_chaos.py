"""Ten of the faults of `make chaos`, and that the table and the playbooks agree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tomllib
from lacking import lacking

from chaos.faults import FAULTS
from chaos.scene import Fault, run
from dflash_ops.deploy.zipapp import build_resident

PLAYBOOKS = Path(__file__).parents[2] / "playbooks"
HERE = "tests/chaos/test_chaos.py::test_the_supervisor_ends_it"
#: The others take minutes: `make chaos`, or DFLASH_CHAOS=1.
WANTED = [f for f in FAULTS if f.short or os.environ.get("DFLASH_CHAOS")]


@pytest.fixture(scope="module")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resident")
    id = build_resident(folder / "new.pyz")
    return (folder / "new.pyz").rename(folder / f"{id}.pyz")


def ident(fault: Fault) -> str:
    return fault.name.replace(",", "").replace(" ", "-")


@pytest.mark.parametrize("fault", [pytest.param(f, id=ident(f)) for f in WANTED])
def test_the_supervisor_ends_it(fault: Fault, pyz: Path) -> None:
    seen = run(fault, pyz)
    if seen.skipped:
        if fault.short:
            lacking(seen.skipped)
        pytest.skip(seen.skipped)
    assert not seen.wrong, seen.wrong


def test_ten_of_at_least_25_are_in_make_test() -> None:
    assert len(FAULTS) >= 25
    assert len([f for f in FAULTS if f.short]) == 10
    assert len({f.name for f in FAULTS}) == len(FAULTS)


def test_what_playbooks_call_proven_here_is_shown_here() -> None:
    table = {f"{HERE}[{ident(f)}]": f for f in FAULTS}
    proven = []
    for file in sorted(PLAYBOOKS.glob("*.toml")):
        for kind in tomllib.loads(file.read_text("utf-8")).get("kind", ()):
            for remedy in kind.get("remedy", ()):
                if remedy["proven"].startswith(HERE):
                    fault = table[remedy["proven"]]
                    where = (kind["id"], remedy["action"], fault.name)
                    assert kind["id"] in fault.kinds, where
                    assert remedy["action"] in fault.actions, where
                    assert fault.outcome == "verified", where
                    proven.append(where)
    assert len(proven) >= 10


def test_the_docs_have_this_table() -> None:
    text = (PLAYBOOKS.parent / "docs" / "supervise.md").read_text("utf-8")
    for f in FAULTS:
        kinds = ", ".join(f"`{k}`" for k in dict.fromkeys(f.kinds)) or "-"
        actions = ", ".join(f"`{a}`" for a in f.actions) or "-"
        name = f"{f.name} *" if f.short else f.name
        assert f"| {name} | {f.cause} | `{f.state}` | {kinds} | {actions} | {f.outcome} |" in text, f.name
