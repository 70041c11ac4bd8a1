"""The closed form: the seconds of a round from the seconds of its stages.

A round is K batches for each of D drafters, K = average_every, and an averaging. With p a target's seconds for a batch,
d a drafter's, A the averaging, h the part of d in which the drafter holds its slot, S slots:

    drafters   P_d = K d + tail + A                     tail: the drafters do not end together
    targets    P_t = K D p / T + idle                   idle: the ring is full while the drafters average
    ring       in place of T / p never more than S / (p + h): a slot's way round takes that long

The round takes the longest, and a little more where two are near each other, since chance then starves one side or
blocks the other one. docs/rebalance.md says where each term comes from and where it is off; a test holds it to
`simulate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dflash_ops.balance.costs import average_at, check_split
from dflash_ops.balance.rates import Limit, Prediction, Split, StageRates, Timing

#: Mean of the largest of n standard normal numbers, n from 0 (David and Nagaraja, Order Statistics, 2003).
_LARGEST = (0.0, 0.0, 0.5642, 0.8463, 1.0294, 1.1630, 1.2672, 1.3522, 1.4236, 1.4850, 1.5388)
#: Half-width of a 95 % interval, in standard errors.
_SIGMAS = 1.96


@dataclass(frozen=True)
class Round:
    """Seconds of one round at a split.

    Attributes:
        seconds: of the round. batches: in it. fill, step: of a batch, all of a worker's cycle.
        by_targets, by_drafters: the two sides by themselves. tail: of by_drafters. idle: of by_targets, while the ring
            is full. average: the averaging. pause: waiting for a checkpoint.
        by_ring: the ring's slots hold the targets back, not their speed.
    """

    seconds: float
    batches: int
    fill: float
    step: float
    by_targets: float
    by_drafters: float
    tail: float
    idle: float
    average: float
    pause: float
    by_ring: bool

    @property
    def rate(self) -> float:
        """Batches a second."""
        return self.batches / self.seconds


def predict(rates: StageRates, split: Split) -> Prediction:
    """What a split would do.

    Raises:
        UsageError: nobody would train, or nobody would fill the ring.
    """
    check_split(rates, split)
    found = one_round(rates, split)
    error = _relative_error(rates, split, found)
    tok = found.rate * rates.block_tokens
    limit = _limit(found)
    busy = found.rate * found.fill / rates.producers_at(split), found.rate * found.step / split.drafters
    return Prediction(
        split=split,
        block_tok_s=tok,
        ctx_tok_s=found.rate * rates.ctx_tokens,
        low=tok / (1 + error),
        high=tok * (1 + error),
        target_busy=min(1.0, busy[0]),
        drafter_busy=min(1.0, busy[1]),
        ring_fill=_ring_fill(rates, split, found),
        eta_s=None if rates.remaining is None else rates.remaining / found.rate,
        limit=limit,
        why=_why(rates, split, found, limit, busy),
    )


def fill_of(rates: StageRates) -> Timing:
    """All of a target's cycle for a batch: its forward, the copy into the ring, and the way of its answer and order."""
    return together(rates.target, rates.target_copy, rates.target_hop)


def step_of(rates: StageRates) -> Timing:
    """All of a drafter's cycle for a batch."""
    return together(rates.drafter, rates.drafter_copy, rates.drafter_hop)


def together(*timings: Timing) -> Timing:
    """One after the other, as if they varied by themselves."""
    mean = sum(t.mean for t in timings)
    sd = math.sqrt(sum(t.sd**2 for t in timings))
    spread = math.sqrt(sum((t.spread * t.mean) ** 2 for t in timings)) / mean if mean else 0.0
    return Timing(mean, sd, timings[0].count, spread)


