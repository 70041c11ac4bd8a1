"""flex attention never runs dense and never compiles again after warm-up; shown with torch's real compiler.

Most tests trace without making kernels (`backend="eager"`), which takes milliseconds and goes through the same guards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

from trainer.attention import Masks, attend, dense_mask
from trainer.errors import ConfigError, TrainerError
from trainer.flex import Flex

BLOCK, CONTEXT = 8, 64


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Neither what other tests compiled nor what these change."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        yield
    torch._dynamo.reset()


def some_anchors(count: int = 4, shift: int = 0) -> Tensor:
    return torch.tensor([[3, 9, 40, 55, 57, 60][:count]]) + shift


def mask_of(flex: Flex, anchors: Tensor) -> Any:
    return flex.block_mask(anchors, anchors, CONTEXT, BLOCK, 16, True)


def run(flex: Flex, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of a sliding causal layer by flex, and by SDPA with the dense mask."""
    generator = torch.Generator().manual_seed(0)
    rows = anchors.shape[1] * BLOCK
    q = torch.randn(1, 4, rows, 32, generator=generator)
    k, v = (torch.randn(1, 2, CONTEXT + rows, 32, generator=generator) for _ in range(2))
    with torch.no_grad():
        ours = flex.attend(q, k, v, mask_of(flex, anchors))
        dense = dense_mask(anchors, anchors, torch.arange(CONTEXT), BLOCK, 16, True)
        return ours, attend(q, k, v, Masks("sdpa", {"x": dense}), "x")


def test_other_anchors_compile_nothing_and_another_shape_after_warm_up_is_named() -> None:
    flex, graphs = Flex(backend="eager"), []
    for shift in range(3):
        ours, plain = run(flex, some_anchors(shift=shift))
        assert torch.allclose(ours, plain, atol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
        flex.frozen = True
    assert graphs[0] == graphs[1] == graphs[2]
    with pytest.raises(TrainerError, match=r"compile again.*'mask', 1, 48, 112"):
        run(flex, some_anchors(6))


def test_after_warm_up_a_recompile_that_no_shape_shows_is_an_error_too() -> None:
    flex, anchors = Flex(backend="eager"), some_anchors()
    q, k = torch.randn(1, 4, 32, 32), torch.randn(1, 2, CONTEXT + 32, 32)
    mask = flex.block_mask(anchors, anchors, CONTEXT, BLOCK, None, False)
    flex.attend(q, k, k.clone(), mask)
    flex.frozen = True
    flex.attend(q + 1, k, k.clone(), mask)
    other_strides = q.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(TrainerError, match=r"compile again after warm-up, at .*\(1, 4, 32, 32\)"):
        flex.attend(other_strides, k, k.clone(), mask)


def broken(graph: Any, inputs: Any) -> Callable[..., Any]:
    raise RuntimeError("no kernel")


@pytest.mark.parametrize(
    "how",
    [
        lambda: torch._dynamo.config.patch(disable=True),
        lambda: torch.compiler.set_stance("force_eager"),
        lambda: torch._dynamo.config.patch(recompile_limit=1),
        lambda: torch._dynamo.config.patch(recompile_limit=1, suppress_errors=True),
    ],
    ids=["disabled", "forced eager", "recompile limit", "limit, errors suppressed"],
)
def test_whatever_makes_torch_run_it_uncompiled_is_an_error(how: Callable[[], Any]) -> None:
    flex, larger = Flex(backend="eager"), some_anchors(6)
    run(flex, some_anchors(2))
    mask, q, k = mask_of(flex, larger), torch.randn(1, 4, 48, 32), torch.randn(1, 2, CONTEXT + 48, 32)
    with how(), pytest.raises(TrainerError, match=r"about to run dense, at .*\(1, 4, 48, 32\)"):
        flex.attend(q, k, k.clone(), mask)
    with how(), pytest.raises(TrainerError, match="about to run dense"):
        mask_of(flex, some_anchors(5))


def test_a_compilation_that_fails_while_torch_suppresses_errors_is_an_error() -> None:
    flex = Flex(backend=broken)  # type: ignore[arg-type]
    with torch._dynamo.config.patch(suppress_errors=True), pytest.raises((TrainerError, BackendCompilerFailed)):
        run(flex, some_anchors())


@pytest.mark.parametrize("settings", [{}, {"disable": True}, {"debug_backend_override": "0:eager"}])
def test_compilation_switched_off_from_the_start_is_an_error(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not all(hasattr(torch._dynamo.config, name) for name in settings):
        pytest.skip("this torch has no such setting")
    if not settings:
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with torch._dynamo.config.patch(settings), pytest.raises(TrainerError, match="would run dense"):
        Flex()


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="CUDA"):
        run(Flex(), some_anchors())


@pytest.mark.slow
def test_compiled_kernels_equal_sdpa() -> None:
    """On the CPU, where torch compiles the forward only. The mask builder is only traced: its kernels take as long."""
    flex = Flex(backend="eager")
    flex._attend = Flex()._attend
    ours, plain = run(flex, some_anchors())
    assert torch.allclose(ours, plain, atol=1e-5)
