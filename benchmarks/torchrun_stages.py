"""The same stages as a plain torchrun training: what a careful person writes with torch alone, for `goodput.py`.

    torchrun --standalone --nproc-per-node=3 --max-restarts=1000 benchmarks/torchrun_stages.py CONFIG FOLDER

One process a device, all in one gloo group: the first ranks are targets, the others drafters. Batch b is computed by
target b mod T and sent (isend, one batch ahead) to drafter b mod D, which trains it; every `average_every` steps the
drafters average with `all_reduce`; every `checkpoint.every` steps the first drafter saves (written beside, renamed),
and each start resumes from there. The modules are the trainer's own: target, drafter, loss, AdamW. What torchrun gives
is the restart: whatever rank dies, its agent ends all of them and starts them again. A rank that hangs is found by the
group's timeout, as its documentation proposes: one of `workers.timeout_s` while they load, and once all are
there one of `workers.step_timeout_s`.

Steps go to FOLDER/steps, one a line, pids to FOLDER/pids/<role><rank>.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainer.anchors import pick_anchors
from trainer.attention import build_masks
from trainer.batch import Batch, block_input_ids
from trainer.config import RunConfig, load_config
from trainer.drafter import Drafter
from trainer.drafter_config import DrafterConfig
from trainer.loss import block_loss
from trainer.optimizer import Masters
from trainer.target import load_embed_and_head, load_target

#: Seconds that each stage sleeps, as in the trainer's own processes (slow_stages/).
SLOW: dict[str, float] = json.loads(os.environ.get("DFLASH_SLOW_STAGES", "{}"))


class Stages:
    """
    Args:
        config: the run's config, the same file that the trainer gets. folder: of this system.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.rank = dist.get_rank()
        self.targets, self.drafters = len(config.workers.target_devices), len(config.workers.drafter_devices)
        facts = json.loads((Path(str(config.target.path)) / "config.json").read_text())
        self.geometry = DrafterConfig.from_target(
            SimpleNamespace(**facts), layers=config.drafter.layers, block_size=config.drafter.block_size,
            mask_token_id=int(config.drafter.mask_token_id or 0), taps=config.drafter.taps,
        )  # fmt: skip
        rows = [json.loads(line)["input_ids"] for line in Path(config.data.path).read_text().splitlines()]
        self.tokens = torch.tensor(rows)  # all of one length
        self.width = len(self.geometry.target_layer_ids) * int(facts["hidden_size"])
        # Each start makes the groups anew, in the same order on every rank.
        silence = timedelta(seconds=config.workers.step_timeout_s)
        self.all = dist.new_group(timeout=silence)
        self.trainers = dist.new_group(list(range(self.targets, self.targets + self.drafters)), timeout=silence)

    def ids(self, batch: int) -> list[int]:
        size = self.config.data.batch_size
        return [(batch * size + i) % len(self.tokens) for i in range(size)]

    def run(self) -> None:
        role = "target" if self.rank < self.targets else "drafter"
        number = self.rank if role == "target" else self.rank - self.targets
        pid = self.folder / "pids" / f"{role}{number}"
        pid.parent.mkdir(exist_ok=True)
        pid.write_text(str(os.getpid()))
        start = torch.zeros(1, dtype=torch.int64)
        state: dict[str, Any] = {}
        file = self.folder / "checkpoint.pt"
        if file.exists():
            state = torch.load(file, weights_only=True)
            start[0] = state["step"]
        dist.broadcast(start, self.targets)  # one reads it for all: a save may fall between two readings
        self.fill(number, int(start)) if role == "target" else self.train(number, int(start), state)

    def fill(self, number: int, step: int) -> None:
        target = load_target(str(self.config.target.path), dtype=torch.float32, device="cpu")
        dist.barrier()  # all have loaded
        sent: list[Any] = []
        first = step * self.drafters
        batch = first + (number - first) % self.targets
        while True:
            features = target.features(self.tokens[self.ids(batch)], list(self.geometry.target_layer_ids))
            time.sleep(SLOW.get("target", 0.0))
            if len(sent) > 1:  # as many ahead as the ring has slots for each
                sent.pop(0)[0].wait()
            sent.append((dist.isend(features, self.targets + batch % self.drafters, self.all, batch % 1024), features))
            batch += self.targets

    def train(self, number: int, step: int, state: dict[str, Any]) -> None:
        config, train = self.config, self.config.train
        embed, head = load_embed_and_head(str(config.target.path), torch.float32, torch.device("cpu"))
        drafter = Drafter(self.geometry, seed=train.seed)
        masters = Masters(drafter, train.weight_decay, fused=False)
        if state:
            for tensor, saved in zip(masters.tensors(), state["tensors"], strict=True):
                tensor.copy_(saved)
            masters.set_count(step)

        dist.barrier()

        def one(batch: int) -> None:
            ids = self.tokens[self.ids(batch)]
            features = torch.empty((*ids.shape, self.width))
            dist.recv(features, batch % self.targets, self.all, batch % 1024)
            learn(batch, ids, features)

        def learn(number: int, ids: torch.Tensor, features: torch.Tensor) -> None:
            lengths = torch.full((len(ids),), ids.shape[1])
            mask = torch.ones(ids.shape)
            keys = [(train.seed, 0, i) for i in self.ids(number)]
            anchors, valid = pick_anchors(mask, lengths, train.anchors, keys)
            batch = Batch(ids, mask, lengths, anchors, valid, features, self.ids(number))
            masks = build_masks(self.geometry, anchors, valid, lengths, ids.shape[1], "structured")
            blocks = block_input_ids(batch, self.geometry.block_size, self.geometry.mask_token_id)
            hidden = drafter(F.embedding(blocks, embed), features, anchors, masks)
            out = block_loss(hidden, head, batch, self.geometry, mode=config.loss.mode, chunk=config.loss.chunk)
            torch.autograd.backward([out.loss])
            masters.step(train.lr, train.clip)
            time.sleep(SLOW.get("drafter", 0.0))

        with (self.folder / "steps").open("a") as said:
            while True:
                one(step * self.drafters + number)
                step += 1
                if step % train.average_every == 0 and self.drafters > 1:
                    tensors = list(masters.tensors())
                    for tensor in tensors:
                        dist.all_reduce(tensor, group=self.trainers)
                        tensor /= self.drafters
                if number == 0:
                    said.write(f"{step}\n")
                    said.flush()
                    if step % config.checkpoint.every == 0:
                        self.save({"step": step, "tensors": list(masters.tensors())})

    def save(self, state: dict[str, Any]) -> None:
        beside = self.folder / ".checkpoint.tmp"
        torch.save(state, beside)
        beside.replace(self.folder / "checkpoint.pt")


def main() -> None:
    torch.set_num_threads(1)
    config = load_config(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=config.workers.timeout_s))
    Stages(config, Path(sys.argv[2])).run()


if __name__ == "__main__":
    main()
