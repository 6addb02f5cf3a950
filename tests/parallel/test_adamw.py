"""The fused optimizer: torch's own AdamW, number for number, without what that imports."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from megagraph_cli.parallel.adamw import AdamW

SHAPES = {"weight": (3, 5), "bias": (5,), "scalar": ()}


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {n: nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for n, s in SHAPES.items()}


def give_gradients(held: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in held.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_equal_those_of_torch(weight_decay: float) -> None:
    mine, theirs = parameters(), parameters()
    optimizer = AdamW(mine, weight_decay=weight_decay)
    reference = torch.optim.AdamW(theirs.values(), lr=1.0, weight_decay=weight_decay, foreach=False)
    for step in range(7):
        lr = 0.1 / (step + 1)
        give_gradients(mine, step)
        give_gradients(theirs, step)
        optimizer.step(lr)
        reference.param_groups[0]["lr"] = lr
        reference.step()
    for name, parameter in mine.items():
        assert torch.allclose(parameter, theirs[name], rtol=1e-12, atol=0)
        state = reference.state[theirs[name]]
        for moment, held in optimizer.moments.items():
            assert torch.allclose(held[name], state[moment], rtol=1e-12, atol=0)


def test_the_count_of_steps_can_be_set() -> None:
    """From zero moments, the bias correction is all that the count changes: m = 0.1 g, v = 0.001 g^2 at t = 100."""
    held = parameters()
    optimizer = AdamW(held, weight_decay=0.0, eps=0.0)
    before = held["bias"].detach().clone()
    give_gradients(held, 0)
    optimizer.set_steps(99)
    optimizer.step(1.0)
    change = 0.1 / (1 - 0.9**100) / (0.001 / (1 - 0.999**100)) ** 0.5
    grad = held["bias"].grad
    assert grad is not None
    assert torch.allclose(before - held["bias"].detach(), change * grad.sign(), rtol=1e-10)


def test_a_step_and_a_recomputed_layer_import_no_compiler() -> None:
    """It would take each worker seconds at its start."""
    program = """
import sys, torch
from megagraph_cli.model.recompute import recomputed
from megagraph_cli.parallel.adamw import AdamW
w = torch.nn.Parameter(torch.ones(2))
w.grad = torch.zeros(2)
recomputed(lambda x, bias, tokens: x * w, torch.ones(2, requires_grad=True), None, torch.ones(1)).sum().backward()
AdamW({"w": w}, weight_decay=0.0).step(0.1)
assert bool((w != 1).all())
assert not [name for name in ("torch._dynamo", "sympy") if name in sys.modules]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
