"""metrics.jsonl and run.json -> stage rates.

What counts is the last stretch of records with one set of workers. Left out of it are all up to the one with the first
averaging (the ring fills, caches warm up, drafters make their connections), as many after each restart of the drafters,
and every record in which another worker's life began: loading and restarts are no part of the pace. The trainer itself
leaves each worker's first batch of each length out of `stages`. Records of older trainers have no `stages`: then
seconds come from the workers' shares of the time, with a wider interval.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dflash_ops.balance.model import tail
from dflash_ops.balance.rates import Bucket, Split, StageRates, Timing
from dflash_ops.balance.records import Record, Sums, Totals, check, table, whole
from dflash_ops.errors import UsageError

#: Batches of targets and of drafters below which nothing is said.
LEAST_BATCHES = 8
#: Relative half-width of what shares tell: a worker's share holds also what it did for batches of other records.
SHARES_SPREAD = 0.05
#: A record in which a stage takes so many times its median is left out.
HELD_UP = 1.5


def measure(records: Iterable[Mapping[str, Any]], config: Mapping[str, Any]) -> StageRates:
    """Stage rates of one attempt.

    Args:
        records: objects of its metrics.jsonl, oldest first. config: its run.json, decoded; missing keys have the
            trainer's defaults.

    Raises:
        UsageError: a record or the config is not what the trainer writes, or there is too little to tell.
    """
    records = list(records)
    stretch, kept, before = _kept(records, config)
    split, readers = _split(stretch[-1])
    exact = [record for record in kept if record.stages is not None]
    train = table(config, "train")
    every = whole(train, "average_every", 50)
    counted = sum(r.stages.batches for r in exact if r.stages is not None)
    if exact and counted >= LEAST_BATCHES:
        found = _counted(exact)
    else:
        found = _from_shares(kept, before, split, every)
        if found["batches"] < LEAST_BATCHES:
            raise _too_little(
                f"{found['batches']} batches were trained behind the warm-up, {LEAST_BATCHES} are needed",
                "wait for more progress lines",
            )
    del found["batches"]
    if train.get("sync") == "step":
        # Of the time in a common step the wait for the slowest is no cost of the sum itself.
        step = found["drafter"]
        waited = step.mean * tail(split.drafters, 1, step.sd / step.mean if step.mean else 0.0, fixed=True)
        found["reduce"] = Timing(max(0.0, found["reduce"].mean - waited))
    on_cpu = all(str(d) == "cpu" for d in table(config, "workers").get("drafter_devices", ["cpu"]))
    last = stretch[-1]
    features = table(config, "features")
    notes = list(found.pop("notes"))
    return StageRates(
        split=split,
        average_every=every,
        slots=whole(table(config, "ring"), "slots", 0) or None,
        slot_through_step=on_cpu,
        schedule=str(train.get("schedule") or "ready"),
        sync=str(train.get("sync") or "average"),
        readers=readers or (whole(features, "readers", 1) if features.get("path") else 0),
        checkpoint_every=whole(table(config, "checkpoint"), "every", 500),
        remaining=max(0, last.total - last.step) * split.drafters,
        measured=pace(records, config),
        notes=tuple(notes),
        **found,
    )


def pace(records: Iterable[Mapping[str, Any]], config: Mapping[str, Any]) -> Timing:
    """Block tokens a second of the run itself, all drafters together, over the records that `measure` would count.

    Returns:
        mean: over all of their time. sd, count: of single records.

    Raises:
        UsageError: as `measure`.
    """
    rates = paces(records, config)
    seconds = sum(s for _, s in rates)
    each = [tokens / s for tokens, s in rates]
    return Timing(sum(t for t, _ in rates) / seconds, statistics.stdev(each) if len(each) > 1 else 0.0, len(each))


def paces(records: Iterable[Mapping[str, Any]], config: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(block tokens, seconds) of each record that `measure` would count, oldest first; all seconds above 0.

    Raises:
        UsageError: as `measure`.
    """
    _, kept, before = _kept(records, config)
    found = _parts(kept, before)
    if not found:
        raise _too_little("the records have no time between them", "wait for more progress lines")
    return found


