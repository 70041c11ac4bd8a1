"""Responses by the target itself: what a drafter has to learn is the target's own greedy text.

Batches need no padding and no attention mask: all rows of a batch are read up to the shortest prompt's length in one
forward, and then each step feeds a row either the next token of its prompt or its own last one. That is exact for any
causal target (recurrent layers too, which padding on the left would spoil). Prompts are sorted by length, so few steps
are spent on it.

The output grows by whole batches, in an order that only the prompts decide, and is flushed to disk after each. A killed
run is continued where it stood: a torn last line is cut off, and the batch that was under way is made again, so the
file ends up as if nothing had happened.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from trainer.errors import ConfigError, DataError
from trainer.output_file import heal, lock
from trainer.prompts import end_tokens, read_prompts, tokenize, unusable_prompts

if TYPE_CHECKING:
    from trainer.target import Target

#: Rows of one batch differ in prompt length by at most this share of the shortest one (and by 16 tokens in any case).
SPREAD = 0.25


@dataclass(frozen=True)
class Plan:
    """What one call has to do.

    Attributes:
        out: the data file. total: lines it will have. done: whole lines it has.
        skipped: what is wrong with the prompt lines that are left out.
        replaced: the output was of another origin, and is made anew.
    """

    out: Path
    total: int
    done: int
    skipped: tuple[str, ...]
    replaced: bool = False


def greedy_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new: int,
    eos_ids: Collection[int] = (),
    tick: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """Greedy continuations of several prompts at once; row by row what `speculate.greedy` gives for each alone.

    On a GPU in low precision the rounding depends on the batch, and two almost equally likely tokens may swap.

    Args:
        prompts: token ids, none empty. max_new: at least 1. eos_ids: end tokens, kept in the output.
        tick: called after each forward with the number of new tokens that it gave.

    Returns:
        The new tokens of each prompt, up to and with the first end token.
    """
    import torch

    lengths = torch.tensor([len(p) for p in prompts])
    shortest, longest = int(lengths.min()), int(lengths.max())
    ids = torch.zeros((len(prompts), longest + max_new), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(list(prompt))
    ends = torch.tensor(sorted(eos_ids), dtype=torch.int64)
    open_rows = torch.ones(len(prompts), dtype=torch.bool)
    cache = target.new_cache()
    fed, upto = 0, shortest
    while True:
        hidden, _ = target.step(ids[:, fed:upto].to(target.device), cache)
        token = target.most_likely(hidden[:, -1]).cpu()
        fed = upto
        # Column `upto` is a new token for the rows whose prompt is over; the others keep what their prompt says.
        new = open_rows & (lengths <= upto)
        ids[:, upto] = torch.where(new, token, ids[:, upto])
        if tick is not None:
            tick(int(new.sum()))
        open_rows &= ~(new & torch.isin(token, ends))
        open_rows &= upto + 1 < lengths + max_new
        upto += 1
        if not open_rows.any():
            break
    return [
        _until_end(ids[row, n : min(n + max_new, upto)].tolist(), eos_ids) for row, n in enumerate(lengths.tolist())
    ]


def _until_end(tokens: list[int], eos_ids: Collection[int]) -> list[int]:
    for place, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: place + 1]
    return tokens


def batches(lengths: Sequence[int], batch: int) -> Iterator[tuple[int, int]]:
    """[start, stop) ranges over ascending lengths: at most `batch` rows of similar length each."""
    start = 0
    for stop in range(1, len(lengths) + 1):
        if (
            stop == len(lengths)
            or stop - start == batch
            or lengths[stop] - lengths[start] > max(16, SPREAD * lengths[start])
        ):
            yield start, stop
            start = stop


def regenerate(
    target_dir: Path,
    prompts_file: Path,
    out: Path,
    *,
    max_new: int,
    batch: int,
    dtype: str = "float32",
    device: str = "cpu",
    limit: int | None = None,
    skip_bad: bool = False,
    anew: bool = False,
    template_options: Mapping[str, Any] | None = None,
    planned: Callable[[Plan], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    loading: Callable[[int, int], None] | None = None,
) -> Plan:
    """Writes the target's greedy response to every prompt as training data, or goes on where a killed call stood.

    Each line of `out` is `{"input_ids": prompt + response, "loss_mask": 0 on the prompt, 1 on the response}`; lines
    are in the order of the prompts' lengths. `out` + ".from.json" says what it was made from.

    Args:
        template_options: what the chat template is called with, for prompts that are messages.
        anew: an output that was made from something else is emptied, instead of refused.
        planned: called once, before the target is loaded, with what there is to do.
        progress: called after each forward with (lines in the file, new tokens of this call so far).
        loading: as `load_target` has its `progress`.

    Returns:
        The plan as found at the start (`done == total`: nothing had to be done, and torch was not even imported), less
        the prompts that proved unusable as tokens.

    Raises:
        ConfigError: arguments, a folder that is no target, a busy output, an output made from something else.
        DataError: bad prompts. OSError: the disk.
    """
    if max_new < 1 or batch < 1:
        raise ConfigError(f"max-new is {max_new}, batch is {batch}: both at least 1", "--max-new, --batch")
    found, skipped = read_prompts(prompts_file, limit=limit, skip_bad=skip_bad)
    origin = {
        "schema": 1,
        "target": fingerprint(target_dir),
        "prompts": hashlib.sha256(prompts_file.read_bytes()).hexdigest(),
        "count": len(found),
        "max_new": max_new,
        "dtype": dtype,
        **({"template_options": dict(template_options)} if template_options else {}),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("ab+") as file:
        lock(file, out)
        done, replaced = heal(file, out, origin, anew)
        if done > len(found):
            raise DataError(f"{done} lines for {len(found)} prompts", str(out), "remove the file, or name another")
        plan = Plan(out, len(found), done, tuple(skipped), replaced)
        if planned is not None:
            planned(plan)
        if done < len(found):
            work = _Work(target_dir, prompts_file, max_new, batch, dtype, device, skip_bad, template_options)
            unusable = work.run(found, file, done, out, progress, loading)
            plan = replace(plan, total=len(found) - len(unusable), skipped=(*plan.skipped, *unusable))
    return plan


@dataclass(frozen=True)
class _Work:
    target_dir: Path
    prompts_file: Path
    max_new: int
    batch: int
    dtype: str
    device: str
    skip_bad: bool
    template_options: Mapping[str, Any] | None

    def run(
        self,
        found: Sequence[Any],
        file: BinaryIO,
        done: int,
        out: Path,
        progress: Callable[[int, int], None] | None,
        loading: Callable[[int, int], None] | None,
    ) -> list[str]:
        """Answers what is not answered yet; what is wrong with the prompts that were left out."""
        import torch

        from trainer.target import load_target

        dtype = getattr(torch, self.dtype)
        target = load_target(self.target_dir, dtype=dtype, device=self.device, progress=loading)
        eos_ids = end_tokens(self.target_dir)
        room = int(getattr(target.config, "max_position_embeddings", 1 << 31))
        unusable: list[str] = []
        prompts = tokenize(
            found,
            self.target_dir,
            self.prompts_file,
            vocab_size=target.vocab_size,
            longest=room - self.max_new,
            bad=unusable,
            template_options=self.template_options,
        )
        if unusable and not self.skip_bad:
            raise unusable_prompts(unusable, str(self.prompts_file))
        prompts = sorted((ids for ids in prompts if ids), key=len)  # stable: equal lengths stay in the file's order
        if not prompts:
            raise unusable_prompts(unusable, str(self.prompts_file))
        _check_start(file, done, prompts, out)
        tokens, written = 0, done

        def tick(new: int) -> None:
            nonlocal tokens
            tokens += new
            if progress is not None:
                progress(written, tokens)

        for start, stop in batches([len(p) for p in prompts], self.batch):
            if stop <= done:
                continue
            # A batch that was half written is made again whole: with the same rows it gives the same bytes.
            responses = greedy_batch(target, prompts[start:stop], self.max_new, eos_ids, tick)
            lines = [_line(p, r) for p, r in zip(prompts[start:stop], responses, strict=True)]
            file.write(b"".join(lines[max(0, done - start) :]))
            file.flush()
            os.fsync(file.fileno())
            written = stop
            if progress is not None:
                progress(written, tokens)
        return unusable


def _line(prompt: Sequence[int], response: Sequence[int]) -> bytes:
    record = {"input_ids": [*prompt, *response], "loss_mask": [0] * len(prompt) + [1] * len(response)}
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _check_start(file: BinaryIO, done: int, prompts: Sequence[Sequence[int]], out: Path) -> None:
    """The lines that are kept must be answers to these prompts: a file that was edited is not built upon."""
    file.seek(0)
    for number, (line, prompt) in enumerate(zip(file, prompts[:done], strict=True), start=1):
        try:
            kept = json.loads(line)["input_ids"][: len(prompt)] == list(prompt)
        except (ValueError, KeyError, TypeError):
            kept = False
        if not kept:
            raise DataError(
                "this line is no answer to the prompt that it stands for",
                f"{out}:{number}",
                "remove the file, and start anew",
            )


def fingerprint(target: Path) -> str:
    """Tells two targets apart without reading all of a 50 GB folder: small files whole, large ones by their size and
    16 samples of 64 KiB.

    Raises:
        ConfigError: no such folder, or no config.json in it.
    """
    if not (target / "config.json").is_file():
        raise ConfigError("no config.json: this is not a model folder", str(target), "check --target")
    digest = hashlib.sha256()
    for file in sorted(target.iterdir()):
        if file.suffix not in (".json", ".safetensors", ".jinja", ".txt", ".model") or file.name.startswith("."):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            if size <= 16 << 20:
                digest.update(opened.read())
                continue
            for part in range(16):
                opened.seek(part * (size - (64 << 10)) // 15)
                digest.update(opened.read(64 << 10))
    return digest.hexdigest()
