"""How one of several launchers ends, and what the others learn of it: the real ends of two, in one process."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from chat_parts import save_words  # type: ignore[import-not-found]
from pipeline_support import Run  # type: ignore[import-not-found]
from ports import free_port
from test_corpus import write_chats  # type: ignore[import-not-found]

from trainer import corpus
from trainer import nodes as nodes_module
from trainer.config import NodesConfig, load_config
from trainer.errors import NonFiniteError
from trainer.meeting import DONE, RUNNING
from trainer.node_args import NodeArgs
from trainer.nodes import Begin, Broke, Nodes
from trainer.progress import Output
from trainer.several import run_several
from trainer.signals import StopSignals


def node(rank: int, port: int, **config: float) -> Nodes:
    return Nodes(NodeArgs(2, rank, "127.0.0.1", port, 30.0), NodesConfig(**config), 1, Output())


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


class Life:
    """A node that meets the others, and does then whatever it learns; until it is told to leave."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.begun, self.leave = threading.Event(), threading.Event()

    def live(self) -> None:
        with self.nodes as nodes:
            nodes.introduce({}, [], "", {})
            while not self.leave.wait(0.02):
                for news in nodes.tick():
                    if isinstance(news, Begin):
                        self.begun.set()
                    elif isinstance(news, Broke):
                        nodes.ready([], {})


def end_node_0(pool: ThreadPoolExecutor, error: Exception, **follower: float) -> tuple[Life, Future[None]]:
    """Node 0 ends with an error in the middle of a generation; the other one, by then."""
    port = free_port()
    zero, other = node(0, port, wait_s=600), Life(node(1, port, **follower))
    with pytest.raises(type(error)), zero:
        future = pool.submit(other.live)
        zero.introduce({}, [], "", {})
        while not (zero.state == RUNNING and other.begun.is_set()):
            zero.tick()
            assert not future.done()
            other.begun.wait(0.02)
        raise error
    return other, future


def test_a_fault_of_node_0_that_would_come_again_ends_all_with_its_code(pool: ThreadPoolExecutor) -> None:
    _, future = end_node_0(pool, NonFiniteError("the loss is nan", "batch 3"), wait_s=10)
    error = future.exception(60)
    assert isinstance(error, NonFiniteError), error
    assert error.what == "node 0 ended: the loss is nan [batch 3]"


def test_after_another_fault_node_0_leaves_and_is_waited_for(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes_module, "FAREWELL_S", 0.3)
    other, future = end_node_0(pool, RuntimeError("no room"), wait_s=20, lost_after_s=1)
    assert not future.done()
    other.leave.set()
    assert future.exception(60) is None


class Gated:
    """A way to the store on which calls wait until they may pass."""

    def __init__(self, port: int) -> None:
        self.store: Any = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)  # type: ignore[attr-defined]
        self.set_passes, self.get_passes, self.at_get = (threading.Event() for _ in range(3))
        self.set_passes.set()

    def set(self, key: str, text: str) -> None:
        assert self.set_passes.wait(60)
        self.store.set(key, text)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.at_get.set()
        assert self.get_passes.wait(60)
        values: list[bytes] = self.store.multi_get(keys)
        return values


def test_the_last_report_is_there_when_a_launcher_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_module, "FAREWELL_S", 60.0)
    port = free_port()
    with node(0, port) as zero:
        one = node(1, port)
        way = Gated(port)
        one.link.server = way
        with one:
            one.introduce({}, [], "", {})
            assert way.at_get.wait(60)  # an exchange that began before the last report
            way.set_passes.clear()
            timers = [threading.Timer(at, gate.set) for at, gate in ((0.3, way.get_passes), (1.5, way.set_passes))]
            for timer in timers:
                timer.start()
        assert json.loads(zero.link.server.get("dflash/report/1"))["phase"] == DONE
        for timer in timers:
            timer.join()
        while zero.link.reports.get(1) is None or zero.link.reports[1].phase != DONE:
            assert zero.link.silent_s < 60
            zero.link.look()


class Stopped(Exception):
    """What the command does about a signal while data are made ready."""


class NoSignals:
    """Of a launcher in a thread."""

    def __init__(self) -> None:
        self.reader, self._other = socket.socketpair()

    def read(self) -> list[signal.Signals]:
        return []


def test_a_stop_while_one_node_makes_tokens_stops_the_others(
    make_run: Callable[..., Run],
    tiny_target: Path,
    tmp_path: Path,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(corpus, "QUIET_S", -1.0)
    target = tmp_path / "target"
    target.mkdir()
    for file in tiny_target.iterdir():
        os.link(file, target / file.name)
    save_words(target)
    run = make_run(data=write_chats(tmp_path / "chats.jsonl", 40), **{"target.path": str(target)})
    port = free_port()

    def meet() -> Any:
        with node(0, port) as zero:
            zero.introduce({}, [], "", {})
            return zero.first_meeting(NoSignals())  # type: ignore[arg-type]

    with StopSignals() as signals:

        def progress(done: int, total: int, pace: str) -> None:
            if signals.waiting():
                raise Stopped

        met = pool.submit(meet)
        os.kill(os.getpid(), signal.SIGTERM)
        place = NodeArgs(2, 1, "127.0.0.1", port, 30.0)
        with pytest.raises(Stopped):
            run_several(place, load_config(run.config, []), tmp_path, run.checkpoints, "auto", signals, progress)
    decision = met.result(60)
    assert decision is None or decision.stop_at == 0
