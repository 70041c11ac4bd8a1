"""Schedulers of several nodes, played against each other: every batch once, the same commits everywhere, one end."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.actions import Average, Commit, Fill, Join, Phase, Save, Train
from trainer.scheduler import Scheduler


class Node:
    """One node's workers, which do things in any order."""

    def __init__(self, rng: random.Random, scheduler: Scheduler) -> None:
        self.rng = rng
        self.s = scheduler
        self.filling: list[Fill] = []
        self.doing: dict[str, Train | Join | Average | None] = dict.fromkeys(scheduler.drafters)
        self.idle = set(scheduler.drafters)
        self.saving = False
        self.trained: list[int] = []
        self.commits: list[Commit] = []
        scheduler.target_asks("target0")
        scheduler.target_asks("target1")

    def act(self) -> None:
        for action in self.s.decide():
            if isinstance(action, Fill):
                assert self.s.owns(action.batch)
                self.filling.append(action)
            elif isinstance(action, Train | Join):
                assert self.doing[action.worker] is None
                self.doing[action.worker] = action
            elif isinstance(action, Average):
                assert not any(self.doing.values())
                self.doing = dict.fromkeys(self.doing, action)
            elif isinstance(action, Commit):
                self.commits.append(action)
            elif isinstance(action, Save):
                self.saving = True

    def step(self) -> None:
        """One thing that needs no other node."""
        kind = self.rng.choice(("fill", "train", "ask", "save"))
        if kind == "fill" and self.filling:
            done = self.filling.pop(self.rng.randrange(len(self.filling)))
            self.s.filled(done.worker, done.slot)
            self.s.target_asks(done.worker)
        elif kind == "train" and self.s.sync == "average":
            for name, job in self.doing.items():
                if isinstance(job, Train) and self.rng.random() < 0.5:
                    self.finish(name)
        elif kind == "ask" and self.idle:
            name = self.rng.choice(sorted(self.idle))
            self.idle.remove(name)
            self.s.drafter_asks(name)
        elif kind == "save" and self.saving:
            self.saving = False
            self.s.saved()

    def finish(self, name: str) -> None:
        job, self.doing[name] = self.doing[name], None
        if isinstance(job, Train):
            self.s.trained(name, job.batch)
            self.trained.append(job.batch)
        elif isinstance(job, Average):
            self.s.averaged(name)
        self.idle.add(name)

    def fall(self) -> None:
        """All its drafters end, and new ones come."""
        self.doing, self.idle, self.saving = dict.fromkeys(self.doing), set(self.doing), False


def collective(nodes: list[Node]) -> None:
    """What needs everybody happens once everybody is there."""
    jobs = [job for node in nodes for job in node.doing.values()]
    if any(job is None for job in jobs):
        return
    averages = [isinstance(job, Average) for job in jobs]
    if all(averages):
        assert len({job.step for job in jobs if isinstance(job, Average)}) == 1
    elif nodes[0].s.sync == "average":
        return
    else:
        assert not any(averages)
        firsts = {n.s.step_of(j.batch) for n in nodes for j in n.doing.values() if isinstance(j, Train | Join)}
        assert len(firsts) == 1
    for node in nodes:
        for name in node.doing:
            node.finish(name)
        node.act()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    total=st.integers(0, 40),
    every=st.integers(1, 4),
    sync=st.sampled_from(["average", "step"]),
    schedule=st.sampled_from(["ready", "fixed"]),
    stop_at=st.none() | st.integers(0, 300),
    lose_at=st.none() | st.integers(0, 300),
)
def test_nodes_train_every_batch_once_and_end_together(
    seed: int,
    sizes: list[int],
    total: int,
    every: int,
    sync: str,
    schedule: str,
    stop_at: int | None,
    lose_at: int | None,
) -> None:
    rng = random.Random(seed)
    world, nodes = sum(sizes), []
    for rank, size in enumerate(sizes):
        scheduler = Scheduler(
            tuple(f"drafter{i}" for i in range(size)),
            size + rng.randint(0, 3),
            0,
            0,
            total,
            every,
            3,
            schedule=schedule,
            sync=sync,
            world=world,
            first=sum(sizes[:rank]),
        )
        nodes.append(Node(rng, scheduler))
    kept: list[int] = []
    asked: set[int] = set()
    stopped, agreed = False, None
    for moment in range(60000):
        for node in nodes:
            node.act()
        if all(node.s.phase is Phase.ENDED for node in nodes):
            break
        rng.choice(nodes).step()
        collective(nodes)
        if moment == stop_at:
            stopped = True
        if stopped and len(asked) < len(nodes):
            asked.add(rng.randrange(len(nodes)))
            for number in asked:
                nodes[number].s.hold()
        elif stopped:
            agreed = max(node.s.hold() for node in nodes) if agreed is None else agreed
            for node in nodes:
                node.s.stop_at(agreed)
                assert node.s.hold() == agreed  # a second signal
        if moment == lose_at and not stopped and len(nodes) > 1 and nodes[0].s.phase in (Phase.RUN, Phase.AVERAGING):
            # A node is gone: the rest goes on from the newest commit that all of the rest have.
            lost = nodes.pop(rng.randrange(len(nodes)))
            cursor, step = min((n.s.cursor, n.s.step) for n in nodes)
            everything = [b for n in (*nodes, lost) for b in n.trained]
            kept += [b for b in everything if b < cursor]
            world = sum(len(n.s.drafters) for n in nodes)
            for number, node in enumerate(nodes):
                first = sum(len(n.s.drafters) for n in nodes[:number])
                node.s.regroup(cursor=cursor, step=step, total=total, world=world, first=first, saved=False)
                node.fall()
                node.trained.clear()
                node.commits = [c for c in node.commits if c.step <= step]
    assert all(node.s.phase is Phase.ENDED for node in nodes)
    trained = sorted(kept + [b for node in nodes for b in node.trained])
    assert trained == list(range(len(trained)))
    assert len({(n.s.cursor, n.s.step) for n in nodes}) == 1
    assert nodes[0].s.cursor == len(trained)
    assert all(node.commits == nodes[0].commits for node in nodes)
    if not stopped:
        assert len(trained) == total
