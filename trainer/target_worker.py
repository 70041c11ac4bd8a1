"""A target process: asks for a batch, computes the tapped layers, copies them into the ring. Keeps no state.

Everything it does for a batch is a pure function of the batch, so a batch whose target died is simply given again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trainer.channel import Channel
from trainer.config import RunConfig, parse_config
from trainer.data import Sample, SampleReader
from trainer.ring import Ring, RingLayout, Slot
from trainer.stopwatch import Stopwatch
from trainer.target import load_target

#: Puts the features of a batch into its slot, whose tokens are there already; laps "compute" before it copies.
Fill = Callable[[Slot, Sequence[Sample], Stopwatch], None]


def run_target(channel: Channel, setup: Mapping[str, Any]) -> None:
    """Serves until the launcher says exit.

    Raises:
        ConfigError: the target cannot be loaded. DataError: the data changed. PeerGone: the launcher died.
    """
    config = parse_config(setup["config"], "setup")
    device = prepare_process(setup["device"], config.workers.threads)

    def open_target(layout: RingLayout) -> Fill:
        def loading(done: int, of: int) -> None:
            channel.send({"k": "stage", "stage": "loading", "done": done, "of": of})

        dtype = getattr(torch, layout.dtype)
        target = load_target(config.target.path, dtype=dtype, device=device, progress=loading)
        taps = list(setup["layer_ids"])

        def fill(slot: Slot, _: Sequence[Sample], watch: Stopwatch) -> None:
            features = target.features(slot.input_ids.long().to(device), taps)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # or the copy would be charged with the compute
            watch.lap("compute")
            slot.features.copy_(features)

        return fill

    serve(channel, config, setup, device, open_target)


def serve(
    channel: Channel,
    config: RunConfig,
    setup: Mapping[str, Any],
    device: torch.device,
    open_source: Callable[[RingLayout], Fill],
) -> None:
    """Fills slots until the launcher says exit.

    Args:
        device: of the features' source. open_source: loads it, once; the launcher hears "ready" only afterwards.

    Raises:
        DataError: the data changed. PeerGone: the launcher died. What the source raises.
    """
    layout = RingLayout.from_dict(setup["layout"])
    ring = Ring(setup["ring_fd"], layout, pin=device.type == "cuda")
    data = setup["data"]
    reader = SampleReader(data["path"], data["size"], data["mtime_ns"], config.data.max_length)
    fill = open_source(layout)
    watch = Stopwatch()
    channel.send({"k": "ready"})
    channel.send({"k": "ask"})
    while True:
        message = channel.receive()
        watch.lap("wait")
        if message["k"] == "exit":
            return
        slot = ring.slot(int(message["slot"]), int(message["length"]))
        samples = reader.read(message["samples"])
        fill_tokens(slot, samples)
        fill(slot, samples, watch)
        crc = slot.checksum(int(message["batch"])) if config.ring.debug else None
        watch.lap("copy")
        done = {name: message[name] for name in ("slot", "batch", "length")}
        channel.send({"k": "filled", **done, "crc": crc, "seconds": watch.seconds()})


def fill_tokens(slot: Slot, samples: Sequence[Sample]) -> None:
    """Writes tokens, mask and lengths of a batch into its slot; rows without a sample have length 0.

    Every byte is written: what an earlier batch left there must not reach this one.
    """
    slot.input_ids.zero_()
    slot.loss_mask.zero_()
    slot.lengths.zero_()
    for row, sample in enumerate(samples):
        count = len(sample.input_ids)
        slot.input_ids[row, :count] = torch.tensor(sample.input_ids, dtype=torch.int32)
        slot.loss_mask[row, :count] = torch.tensor(sample.loss_mask, dtype=torch.uint8)
        slot.lengths[row] = count


def prepare_process(device: str, threads: int) -> torch.device:
    """Fixes the number of threads, since sums depend on it, and makes the device current."""
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    found = torch.device(device)
    if found.type == "cuda":
        torch.cuda.set_device(found)
    else:
        torch.use_deterministic_algorithms(True)
    return found
