"""The launcher's own state, without its workers: what it holds, saves and records when things go otherwise."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pipeline_support import Run  # type: ignore[import-not-found]
from ports import free_port

from trainer.averages import Averages
from trainer.checkpoint import Store, list_checkpoints
from trainer.config import load_config
from trainer.errors import NonFiniteError
from trainer.launcher import Launcher
from trainer.meeting import HELD, Decision, Held, Member
from trainer.node_args import NodeArgs
from trainer.nodes import Nodes
from trainer.prepare import prepare
from trainer.progress import Output
from trainer.ring import create_ring
from trainer.saving import Saver
from trainer.signals import StopSignals


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    with StopSignals() as made:
        yield made


@pytest.fixture
def make_launcher(
    make_run: Callable[..., Run], tmp_path: Path, signals: StopSignals
) -> Iterator[Callable[..., Launcher]]:
    """A launcher that has started nothing; `several`: node 1 of two."""
    made: list[tuple[Launcher, int]] = []

    def make(*, several: bool) -> Launcher:
        run = make_run()
        config = load_config(run.config, [])
        prepared = prepare(config, run.checkpoints, "auto")
        nodes = None
        if several:
            nodes = Nodes(NodeArgs(2, 1, "127.0.0.1", free_port()), config.nodes, 1, Output())
            nodes.mine = generation(nodes, 1, Held(3, 6, "g"))
        (tmp_path / "attempt").mkdir()
        ring = create_ring(prepared.layout, config.ring.dir)
        averages = Averages(prepared.state, config.ring.dir)
        store = Store(run.checkpoints, 3, None)
        launcher = Launcher(prepared, tmp_path / "attempt", store, ring, averages, signals, nodes)
        made.append((launcher, ring))
        return launcher

    yield make
    for launcher, ring in made:
        launcher.crew.close()
        launcher.saver.close()
        launcher.record.close()
        launcher.averages.close()
        launcher.store.close()
        os.close(ring)
        if launcher.several is not None:
            launcher.several.nodes.link.close()


def generation(nodes: Nodes, number: int, start: Held, **more: Any) -> Decision:
    members = (Member(0, "other", 1, 0), Member(1, nodes.life, 1, 1))
    return Decision(number, f"g{number}", members, HELD, start, source=0, **more)


def keep(launcher: Launcher, step: int) -> None:
    """A commit. Memory is all zeros, and so are its sums."""
    launcher.averages.begin(wipe=False)
    launcher.averages.keep(step, 2 * step, [0, 0])


def test_a_target_that_starts_anew_costs_no_average(make_launcher: Callable[..., Launcher]) -> None:
    launcher = make_launcher(several=True)
    first = launcher._setup(launcher.crew["drafter0"])["group"]
    assert (first["rank"], first["world"], first["keep"]) == (1, 2, 0)  # it gets its state from node 0
    keep(launcher, 3)
    keep(launcher, 6)
    assert launcher._setup(launcher.crew["target0"])["group"] is None
    assert [kept.step for kept in launcher.averages.valid()] == [6, 3]


def test_what_is_saved_is_given_up_before_its_memory_is_received_into(make_launcher: Callable[..., Launcher]) -> None:
    launcher = make_launcher(several=True)
    assert launcher.several is not None
    keep(launcher, 3)
    assert launcher.saver.start(3, {"step": 3}) is None
    # The others have an average that this node lacks: it comes into the buffer that is being saved.
    newer = generation(launcher.several.nodes, 2, Held(6, 12, "h"), stop_at=12)
    launcher.several._begin(newer)
    assert not launcher.saver.busy
    assert list_checkpoints(launcher.store.folder) == []

    keep(launcher, 6)
    keep(launcher, 9)
    assert launcher.saver.start(9, {"step": 9}) is None
    launcher.several._begin(generation(launcher.several.nodes, 3, Held(9, 18, "h"), stop_at=18))
    assert launcher.saver.busy  # of the state that all begin with


def test_a_full_disk_does_not_hide_what_the_run_ended_with(
    make_launcher: Callable[..., Launcher], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = make_launcher(several=False)

    def fail(_: Launcher) -> None:
        launcher.record._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
        launcher.record.commit(1, 1)
        raise NonFiniteError("the loss is nan", "batch 3")

    monkeypatch.setattr(Launcher, "_serve", fail)
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        launcher.run()
    assert "plan.jsonl are lost: No space left on device" in capsys.readouterr().out
    assert launcher.record._file.closed


def test_an_answer_that_comes_while_one_asks_for_the_end_counts(tmp_path: Path) -> None:
    class Answers:
        """A saver that says that all is well, and has ended, in the moment in which it is asked."""

        def __init__(self, saver: Saver) -> None:
            self.saver = saver

        def poll(self) -> int:
            self.saver._writer.send(b'{"ok": true}\n')
            return 0

        def wait(self, timeout: float) -> int:
            return 0

    saver = Saver(Store(tmp_path, 3, None), None, 60.0, tmp_path / "log")  # type: ignore[arg-type]
    saver._process = Answers(saver)  # type: ignore[assignment]
    saved = saver.poll()
    assert saved is not None
    assert saved.failure == ""
    saver.close()
