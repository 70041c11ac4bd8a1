"""AdamW over fp32 masters, with its state in plain sight: what a checkpoint and an averaging must take with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.999)
EPS = 1e-8


class Masters:
    """The drafter's parameters and their two moments, all float32.

    bf16 parameters would not do: a norm weight of 1.0 moves by less than half a bf16 step at lr 6e-4, so it never
    moves at all.

    Args:
        module: its parameters are trained, all of them float32. weight_decay: not applied to norm weights.
        fused: one kernel for all parameters (CUDA).
    """

    def __init__(self, module: nn.Module, weight_decay: float, *, fused: bool) -> None:
        self.parameters: dict[str, nn.Parameter] = dict(module.named_parameters())
        wide = [p for p in self.parameters.values() if p.dim() > 1]
        flat = [p for p in self.parameters.values() if p.dim() <= 1]
        groups = [{"params": wide, "weight_decay": weight_decay}, {"params": flat, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW([g for g in groups if g["params"]], betas=BETAS, eps=EPS, fused=fused)
        for parameter in self.parameters.values():
            # Made now and not at the first step: a drafter that trained nothing yet takes part in averaging too.
            self._adam.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }

    def step(self, lr: float, clip: float) -> float:
        """Clips the gradients to `clip` and steps, unless their norm is not finite.

        Returns:
            The norm before clipping.
        """
        norm = float(nn.utils.clip_grad_norm_(list(self.parameters.values()), clip).item())
        if norm == norm and norm != float("inf"):
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        return norm

    def set_count(self, steps: int) -> None:
        """How many steps the moments stand for (bias correction)."""
        for state in self._adam.state.values():
            state["step"].fill_(float(steps))

    def tensors(self, *, moments: bool = True) -> Iterator[Tensor]:
        """Weights and, if wanted, moments, in an order that is the same in every process."""
        for name in sorted(self.parameters):
            parameter = self.parameters[name]
            yield parameter.data
            if moments:
                yield self._adam.state[parameter]["exp_avg"]
                yield self._adam.state[parameter]["exp_avg_sq"]

    def tensor(self, kind: str, name: str) -> Tensor:
        """One tensor itself; kind is "weight", "exp_avg" or "exp_avg_sq"."""
        parameter = self.parameters[name]
        return parameter.data if kind == "weight" else self._adam.state[parameter][kind]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def load(self, kind: str, name: str, tensor: Tensor) -> None:
        """Puts one tensor of a checkpoint in its place; kind is "weight", "exp_avg" or "exp_avg_sq"."""
        self.tensor(kind, name).copy_(tensor)
