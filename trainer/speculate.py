"""Plain and speculative greedy decoding of one sequence.

Speculative: the block is the last known token and W - 1 mask tokens; the drafter fills it in one pass over its cached
context, the target checks all W tokens in one forward. The longest matching prefix is kept, plus one token that the
target itself gives: so every verification emits 1..W tokens, and all of them are the target's own choice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trainer.drafter import ContextCache, Drafter
from trainer.errors import ConfigError
from trainer.target import Target


@dataclass(frozen=True)
class Generation:
    """What speculative decoding gave.

    Attributes:
        tokens: the new tokens, up to and with the first end token, at most max_new.
        acceptance_lengths: tokens emitted by each verification, the bonus token included, 1..W. The last one may
            reach past `tokens`; the token of the prefill is in none of them.
        target_forwards: the prefill and one for each verification. Re-reading kept tokens, which only targets with
            recurrent or windowed layers need here, is not counted: servers restore such states without a forward.
    """

    tokens: list[int]
    acceptance_lengths: list[int]
    target_forwards: int


@torch.no_grad()
def greedy(
    target: Target,
    prompt_ids: Sequence[int],
    max_new: int,
    eos_ids: Collection[int] = (),
    *,
    each: Callable[[int], None] | None = None,
) -> list[int]:
    """The target's own greedy continuation, one token a forward: what speculation must reproduce.

    Args:
        prompt_ids: at least one token. max_new: at least 1. eos_ids: end tokens, kept in the output.
        each: called after each forward with 1, the new tokens that it gave.

    Returns:
        The new tokens; as many target forwards were made.
    """
    ids = _prompt(target, prompt_ids, max_new)
    cache = target.new_cache()
    tokens: list[int] = []
    while True:
        hidden, _ = target.step(ids, cache)
        ids = target.most_likely(hidden[:, -1:])
        tokens.append(int(ids))
        if each is not None:
            each(1)
        if len(tokens) == max_new or tokens[-1] in eos_ids:
            return tokens


@torch.no_grad()
def speculate(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    max_new: int,
    eos_ids: Collection[int] = (),
    *,
    each: Callable[[int], None] | None = None,
) -> Generation:
    """The same tokens as `greedy`, with fewer target forwards.

    In low precision the target may round a forward over a block otherwise than one over a single token; where two
    tokens are almost equally likely the outputs can then differ, which `evaluate` reports.

    Args:
        drafter: trained for this target; its dtype and device are the target's.
        each: called after each verification with the new tokens that it gave.

    Raises:
        ConfigError: an empty prompt, max_new < 1, or a drafter that does not fit the target.
    """
    check_pair(target, drafter)
    config = drafter.config
    ids = _prompt(target, prompt_ids, max_new)
    cache, context = target.new_cache(), ContextCache()
    hidden, features = target.step(ids, cache, config.target_layer_ids)
    tokens = [int(target.most_likely(hidden[:, -1]))]
    lengths: list[int] = []
    # tokens[-1] is known but not yet seen by the target: each round starts from it.
    while sum(lengths) < max_new and not any(token in eos_ids for token in tokens):
        assert features is not None
        block = torch.full((1, config.block_size), config.mask_token_id, dtype=torch.int64, device=target.device)
        block[0, 0] = tokens[-1]
        drafted = drafter.propose(F.embedding(block, target.embed_weight), features, context)
        block[0, 1:] = target.most_likely(drafted[0, 1:])
        before = target.snapshot(cache)
        hidden, seen = target.step(block, cache, config.target_layer_ids)
        own = target.most_likely(hidden[0])
        accepted = int((block[0, 1:] == own[:-1]).long().cumprod(0).sum())
        kept = accepted + 1
        cache = target.rewind(cache, before, block, kept)
        assert seen is not None
        features = seen[:, :kept]
        tokens += own[:kept].tolist()
        lengths.append(kept)
        if each is not None:
            each(kept)
    return Generation(_until_end(tokens, max_new, eos_ids), lengths, 1 + len(lengths))


def check_pair(target: Target, drafter: Drafter) -> None:
    """Raises ConfigError, naming the number, if the drafter was made for a target of another shape."""
    config = drafter.config
    pairs = (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("num_target_layers", config.num_target_layers, target.num_layers),
        ("vocab_size", config.vocab_size, target.vocab_size),
    )
    for name, ours, theirs in pairs:
        if ours != theirs:
            raise ConfigError(
                f"the drafter's {name} is {ours}, the target's is {theirs}", name, "use the drafter of this target"
            )


def _prompt(target: Target, prompt_ids: Sequence[int], max_new: int) -> torch.Tensor:
    if not prompt_ids:
        raise ConfigError("an empty prompt cannot be continued", "prompt")
    if max_new < 1:
        raise ConfigError(f"max_new is {max_new}: at least 1", "max_new")
    return torch.tensor([list(prompt_ids)], dtype=torch.int64, device=target.device)


def _until_end(tokens: list[int], max_new: int, eos_ids: Collection[int]) -> list[int]:
    tokens = tokens[:max_new]
    ends = [i for i, token in enumerate(tokens) if token in eos_ids]
    return tokens[: ends[0] + 1] if ends else tokens