def one_round(rates: StageRates, split: Split) -> Round:
    """The closed form itself; the split has been checked."""
    t, d, slots = rates.producers_at(split), split.drafters, rates.slots_at(split)
    fill, step = fill_of(rates), step_of(rates)
    fills, steps = max(fill.mean, 1e-9), max(step.mean, 1e-9)
    together_every = rates.sync == "step"
    k = 1 if together_every else rates.average_every
    average = rates.reduce.mean if together_every else average_at(rates, split).mean
    share = average_at(rates, split).mean / rates.average_every if together_every else 0.0
    held = steps if rates.slot_through_step else min(rates.drafter_copy.mean + rates.drafter_hop.mean, steps)
    batches = k * d
    noise_t, noise_d = fill.sd / fills, step.sd / steps

    last = steps * tail(d, k, noise_d, fixed=rates.schedule == "fixed")
    by_drafters = k * steps + last + average + share
    by_ring = slots / (fills + held) < t / fills
    flow = min(t / fills, slots / (fills + held))
    # From the last batch that a drafter takes in a round until the first slot is free again in the next one.
    gap = steps + average + share
    if by_ring:
        idle = max(0.0, gap - slots / flow)
    else:
        # Slots come free as drafters end their first batch, D at a time; targets begin and end one after another.
        late = sum(i // d for i in range(t)) / t * steps
        apart = min(1.0, 2 * noise_t * math.sqrt(batches / t)) * (t - 1) / t * fills * (1 - min(1.0, noise_t**2)) / 2
        under_way = fills - max(apart, min(late, fills / 2))
        idle = max(0.0, gap + held + late - (slots - t) * fills / t - under_way)
    by_targets = batches / flow + idle
    seconds = _jittered(batches, by_targets, by_drafters, noise_t, noise_d, _buffer(rates, split, noise_t, noise_d))
    whole = rates.average_every // k
    pause = _pause(rates, seconds * whole, average_at(rates, split).mean) / whole
    return Round(
        seconds + pause, batches, fills, steps, by_targets, by_drafters, last, idle, average + share, pause, by_ring
    )


def tail(drafters: int, steps: int, noise: float, *, fixed: bool) -> float:
    """Mean time from the drafters' mean end to the last one's, in steps.

    By itself each drafter's end varies with sqrt(K): the largest of D. With the next ready batch for whoever is free it
    cannot grow beyond what list scheduling leaves: about half a step, more where steps vary much (fitted to simulation
    within 0.05 steps for 2 to 6 drafters and deviations up to 0.8).
    """
    largest = _LARGEST[drafters] if drafters < len(_LARGEST) else math.sqrt(2 * math.log(drafters))
    apart = largest * noise * math.sqrt(steps)
    if fixed:
        return apart
    return min(apart, (drafters - 1) / (2 * drafters) + 0.22 * (drafters - 1) * noise**2)


def _buffer(rates: StageRates, split: Split, noise_t: float, noise_d: float) -> float:
    """How many batches lie between targets and drafters as a cushion: slots less those that are at work.

    Of the slots in work about (1.05 - 0.7 c) are no cushion, c the deviation of both sides (fitted to simulation).
    """
    noise = math.hypot(noise_t, noise_d) / math.sqrt(2)
    at_work = rates.producers_at(split) + split.drafters
    whole = rates.slots_at(split) + (0 if rates.slot_through_step else split.drafters)
    return max(whole - at_work * min(1.0, max(0.0, 1.05 - 0.7 * noise)), 2.2 * noise, 0.1)


def _jittered(batches: int, a: float, b: float, noise_a: float, noise_b: float, buffer: float) -> float:
    """Seconds of a round whose sides take a and b alone, where chance starves the faster one or blocks it.

    The cushion's content is a Brownian motion between two walls (Harrison, Brownian Motion and Stochastic Flow
    Systems, 1985): of the slower side's rate |delta| / (exp(2 |delta| B / variance) - 1) is lost, delta the difference
    of the rates, B the cushion; and variance / 2 B where they are equal.
    """
    seconds = max(a, b)
    rate = batches / seconds
    variance = (noise_a**2 + noise_b**2) * rate
    if variance <= 0.0:
        return seconds
    delta = abs(batches / a - batches / b)
    exponent = 2 * delta * buffer / variance
    if exponent > 700:
        return seconds
    lost = variance / (2 * buffer) if exponent < 1e-6 else delta / math.expm1(exponent)
    return batches / max(rate - lost, rate / 2)


def _pause(rates: StageRates, seconds: float, average: float) -> float:
    """Seconds a round, on average, that an averaging waits because the checkpoint before is still being written.

    It is begun at a commit; the next averaging has the other buffer, the one after it would need this one.
    """
    every = rates.checkpoint_every
    if not every:
        return 0.0
    rounds = max(1, -(-every // rates.average_every))
    return max(0.0, rates.checkpoint.mean - 2 * seconds + average) / rounds


def _ring_fill(rates: StageRates, split: Split, found: Round) -> float:
    """Mean share of the slots with a batch nobody has taken yet; roughly: full, or empty but while they average."""
    t, slots = rates.producers_at(split), rates.slots_at(split)
    rest = max(0.0, slots - (split.drafters if rates.slot_through_step else 0))
    if found.by_drafters >= found.by_targets:
        return rest / slots
    stopped = found.tail + found.average + found.step
    gathered = min(rest, stopped * t / found.fill)
    return gathered / slots * min(1.0, stopped / found.seconds)


def _relative_error(rates: StageRates, split: Split, found: Round) -> float:
    """Half-width of the interval, relative: how much the round's seconds move with each stage's own uncertainty."""
    total = 0.0
    average = average_at(rates, split)
    uncertain = {
        "target": fill_of(rates).error,
        "drafter": step_of(rates).error,
    }
    for name, error in uncertain.items():
        timing = getattr(rates, name)
        more = replace(rates, **{name: replace(timing, mean=timing.mean + error)})
        less = replace(rates, **{name: replace(timing, mean=max(0.0, timing.mean - error))})
        total += ((one_round(more, split).seconds - one_round(less, split).seconds) / 2 / found.seconds) ** 2
    total += (average.error / found.seconds) ** 2
    return _SIGMAS * math.sqrt(total) + model_error(rates, split) + _disagreement(rates)


def model_error(rates: StageRates, split: Split) -> float:
    """What the closed form may be off from the queue's simulation, relative (docs/rebalance.md; held by a test)."""
    if rates.slots_at(split) < rates.producers_at(split) + split.drafters:
        return 0.3  # too few slots for all to work at once: who waits for whom is a pattern that means do not show
    calm = max(t.sd / t.mean if t.mean else 0.0 for t in (fill_of(rates), step_of(rates))) <= 0.5
    return 0.03 if calm and rates.slots_at(split) >= 2 * (rates.producers_at(split) + split.drafters) else 0.07


def _disagreement(rates: StageRates) -> float:
    """By how much the run's own pace differs from what these stages say of its split: costs that no stage holds."""
    if rates.measured is None or rates.measured.mean <= 0:
        return 0.0
    said = one_round(rates, rates.split).rate * rates.block_tokens
    return abs(said / rates.measured.mean - 1) if said else 0.0


def _limit(found: Round) -> Limit:
    if found.by_targets > found.by_drafters:
        return "ring" if found.by_ring or found.idle > 0.1 * found.by_targets else "targets"
    beside = found.average + found.tail + found.pause
    return "averaging" if beside > 0.25 * found.by_drafters else "drafters"


def _why(rates: StageRates, split: Split, found: Round, limit: Limit, busy: tuple[float, float]) -> str:
    """One sentence for people."""
    t, d = rates.producers_at(split), split.drafters
    who = f"{t} target{'s' * (t > 1)}" if split.targets else f"{t} reader{'s' * (t > 1)}"
    trainers = f"{d} drafter{'s' * (d > 1)}"
    make, take = t / found.fill, d / found.step
    if limit == "targets":
        return (
            f"The targets limit: {who} fill{'s' * (t == 1)} {make:.3g} batches a second, {trainers} could train "
            f"{take:.3g}, so drafters work {busy[1]:.0%} of the time."
        )
    if limit == "drafters":
        return (
            f"The drafters limit: {trainers} train{'s' * (d == 1)} {take:.3g} batches a second, {who} could fill "
            f"{make:.3g}, so targets work {busy[0]:.0%} of the time."
        )
    if limit == "ring":
        return (
            f"The ring limits: {rates.slots_at(split)} slots are full or in use while {who} could fill "
            f"{make:.3g} batches a second; give ring.slots more."
        )
    return (
        f"Averaging limits: of {found.seconds:.3g} s a round {found.average + found.tail + found.pause:.3g} s go to "
        "averaging and to waiting for the last drafter; raise train.average_every."
    )
