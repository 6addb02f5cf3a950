"""A layer that runs again in the backward: the same gradients, and nothing kept but its input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megagraph_cli.model.recompute import recomputed


class Two(nn.Module):
    """Two linear maps; counts how often it ran, and in which dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6, dtype=dtype), nn.Linear(6, 4, dtype=dtype)
        self.ran: list[torch.dtype] = []

    def forward(self, x: Tensor, bias: Tensor, tokens: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x) + bias) * tokens)
        self.ran.append(out.dtype)
        return out


def gradients(layer: Two, again: bool, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 4, generator=generator, dtype=dtype, requires_grad=True)
    tokens = torch.randn(6, generator=generator, dtype=dtype, requires_grad=True)
    bias = torch.randn(6, generator=generator, dtype=dtype)
    out = recomputed(layer, x, bias, tokens) if again else layer(x, bias, tokens)
    out.square().sum().backward()
    found = [each.grad for each in (x, tokens, *layer.parameters())]
    assert all(each is not None for each in found)
    return [each for each in found if each is not None]


def test_gradients_are_those_of_the_layer() -> None:
    plain, again = Two(torch.float64), Two(torch.float64)
    for a, b in zip(gradients(plain, False, torch.float64), gradients(again, True, torch.float64), strict=True):
        assert torch.equal(a, b)
    assert len(again.ran) == 2


def test_a_first_layer_whose_input_needs_no_gradient() -> None:
    layer = Two(torch.float64)
    tokens = torch.ones(6, dtype=torch.float64, requires_grad=True)
    recomputed(layer, torch.ones(3, 4, dtype=torch.float64), torch.zeros(6), tokens).sum().backward()
    assert tokens.grad is not None
    assert layer.first.weight.grad is not None


def test_it_runs_again_under_the_autocast_of_the_forward() -> None:
    plain, again = Two(torch.float32), Two(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = gradients(plain, False, torch.float32)
        found = gradients(again, True, torch.float32)
    outside = Two(torch.float32)
    x = torch.ones(3, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = recomputed(outside, x, torch.zeros(6), torch.ones(6, requires_grad=True))
    out.float().sum().backward()
    assert outside.ran == again.ran == [torch.bfloat16] * 2
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("again", [False, True])
def test_nothing_is_kept_but_the_arguments(again: bool) -> None:
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    layer = Two(torch.float32)
    x, tokens = torch.ones(3, 4, requires_grad=True), torch.ones(6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        recomputed(layer, x, torch.zeros(6), tokens) if again else layer(x, torch.zeros(6), tokens)
    assert (sorted(kept) == [(3, 4), (6,)]) is again
