"""Whether a split fits: bytes of each device, and of host memory.

What is not known is said to be unknown, and never to fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dflash_ops.balance.rates import Split
from dflash_ops.balance.records import table, whole

#: Of each device: the CUDA context, and what the allocator cannot use (fragments), as a share of the device.
CONTEXT = 1 << 30
SLACK = 0.04


@dataclass(frozen=True)
class Memory:
    """Bytes; None = not known.

    Attributes:
        target, drafter: state of one worker: weights, and a drafter's masters, gradients, moments, embedding and head.
        target_work, drafter_work: what it needs to work in: activations, casts, a chunk of logits.
        slot: of one ring slot. slots: of the ring, None = two for each worker. average: of the averages in host memory.
        device: of the smallest device. host: of the memory file system (ring.dir) for ring and averages.
        features, readers: there are features on disk, so that 0 targets are possible, and who reads them.
        devices: how many there are.
    """

    target: int | None = None
    drafter: int | None = None
    slot: int | None = None
    average: int | None = None
    target_work: int | None = None
    drafter_work: int | None = None
    slots: int | None = None
    device: int | None = None
    host: int | None = None
    features: bool = False
    readers: int = 1
    devices: int | None = None


@dataclass(frozen=True)
class Verdict:
    """`state`: "fits", "unknown" or "no"; `text` says why, for people."""

    state: Literal["fits", "unknown", "no"]
    text: str


def memory_from_check(
    said: Mapping[str, Any],
    config: Mapping[str, Any],
    target: Mapping[str, Any] | None = None,
    *,
    device: int | None = None,
    host: int | None = None,
    devices: int | None = None,
) -> Memory:
    """What is known of a run.

    Args:
        said: of `python -m trainer check`: bytes a worker, of the ring and of the averages. config: run.json.
        target: the target's config.json, for activations; None = they are unknown.
        device, host: bytes of the smallest device (nvidia-smi), and of ring.dir's file system. devices: how many.

    Raises:
        UsageError: a number in the config is none.
    """
    workers = whole(said, "targets", 0) + whole(said, "readers", 0) + whole(said, "drafters", 0)
    slots = whole(table(config, "ring"), "slots", 0) or None
    ring = _known(said, "ring_bytes")
    made = slots or 2 * workers
    work = (None, None) if target is None else work_bytes(config, target, _known(said, "drafter_parameters"))
    features = table(config, "features")
    return Memory(
        target=_known(said, "target_bytes_per_worker"),
        drafter=_known(said, "drafter_bytes_per_worker"),
        slot=ring // made if ring is not None and made else None,
        average=_known(said, "average_bytes"),
        target_work=work[0],
        drafter_work=work[1],
        slots=slots,
        device=device,
        host=host,
        features=bool(features.get("path")),
        readers=whole(features, "readers", 1),
        devices=devices,
    )


def work_bytes(
    config: Mapping[str, Any], target: Mapping[str, Any], parameters: int | None
) -> tuple[int | None, int | None]:
    """Bytes that a target's forward and a drafter's step take beside their state, in bf16; estimated, not measured.

    A target keeps nothing for a backward, and no key-value cache: of one layer at a time the residual, its norm,
    queries, keys, values, the attention's output, and gate, up and product of the MLP. A drafter keeps about as much of
    each of its layers, for every row of blocks and of context, the cast copy of its weights, and a chunk of logits in
    float32 with its gradient.
    """
    text = target.get("text_config", target)
    if not isinstance(text, Mapping):
        return None, None
    sizes = [_known(text, key) for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")]
    if any(size is None or size == 0 for size in sizes):
        return None, None
    hidden, inner, heads, vocab = (int(size or 0) for size in sizes)
    q = heads * (_known(text, "head_dim") or hidden // heads)
    kv = 2 * (_known(text, "num_key_value_heads") or heads) * (q // heads)
    data, drafter, train = (table(config, name) for name in ("data", "drafter", "train"))
    context = whole(data, "batch_size", 4) * whole(data, "max_length", 3072)
    rows = whole(data, "batch_size", 4) * whole(train, "anchors", 512) * whole(drafter, "block_size", 16)
    ids = drafter.get("layer_ids")
    taps = len(ids) if isinstance(ids, list) else whole(drafter, "taps", 5)
    item = 2
    row = item * (4 * hidden + 2 * q + kv + 3 * inner)
    target_work = context * (row + taps * hidden * item)
    layers = whole(drafter, "layers", 5)
    chunk = whole(table(config, "loss"), "chunk", 2048)
    kept = layers * (rows * row + context * item * kv) + context * item * (taps + 2) * hidden
    drafter_work = kept + 2 * (parameters or 0) + chunk * vocab * 6
    return target_work, None if parameters is None else drafter_work


def _known(said: Mapping[str, Any], key: str) -> int | None:
    value = said.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def judge_memory(split: Split, memory: Memory) -> Verdict:
    """Whether each device and the host have room for a split."""
    unknown: list[str] = []
    parts = [("drafter", memory.drafter, memory.drafter_work)]
    if split.targets:
        parts.insert(0, ("target", memory.target, memory.target_work))
    tightest = ""
    for role, state, work in parts:
        if memory.device is None or state is None:
            unknown.append("the devices' memory" if memory.device is None else f"what a {role} needs")
            continue
        need = state + (work or 0) + CONTEXT + int(SLACK * memory.device)
        text = f"a {role} needs {_size(need)} of a device's {_size(memory.device)}"
        if need > memory.device:
            return Verdict("no", f"{text} ({_size(state)} state, {_size(work or 0)} to work in, the rest reserved)")
        if work is None:
            unknown.append(f"what a {role} needs to work in")
        tightest = text
    host = _host(split, memory)
    if isinstance(host, Verdict):
        return host
    if host:
        unknown.append(host)
    if unknown:
        return Verdict("unknown", "not known: " + ", ".join(dict.fromkeys(unknown)))
    return Verdict("fits", tightest)


def _host(split: Split, memory: Memory) -> Verdict | str:
    """A refusal, or what is not known of host memory, or an empty text."""
    if memory.host is None or memory.slot is None or memory.average is None:
        return "host memory for ring and averages"
    slots = memory.slots or 2 * ((split.targets or memory.readers) + split.drafters)
    need = slots * memory.slot + memory.average
    if need > memory.host:
        what = f"{slots} slots of {_size(memory.slot)}, averages {_size(memory.average)}"
        return Verdict("no", f"ring and averages need {_size(need)} of {_size(memory.host)} host memory ({what})")
    return ""


def feasible(split: Split, memory: Memory) -> str | None:
    """Why a split is refused; None where nothing known speaks against it (`judge_memory` says what is known)."""
    if split.drafters < 1:
        return "0 drafters: nobody would train"
    if split.targets < 0 or (split.targets == 0 and not memory.features):
        return "0 targets and no features on disk: nobody would fill the ring"
    if memory.devices is not None and split.devices > memory.devices:
        return f"{split.devices} devices are asked for, there are {memory.devices}"
    verdict = judge_memory(split, memory)
    return verdict.text if verdict.state == "no" else None


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.1f} MiB"
