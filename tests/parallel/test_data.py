"""Gradients in one buffer: summed over the ranks that share them, their norm and clipping those of the whole model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagraph_cli.layout.dims import AXES, ParallelDims
from megagraph_cli.parallel.data import GradientBuffer
from megagraph_cli.parallel.mesh import Mesh, build_mesh
from tests.ranks import run_ranks

SHARED = "token_bias"
SHAPES = {0: {"a": (3, 2), SHARED: (1, 4), "b": (5,)}, 1: {SHARED: (1, 4), "c": (2, 2)}}
"""Parameters of two stages; SHARED is one parameter of which both hold a copy."""

# Sums of two float64 numbers are the same in either order; the norm adds 15 squares.
TOLERANCE = 1e-14
LIMIT = 1.5


def gradient(name: str, rank: int) -> Tensor:
    """What ``rank`` would have computed for a parameter."""
    shape = next(shapes[name] for shapes in SHAPES.values() if name in shapes)
    generator = torch.Generator().manual_seed(100 * rank + ord(name[0]))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def parameters_of(stage: int) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for name, shape in SHAPES[stage].items()}


def reduced(rank: int, dims: ParallelDims) -> tuple[dict[str, Tensor], float, float, dict[str, Tensor]]:
    """(gradients after reduce, this rank's square sum, the whole square sum, gradients after clip)."""
    mesh = build_mesh(dims, AXES, "cpu")
    parameters = parameters_of(mesh.place.pp)
    buffer = GradientBuffer(parameters, {SHARED}, mesh)
    buffer.flat.fill_(7.0)
    buffer.zero()
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        parameter.grad += gradient(name, rank)
    buffer.reduce()
    after = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    mine = buffer.square_sum()
    whole = mine.clone()
    dist.all_reduce(whole)
    buffer.clip(whole.sqrt(), LIMIT)
    clipped = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    return after, float(mine), float(whole), clipped


def in_turn(rank: int, all_dims: list[ParallelDims]) -> list[tuple[dict[str, Tensor], float, float, dict[str, Tensor]]]:
    return [reduced(rank, dims) for dims in all_dims]


@pytest.mark.ranks
def test_reductions_norm_and_clipping_on_two_ranks() -> None:
    all_dims = [ParallelDims(1, 2, 1), ParallelDims(1, 1, 2), ParallelDims(2, 1, 1)]
    by_rank = run_ranks(2, in_turn, all_dims)
    for case, dims in enumerate(all_dims):
        expected = {}
        for rank in range(2):
            after, _, whole, clipped = by_rank[rank][case]
            for name, got in after.items():
                together = dims.pp == 1 or name == SHARED
                ranks = (0, 1) if together else (rank,)
                expected[name] = sum((gradient(name, r) for r in ranks), torch.zeros_like(got))
                assert float((got - expected[name]).abs().max()) <= TOLERANCE, (dims, name)
        square = sum(float(g.square().sum()) for g in expected.values())  # each parameter once, by name
        assert square > LIMIT**2
        for rank in range(2):
            after, _, whole, clipped = by_rank[rank][case]
            assert abs(whole - square) <= TOLERANCE * square * 10
            for name, got in clipped.items():
                factor = LIMIT / (square**0.5 + 1e-6)
                assert float((got - after[name] * factor).abs().max()) <= TOLERANCE * 10
        if dims.pp == 1:
            assert by_rank[1][case][1] == 0.0


def lone_mesh() -> Mesh:
    dims = ParallelDims(1, 1, 1)
    return Mesh(dims=dims, place=dims.place(0), pp=None, cp=None, loss=None)  # type: ignore[arg-type]


def test_gradients_accumulate_into_the_buffer_and_small_ones_are_not_clipped() -> None:
    parameters = parameters_of(0)
    buffer = GradientBuffer(parameters, {SHARED}, lone_mesh())
    for _ in range(2):
        sum((p * 0.01).sum() for p in parameters.values()).backward()  # type: ignore[union-attr]
    buffer.reduce()
    assert torch.equal(buffer.flat, torch.full((15,), 0.02, dtype=torch.float64))
    assert (buffer.own.numel(), buffer.shared.numel()) == (11, 4)
    assert abs(float(buffer.square_sum()) - 15 * 0.02**2) <= TOLERANCE
    buffer.clip(buffer.square_sum().sqrt(), LIMIT)
    assert torch.equal(buffer.flat, torch.full((15,), 0.02, dtype=torch.float64))
    buffer.zero()
    assert not any(p.grad is None or p.grad.any() for p in parameters.values())


def test_a_stage_without_shared_parameters() -> None:
    buffer = GradientBuffer({"a": nn.Parameter(torch.ones(4))}, set(), lone_mesh())
    buffer.flat.fill_(2.0)
    assert buffer.shared.numel() == 0
    assert float(buffer.square_sum()) == 16.0
