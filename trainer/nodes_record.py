"""The records of several nodes read as one: was every sample trained once an epoch, whoever trained it?

Each node writes the plan.jsonl of what its own drafters trained. A `generation` line stands where nodes began to train
together, with the batch that they began at: whatever any node had trained beyond it, in a generation before, was
forgotten there. Generations follow each other as they do in each node's own record; their tokens tie the records
together. Numbers of batches are the run's, so nothing depends on clocks.
"""

from __future__ import annotations

import graphlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.plan_record import Audit, attempt_files, from_ranges, judge, read_lines, replay

Entry = dict[str, Any]


@dataclass
class Generation:
    """One generation, from all records: where it began, who took part, and what each node wrote in it."""

    upto: int
    nodes: tuple[int, ...]
    entries: dict[int, list[Entry]] = field(default_factory=dict)


def audit_nodes(folders: Sequence[Path]) -> Audit:
    """Replays the attempts of all nodes, or of one job that is on one node only.

    Args:
        folders: run/attempts of each node, or a single attempt's folder, in any order.

    Raises:
        ConfigError: a folder has no plan.jsonl.
    """
    result = Audit()
    records: list[list[tuple[str, list[Entry]]]] = []
    for folder in folders:
        files = attempt_files(folder)
        result.attempts += len(files)
        records.append([(file.parent.name, read_lines(file, result)) for file in files])
    if len(records) == 1 and not any(e["k"] == "generation" for _, entries in records[0] for e in entries):
        return replay(records[0], result)
    return replay_nodes([[e for _, entries in record for e in entries] for record in records], result)


def replay_nodes(records: Sequence[Sequence[Entry]], result: Audit) -> Audit:
    """Pure: walks all generations in their order and judges each epoch."""
    generations: dict[str, Generation] = {}
    orders: list[list[str]] = []
    accepted: list[int] = []
    for record in records:
        orders.append([])
        token, node = "", -1
        for entry in record:
            if entry["k"] == "begin":
                token, accepted = "", list(from_ranges(entry.get("accepted", [])))
            elif entry["k"] == "generation":
                token, node = str(entry["token"]), int(entry["node"])
                known = generations.setdefault(token, Generation(int(entry["upto"]), tuple(entry["nodes"])))
                if known.upto != int(entry["upto"]):
                    result.problems.append(f"node {node} began generation {token} at another batch than the others")
                known.entries.setdefault(node, [])
                orders[-1].append(token)
            elif token:
                generations[token].entries[node].append(entry)
    kept: dict[int, list[tuple[int, Sequence[int]]]] = {}
    over: dict[int, int] = {}
    saved = 0
    # A node may have ended between the decision and its first line: then it trained nothing in that generation.
    known_nodes = {node for generation in generations.values() for node in generation.entries}
    for token in _in_order(orders, result):
        generation = generations[token]
        absent = sorted(set(generation.nodes) - known_nodes)
        if absent:
            missing = f"the record of node {', '.join(map(str, absent))} is missing: give all nodes' folders"
            result.problems += [missing] if missing not in result.problems else []
        result.rolled_back += _cut(kept, over, generation.upto)
        saved = min(saved, generation.upto)
        for entries in generation.entries.values():
            saved = max(saved, _take(entries, kept, over))
    result.provisional = sum(len(acks) for number, acks in kept.items() if number >= saved)
    flat = [ack for number in sorted(kept) for ack in kept[number]]
    result.epochs = list(judge(flat, set(over), accepted))
    return result


def _in_order(orders: Sequence[Sequence[str]], result: Audit) -> list[str]:
    graph: dict[str, set[str]] = {}
    for order in orders:
        for before, after in zip([None, *order], order, strict=False):
            graph.setdefault(after, set())
            if before is not None:
                graph[after].add(before)
    try:
        return list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError:
        result.problems.append("the nodes' records contradict each other about the order of generations")
        return []


def _cut(kept: dict[int, list[tuple[int, Sequence[int]]]], over: dict[int, int], upto: int) -> int:
    """Forgets what lies beyond a batch. Returns how many batches that were."""
    gone = [number for number in kept if number >= upto]
    for epoch in [epoch for epoch, at in over.items() if at > upto]:
        del over[epoch]
    return sum(len(kept.pop(number)) for number in gone)


def _take(
    entries: Sequence[Mapping[str, Any]], kept: dict[int, list[tuple[int, Sequence[int]]]], over: dict[int, int]
) -> int:
    """One node's part of a generation. Returns the batch up to which it has a checkpoint, 0 without one."""
    ended: list[int] = []
    commits: dict[int, int] = {}
    saved = 0
    for entry in entries:
        kind = entry["k"]
        if kind == "ack":
            kept.setdefault(int(entry["n"]), []).append((int(entry["epoch"]), entry["samples"]))
        elif kind == "epoch":
            ended.append(int(entry["epoch"]))
        elif kind == "commit":
            commits[int(entry["step"])] = int(entry["upto"])
            over.update(dict.fromkeys(ended, int(entry["upto"])))
            ended.clear()
        elif kind == "checkpoint":
            saved = max(saved, commits.get(int(entry["step"]), 0))
    return saved