def _kept(
    records: Iterable[Mapping[str, Any]], config: Mapping[str, Any]
) -> tuple[list[Record], list[Record], dict[int, Record]]:
    """The last stretch, what of it counts, and the record before each of these by its id."""
    read = [check(raw, number) for number, raw in enumerate(records, 1)]
    if not read:
        raise _too_little("there is no progress line yet", "wait for the first steps")
    stretch = _last_stretch(read)
    _split(stretch[-1])
    every = whole(table(config, "train"), "average_every", 50)
    warm = _begin(stretch) + every  # the averaging at this step is the first one
    kept = []
    for a, b in itertools.pairwise(stretch):
        if any(b.lives[name] != a.lives[name] for name in b.lives if name.startswith("drafter")):
            warm = b.step + every
        elif b.lives == a.lives and b.step > a.step > warm:
            kept.append(b)
    if not kept:
        raise _too_little(
            f"{len(stretch)} progress lines with these workers, none of them behind the first averaging",
            f"wait until the lines after step {warm} ({every} steps after the start, train.average_every)",
        )
    return stretch, kept, {id(b): a for a, b in itertools.pairwise(stretch)}


def _begin(stretch: Sequence[Record]) -> int:
    """The step at which the stretch's first interval began."""
    first = stretch[0]
    if first.stages is not None:
        drafters = sum(name.startswith("drafter") for name in first.lives)
        return max(0, first.step - first.stages.batches // max(1, drafters))
    length = stretch[1].step - first.step if len(stretch) > 1 else 0
    return max(0, first.step - max(0, length))


def _too_little(what: str, next: str) -> UsageError:
    return UsageError(f"too little was measured to tell: {what}", "metrics.jsonl", next)


def _last_stretch(read: Sequence[Record]) -> list[Record]:
    """The records at the end that have the same workers and whose steps go forward."""
    stretch = [read[-1]]
    for record in reversed(read[:-1]):
        if set(record.lives) != set(stretch[-1].lives) or record.t > stretch[-1].t:
            break
        stretch.append(record)
    return stretch[::-1]


def _split(record: Record) -> tuple[Split, int]:
    """Targets and drafters by the workers' names, and how many readers there are."""
    count = {role: sum(name.startswith(role) for name in record.lives) for role in ("target", "reader", "drafter")}
    if not count["drafter"] or not count["target"] + count["reader"]:
        raise UsageError(
            "the record names no drafter, or nobody who fills the ring",
            f"metrics.jsonl, record {record.number}: workers",
            "give the metrics.jsonl of the bundled trainer",
        )
    return Split(count["target"], count["drafter"]), count["reader"]


# ---- counted by the trainer


def _usual(kept: Sequence[Record]) -> list[Totals]:
    """The records' stages without those in which a stage took more than `HELD_UP` times its median, at most a quarter.

    Something else held the machine up there. It costs every split the same, and would pass for a slow stage.
    """
    all_ = [record.stages for record in kept if record.stages is not None]
    held: set[int] = set()
    for stage in ("forward", "step", "average"):
        means = {i: s.total / s.count for i, totals in enumerate(all_) if (s := totals.of(stage)).count}
        if means:
            usual = statistics.median(means.values())
            held |= {i for i, mean in means.items() if mean > HELD_UP * usual}
    if len(held) * 4 > len(all_):
        return all_
    return [totals for i, totals in enumerate(all_) if i not in held]


def _counted(kept: Sequence[Record]) -> dict[str, Any]:
    usual = _usual(kept)
    all_ = sum(usual, Totals())
    forward, step = all_.of("forward"), all_.of("step")
    if min(forward.count, step.count) < LEAST_BATCHES:
        raise _too_little(
            f"{forward.count} batches of targets and {step.count} of drafters behind the warm-up, "
            f"{LEAST_BATCHES} of each are needed",
            "wait for more progress lines",
        )
    notes = []
    if len(usual) < len(kept):
        notes.append(
            f"{len(kept) - len(usual)} of {len(kept)} progress lines are left out: a stage took more than {HELD_UP:g} "
            "times its usual time in them"
        )
    average = all_.of("average")
    if average.count == 0:
        average_timing = Timing(0.0)
        notes.append("no averaging was counted yet: it is taken to cost nothing")
    else:
        average_timing = _timing(average)
    batches = max(1, all_.batches)
    return {
        "batches": all_.batches,
        "target": _timing(forward),
        "target_copy": _timing(all_.of("copy_in")),
        "target_hop": _timing(all_.of("hop_in")),
        "drafter": _timing(step),
        "drafter_copy": _timing(all_.of("copy_out")),
        "drafter_hop": _timing(all_.of("hop_out")),
        "reduce": _timing(all_.of("sync")),
        "average": average_timing,
        "checkpoint": _timing(all_.of("save")),
        "block_tokens": all_.block_tokens / batches,
        "ctx_tokens": all_.ctx_tokens / batches,
        "buckets": _buckets(all_),
        "exact": True,
        "notes": notes,
    }


def _timing(sums: Sums) -> Timing:
    if sums.count == 0:
        return Timing(0.0)
    mean = sums.total / sums.count
    variance = max(0.0, sums.squares / sums.count - mean * mean)
    if sums.count > 1:
        variance *= sums.count / (sums.count - 1)
    return Timing(mean, math.sqrt(variance), sums.count)


def _buckets(all_: Totals) -> tuple[Bucket, ...]:
    """By padded length; shares are those of the trained batches."""
    steps, forwards = all_.stages.get("step", {}), all_.stages.get("forward", {})
    whole_count = sum(s.count for s in steps.values())
    both = sorted(length for length in steps if length in forwards)
    return tuple(
        Bucket(length, steps[length].count / whole_count, _timing(forwards[length]), _timing(steps[length]))
        for length in both
    )


def _parts(kept: Sequence[Record], before: Mapping[int, Record]) -> list[tuple[float, float]]:
    """(block tokens, seconds) of each record in which time passed."""
    parts = [
        (r.block_tok_s * (r.t - before[id(r)].t), r.t - before[id(r)].t)
        if r.stages is None
        else (r.stages.block_tokens, r.stages.seconds)
        for r in kept
    ]
    return [(tokens, seconds) for tokens, seconds in parts if seconds > 0]


# ---- from shares


def _from_shares(
    kept: Sequence[Record], before: Mapping[int, Record], split: Split, average_every: int
) -> dict[str, Any]:
    seconds = batches = 0.0
    spent = {"fill": [0.0, 0.0], "train": [0.0, 0.0]}
    sync = block = ctx = 0.0
    singles: dict[str, list[float]] = {"fill": [], "train": []}
    for record in kept:
        previous = before[id(record)]
        dt = record.t - previous.t
        done = (record.step - previous.step) * split.drafters
        if dt <= 0:
            continue
        seconds, batches = seconds + dt, batches + done
        block, ctx = block + record.block_tok_s * dt, ctx + record.ctx_tok_s * dt
        for name, shares in record.shares.items():
            role = "train" if name.startswith("drafter") else "fill"
            spent[role][0] += dt * shares["compute"]
            spent[role][1] += dt * shares["copy"]
            sync += dt * shares["sync"]
        for role in singles:
            workers = [s for n, s in record.shares.items() if n.startswith("drafter") == (role == "train")]
            singles[role].append(dt * sum(s["compute"] for s in workers) / done)
    if batches <= 0:
        raise _too_little("no batch was trained behind the warm-up", "wait for more progress lines")
    each = batches / len(kept)
    averagings = batches / split.drafters / average_every

    def timing(role: str, at: int) -> Timing:
        sd = statistics.stdev(singles[role]) * math.sqrt(each) if at == 0 and len(singles[role]) > 1 else 0.0
        mean = spent[role][at] / batches
        return Timing(mean, min(sd, mean), 0, SHARES_SPREAD + (sd / mean / math.sqrt(batches) if mean else 0.0))

    if not spent["fill"][0] > 0 or not spent["train"][0] > 0:
        raise _too_little("the workers' shares of computing are 0", "give the metrics.jsonl of a run that trains")
    return {
        "batches": int(batches),
        "target": timing("fill", 0),
        "target_copy": timing("fill", 1),
        "drafter": timing("train", 0),
        "drafter_copy": timing("train", 1),
        "reduce": Timing(0.0),
        "average": Timing(sync / split.drafters / max(averagings, 1e-9) if averagings >= 1 else 0.0, 0.0, 0, 0.5),
        "block_tokens": block / batches,
        "ctx_tokens": ctx / batches,
        "exact": False,
        "notes": ["stage times were worked out from shares: these records are of an older trainer"],
    }
