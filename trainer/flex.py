"""flex_attention on CUDA: one compiled attention and one compiled mask builder for the whole process.

Uncompiled, flex attention computes all scores of all heads (tens of GB at the usual sizes), and torch gets there in
more ways than one: compilation switched off, a recompile limit reached, errors suppressed. Here the functions that are
compiled refuse to run as plain Python, so that the dense way does not exist, whatever torch decides.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.errors import ConfigError, TrainerError

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: One compilation for each bucket and kind of layer is wanted; torch's own limit is 8. `_admit` names the shapes.
RECOMPILE_LIMIT = 128


class RanUncompiled(RuntimeError):
    """A function that must be compiled was about to run as plain Python."""


def make_mask_mod(
    anchors: Tensor, limit: Tensor, context: int, block: int, window: int | None, causal: bool
) -> MaskMod:
    """The rule of trainer/attention.py for one (batch, head, query row, key) at a time, as flex attention wants it.

    Args:
        anchors: [B, A]. limit: [B, A], first context position that the block may not see (0 for a padding block).
        context: S. block: W. window: of a sliding layer. causal: inside the block.
    """

    def sees(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        which = row // block
        in_context = (key < context) & (key < limit[b, which])
        # Guarded by key >= context: integer division of a negative number rounds differently on CPU and GPU.
        in_block = (key >= context) & (((key - context) // block) == which)
        if window is not None:
            in_context = in_context & (key > anchors[b, which] + row % block - window)
        if causal:
            in_block = in_block & ((key - context) <= row)
        return in_context | in_block

    return sees


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, gqa: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if not torch.compiler.is_dynamo_compiling():
        raise RanUncompiled
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=gqa)


def _mask(rule: MaskMod, batch: int, rows: int, keys: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    if not torch.compiler.is_dynamo_compiling():
        raise RanUncompiled
    # H=None: one mask for all heads; a mask for each head is heads times the memory.
    return create_block_mask(rule, batch, None, rows, keys, device=device)


class Flex:
    """The two compiled functions, and the shapes that they were compiled for.

    Args:
        backend: of torch.compile. Anything but "inductor" is for tests: it traces the same functions, without kernels.

    Raises:
        TrainerError: torch.compile is switched off, or told to use another backend than ours.
    """

    def __init__(self, backend: str = "inductor") -> None:
        import torch._dynamo

        settings = torch._dynamo.config
        off = getattr(settings, "disable", False) or os.environ.get("TORCHDYNAMO_DISABLE") == "1"
        # A debugging aid of newer torch: it would trace as always, then run the traced graph without kernels.
        if off or getattr(settings, "debug_backend_override", ""):
            raise TrainerError(
                f"torch.compile is {'switched off' if off else 'overridden'}, so flex attention would run dense",
                "TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE or TORCH_COMPILE_OVERRIDE_BACKENDS",
                'unset it, or set attention = "sdpa"',
            )
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
        self._inductor = backend == "inductor"
        self._attend: Any = torch.compile(_attention, fullgraph=True, dynamic=False, backend=backend)
        self._build: Any = torch.compile(_mask, fullgraph=True, dynamic=False, backend=backend)
        self.shapes: set[tuple[Any, ...]] = set()
        self.frozen = False

    def _admit(self, shape: tuple[Any, ...]) -> None:
        if shape in self.shapes:
            return
        if self.frozen:
            raise TrainerError(
                f"flex attention would compile again, for a new shape {shape}",
                f"shapes after warm-up: {sorted(map(str, self.shapes))}",
                "keep anchors, block size and lengths to the configured buckets",
            )
        self.shapes.add(shape)

    def block_mask(
        self, anchors: Tensor, limit: Tensor, context: int, block: int, window: int | None, causal: bool
    ) -> Any:
        """A BlockMask over A*W rows and S + A*W keys; arguments as for `make_mask_mod`.

        Raises:
            ConfigError: not on CUDA. TrainerError: a new shape after warm-up, or torch would not compile.
        """
        if self._inductor and not anchors.is_cuda:
            raise ConfigError(
                f"flex attention needs CUDA, the anchors are on {anchors.device}",
                "attention",
                'use "structured" on CPU',
            )
        batch, rows = anchors.shape[0], anchors.shape[1] * block
        self._admit(("mask", batch, rows, context + rows, window, causal))
        rule = make_mask_mod(anchors, limit, context, block, window, causal)
        return self._run(self._build, rule, batch, rows, context + rows, str(anchors.device))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """[B, heads, rows, D], like `trainer.attention.attend`.

        Raises:
            TrainerError: a new shape after warm-up, or torch would not compile.
        """
        self._admit(("attend", tuple(q.shape), tuple(k.shape), q.dtype, torch.is_grad_enabled()))
        return self._run(self._attend, q, k, v, mask, q.shape[1] != k.shape[1])

    def _run(self, function: Any, *args: Any) -> Any:
        import torch._dynamo

        try:
            # After warm-up torch itself refuses what `_admit` does not see, such as new strides.
            with torch._dynamo.config.patch(error_on_recompile=self.frozen):
                return function(*args)
        except Exception as error:
            # By name: these two of torch's exceptions have moved between modules.
            kind = type(error).__name__
            if not (isinstance(error, RanUncompiled) or "RecompileLimit" in kind or kind == "RecompileError"):
                raise
            shapes = [tuple(a.shape) if isinstance(a, Tensor) else a for a in args if not callable(a)]
            what = "compile again after warm-up" if kind == "RecompileError" else "run dense"
            raise TrainerError(
                f"flex attention was about to {what}, at {shapes}",
                f"{kind}: {error}" if str(error) else "torch ran it as plain Python",
                "keep anchors, block size and lengths to the configured buckets, and leave torch.compile on",
            ) from error


_the_flex: Flex | None = None


def the_flex() -> Flex:
    """The process's only one, made when it is first needed."""
    global _the_flex
    if _the_flex is None:
        _the_flex = Flex()
    return _the_flex


def freeze_shapes(frozen: bool = True) -> None:
    """Ends the warm-up: from now on a shape that flex attention has not seen is an error. No effect without flex."""
    if _the_flex is not None:
        _the_flex.frozen = frozen
