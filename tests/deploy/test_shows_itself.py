"""No command is silent while a host is slow: on a terminal and in a pipe, and nothing of it on standard output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Toy
from shows import Counting, standard_error

from dflash_ops.hosts.local import LocalHost

READING = [
    ("status",),
    ("releases",),
    ("checkpoints", "list"),
    ("checkpoints", "verify"),
    ("incidents", "list"),
    ("triage", "--job", "toy"),
    ("logs",),
    ("rollback", "--plan"),
    ("deploy", "--plan"),
    ("doctor",),
]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Counting]]:
    """Each call of a host lasts until the terminal in the list was told something three times; empty: as ever."""
    terminals: list[Counting] = []
    monkeypatch.setattr("dflash_ops.view.stages.PATIENCE_S", 0.05)

    def waits(name: str) -> None:
        real = getattr(LocalHost, name)

        def call(self: LocalHost, *args: Any, **options: Any) -> Any:
            for terminal in terminals:
                terminal.until_told(2)
            return real(self, *args, **options)

        monkeypatch.setattr(LocalHost, name, call)

    for name in ("run", "converse", "stream"):
        waits(name)
    yield terminals
    terminals.clear()


def test_no_question_is_silent(toy: Toy, slow: list[Counting], monkeypatch: pytest.MonkeyPatch) -> None:
    assert toy.ops("deploy").code == 0
    monkeypatch.setenv("DFLASH_INVENTORY", str(toy.inventory))
    for words in READING:
        for terminal in (True, False) if words[0] in ("status", "deploy") else (True,):
            with standard_error(terminal) as told:
                slow.append(told)
                done = toy.ask(*words)
                slow.clear()
            assert "\x1b" not in done.out and "waiting" not in done.out
            assert terminal or "\x1b" not in told.text
            assert done.code in (0, 2, 4), told.text  # rollback has nothing to go back to, deploy finds it running


def test_a_deploy_a_stop_and_json_under_way(toy: Toy, slow: list[Counting]) -> None:
    for words, said in (
        (("deploy", "--json"), ("connect", "send", "start", "watch", "s at most")),
        (("deploy", "--replace", "--resume", "--json"), ("stop", "s before KILL", "start")),
        (("stop", "--json"), ("s before KILL",)),
    ):
        with standard_error() as told:
            slow.append(told)
            done = toy.ask(words[0], "-i", str(toy.inventory), *words[1:])
            slow.clear()
        assert done.code == 0, told.text
        assert json.loads(done.out)["kind"] == words[0]
        assert all(word in told.text for word in said), told.text
