"""Small tensor functions that a GPU should run as one kernel, not as one for each operation.

At the 27B geometry norms, rotary embedding and SwiGLU move about 10 GB a layer and step through memory if every
operation is a kernel of its own, and autograd keeps what lies between them. Compiled, each reads its inputs and writes
its output once. On a CPU they run as they are written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def fused_on_cuda(function: Function) -> Function:
    """`function(tensor, ...)`, compiled when its first argument is on a GPU, once for each shape.

    Only for training, whose shapes are few. With gradients off (evaluation: any length occurs) it runs as written.
    Unlike flex attention it may also run uncompiled (compilation switched off): slower, and equal but for rounding.
    """

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function, dynamic=False)

    @functools.wraps(function)
    def call(first: torch.Tensor, *rest: Any) -> Any:
        if first.is_cuda and torch.is_grad_enabled():
            return compiled()(first, *rest)
        return function(first, *rest)

    return call  # type: ignore[return-value]
