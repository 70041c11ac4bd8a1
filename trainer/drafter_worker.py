"""A drafter process: asks for a ready batch, trains it, averages with the others when told, keeps the average.

Imports no transformers: of the target it needs two tensors only. All its state is in `Masters`; the launcher's memory
has a copy of the last average, from which all drafters start again when one of them died. Anchors, learning rate and
order come from the plan, so nothing here draws a random number.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainer.anchors import pick_anchors
from trainer.attention import build_masks
from trainer.averages import AverageMemory
from trainer.averaging import add_gradients, average, make_equal
from trainer.batch import Batch, block_input_ids
from trainer.channel import Channel, Message
from trainer.config import RunConfig, parse_config
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.errors import ConfigError, NonFiniteError, TrainerError
from trainer.flex import freeze_shapes
from trainer.loss import LossOut, block_loss
from trainer.optimizer import Masters
from trainer.ring import Ring, RingLayout
from trainer.state_layout import StateLayout
from trainer.stopwatch import Stopwatch
from trainer.target import load_embed_and_head
from trainer.target_worker import prepare_process
from trainer.tensor_files import load_checkpoint


class DrafterWorker:
    """One drafter on one device.

    Args:
        setup: the launcher's first message. channel: for what happens while training (compiling).
    """

    def __init__(self, setup: Mapping[str, Any], channel: Channel) -> None:
        self.config: RunConfig = parse_config(setup["config"], "setup")
        self.device = prepare_process(setup["device"], self.config.workers.threads)
        self.channel = channel
        cuda = self.device.type == "cuda"
        layout = RingLayout.from_dict(setup["layout"])
        self.ring = Ring(setup["ring_fd"], layout, pin=cuda)
        self.dtype: torch.dtype = getattr(torch, layout.dtype) if cuda else torch.float32
        self.geometry = DrafterConfig.from_hf(setup["drafter"])
        wanted = self.config.drafter.attention
        self.backend = wanted if wanted != "auto" else "flex" if cuda else "structured"
        self.lengths_used: list[int] = list(setup["lengths_used"])
        self.lengths_seen: set[int] = set()
        self.embed, self.head = load_embed_and_head(self.config.target.path, self.dtype, self.device)
        self.drafter = Drafter(self.geometry, seed=self.config.train.seed).to(self.device)
        self.masters = Masters(self.drafter, self.config.train.weight_decay, fused=cuda)
        self.together = self.config.train.sync == "step"
        self.rank = int(setup["rank"])
        self.state = StateLayout.from_dict(setup["state"])
        if dict(self.state.shapes) != dict(self.masters.shapes()):
            raise TrainerError("the drafter is not laid out as the launcher thinks", "state_layout.py", "report this")
        self.memory = AverageMemory(setup["averages_fd"], self.state, self.rank, pin=cuda)
        self.tokens = 0.0  # supervised tokens since the last averaging
        self._restore(setup)
        self._join(setup)
        self.watch = Stopwatch()

    def _restore(self, setup: Mapping[str, Any]) -> None:
        if setup["average"] is not None:
            kept = self.memory.read(int(setup["average"]), self.masters)
            self.masters.set_count(kept.step)
        elif setup["resume"] is not None:
            load_checkpoint(Path(setup["resume"]), self.masters, self.rank, self.state.moment_sets)
            self.masters.set_count(int(setup["step"]))
        elif self.config.drafter.init_from is not None:
            from trainer.export import load_drafter

            folder = self.config.drafter.init_from
            _, state = load_drafter(folder)
            shapes = self.masters.shapes()
            if {k: tuple(v.shape) for k, v in state.items()} != shapes:
                raise ConfigError(
                    "the drafter there has other shapes than [drafter] asks for",
                    f"drafter.init_from = {folder}",
                    "correct [drafter], or remove init_from",
                )
            for name, tensor in state.items():
                self.masters.load("weight", name, tensor.float())

    def _join(self, setup: Mapping[str, Any]) -> None:
        """The group of all drafters, met at the launcher's store, or at the endpoint of several nodes."""
        group = setup["group"]
        if group is not None:
            self._join_nodes(group)
            return
        if setup["store"] is None:
            return
        timeout = timedelta(seconds=self.config.workers.timeout_s)
        store = torch.distributed.TCPStore("127.0.0.1", int(setup["store"]), is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=store,
            rank=self.rank,
            world_size=len(self.config.workers.drafter_devices),
            timeout=timeout,
        )

    def _join_nodes(self, group: Mapping[str, Any]) -> None:
        """With the drafters of other nodes; who lacks the state that all begin with gets it from one that has it."""
        timeout = timedelta(seconds=self.config.workers.timeout_s)
        endpoint = torch.distributed.TCPStore(group["host"], int(group["port"]), is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=dist.PrefixStore(f"dflash/group/{group['name']}", endpoint),  # type: ignore[attr-defined]
            rank=int(group["rank"]),
            world_size=int(group["world"]),
            timeout=timeout,
        )
        if group["source"] is not None:
            make_equal(self.masters.tensors(), int(group["source"]))
            self.masters.set_count(int(group["step"]))
        if group["keep"] is not None:
            sums = self.memory.write(int(group["keep"]), self.masters)
            self.channel.send({"k": "received", "sums": sums})

    def batch_of(self, message: Message) -> Batch:
        """The batch in a slot, with its anchors, on this device. On the CPU the features stay in the ring."""
        slot = self.ring.slot(int(message["slot"]), int(message["length"]))
        ids = [int(i) for i in message["samples"]]
        rows = slot.lengths.shape[0]
        keys = [(self.config.train.seed, int(message["epoch"]), i) for i in ids]
        keys += [(0, 0, 0)] * (rows - len(ids))  # rows without a sample have no place for an anchor
        mask, lengths = slot.loss_mask.float(), slot.lengths.long()
        anchors, valid = pick_anchors(mask, lengths, self.config.train.anchors, keys)
        batch = Batch(
            input_ids=slot.input_ids.long(),
            loss_mask=mask,
            lengths=lengths,
            anchors=anchors,
            anchor_valid=valid,
            features=slot.features,
            sample_ids=ids,
        )
        if self.device.type == "cpu":
            return batch if batch.features.dtype == self.dtype else _with_dtype(batch, self.dtype)
        return batch.to(self.device, non_blocking=self.ring.pinned)

    def forward(self, batch: Batch) -> LossOut:
        """The loss of a batch; under autocast on a GPU, so that weights stay float32."""
        block_ids = block_input_ids(batch, self.geometry.block_size, self.geometry.mask_token_id)
        masks = build_masks(
            self.geometry, batch.anchors, batch.anchor_valid, batch.lengths, batch.input_ids.shape[1], self.backend
        )
        low = self.device.type == "cuda" and self.dtype != torch.float32
        with torch.autocast(self.device.type, dtype=self.dtype) if low else contextlib.nullcontext():
            hidden = self.drafter(F.embedding(block_ids, self.embed), batch.features, batch.anchors, masks)
            return block_loss(
                hidden,
                self.head,
                batch,
                self.geometry,
                objective=self.config.train.objective,
                gamma=self.config.gamma,
                alpha=self.config.train.alpha,
                mode=self.config.loss.mode,
                reentrant=self.config.loss.reentrant,
                chunk=self.config.loss.chunk,
            )

    def train(self, message: Message) -> Message:
        """One optimiser step.

        Raises:
            NonFiniteError: before anything was changed.
        """
        length = int(message["length"])
        if message["crc"] is not None and self._mismatch(message):
            self.watch.lap("copy")
            return {"k": "mismatch", "slot": message["slot"], "seconds": self.watch.seconds()}
        new = length not in self.lengths_seen
        if new and self.backend == "flex":
            self._tell_compiling(len(self.lengths_seen))
        batch = self.batch_of(message)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.channel.send({"k": "copied", "slot": message["slot"]})
        self.watch.lap("copy")
        out = self.forward(batch)
        numbers = torch.stack([t.detach().double() for t in out]).tolist()
        stats = dict(zip(LossOut._fields, numbers, strict=True))
        stats["grad_norm"] = 0.0
        finite = math.isfinite(stats["numerator"])
        if stats["positions"] and finite:
            torch.autograd.backward([out.loss])
        self.watch.lap("compute")
        if self.together:
            # Before this one raises: the others wait for it, and must learn of it.
            todo = self._add_gradients(stats["denominator"], stats["positions"], not finite)
        else:
            todo = bool(stats["positions"])
        self.watch.lap("sync")
        if not finite:
            raise self._not_finite("loss", stats["numerator"], message)
        if todo:
            stats["grad_norm"] = self.masters.step(float(message["lr"]), self.config.train.clip)
            if not math.isfinite(stats["grad_norm"]):
                raise self._not_finite("norm of the gradient", stats["grad_norm"], message)
        self.tokens += stats["positions"]
        if new:
            self._shape_seen(length)
        stats["block_tokens"] = int(stats["prefix_count"]) * self.geometry.block_size
        stats["context_tokens"] = int(batch.lengths.sum())
        stats["empty"] = int(not stats["positions"])
        self.watch.lap("compute")
        return {"k": "trained", "batch": message["batch"], "stats": stats, "seconds": self.watch.seconds()}

    def _mismatch(self, message: Message) -> bool:
        """Whether the slot does not hold what its target wrote (ring.debug)."""
        slot = self.ring.slot(int(message["slot"]), int(message["length"]))
        return slot.checksum(int(message["batch"])) != message["crc"]

    def join(self, message: Message) -> Message:
        """A step of the others in which this drafter has no batch: the last one of a run may be a short one."""
        if self._add_gradients(0.0, 0.0, False):
            norm = self.masters.step(float(message["lr"]), self.config.train.clip)
            if not math.isfinite(norm):
                raise self._not_finite("norm of the gradient", norm, {"batch": "of another drafter", "samples": []})
        self.watch.lap("sync")
        return {"k": "joined", "seconds": self.watch.seconds()}

    def _add_gradients(self, weight: float, positions: float, bad: bool) -> bool:
        """Whether there is anything to step; the same answer on every drafter."""
        parameters = [self.masters.parameters[name] for name in sorted(self.masters.parameters)]
        sums = add_gradients(parameters, weight, positions, bad, self.device)
        if sums.bad and not bad:
            raise NonFiniteError(
                "the loss of another drafter is not finite",
                "train.sync",
                "the other drafter's log and error.json say more",
            )
        return sums.positions > 0

    def _not_finite(self, what: str, value: float, message: Message) -> NonFiniteError:
        return NonFiniteError(
            f"the {what} is {value}",
            f"batch {message['batch']}, samples {message['samples']}",
            "resume from the last checkpoint with a smaller train.lr, or look at these samples",
        )

    def _tell_compiling(self, k: int) -> None:
        self.channel.send({"k": "stage", "stage": "compiling", "done": k, "of": len(self.lengths_used)})

    def _shape_seen(self, length: int) -> None:
        """Compiling ends with the first batch of the last padded length: a later new shape is a fault."""
        self.lengths_seen.add(length)
        if self.backend == "flex" and set(self.lengths_used) <= self.lengths_seen:
            freeze_shapes()
            self.channel.send({"k": "stage", "stage": "stepping", "done": 1, "of": 1})

    def average(self, message: Message) -> Message:
        """Averages with the others, and writes what comes of it into the launcher's memory.

        Raises:
            NonFiniteError: the average is not finite; it is not kept.
        """
        if self.together:
            # Equal but for rounding, if the drafters' machines differ: a checkpoint must be the same one everywhere.
            make_equal(self.masters.tensors(), 0)
        else:
            average(self.masters.tensors(moments=self.config.train.moments == "averaged"), self.tokens, self.device)
        self.masters.set_count(int(message["step"]))
        self.tokens = 0.0
        try:
            sums = self.memory.write(int(message["buffer"]), self.masters)
        except ValueError as error:
            raise NonFiniteError(
                f"after step {message['step']} {error} holds numbers that are not finite",
                f"the average of step {message['step']}",
                "resume from the last checkpoint with a smaller train.lr",
            ) from error
        self.watch.lap("sync")
        return {"k": "averaged", "sums": sums, "seconds": self.watch.seconds()}


def _with_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    import dataclasses

    return dataclasses.replace(batch, features=batch.features.to(dtype))


def warm_up() -> None:
    """Imports what torch imports with a process's first optimiser: half of the time that a drafter takes to come up."""
    Masters(torch.nn.Linear(1, 1), 0.0, fused=False)


def run_drafter(channel: Channel, setup: Mapping[str, Any]) -> None:
    """Serves until the launcher says exit.

    Raises:
        TrainerError: what cannot be trained or restored. PeerGone: the launcher died.
    """
    worker = DrafterWorker(setup, channel)
    channel.send({"k": "ready"})
    answers = {"train": worker.train, "join": worker.join, "average": worker.average}
    channel.send({"k": "ask"})
    while True:
        message = channel.receive()
        worker.watch.lap("wait")
        if message["k"] == "exit":
            break
        channel.send(answers[message["k"]](message))
    if dist.is_initialized():
        dist.destroy_process_group()
