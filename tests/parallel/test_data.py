"""Gradients in one buffer: summed over the ranks that share them, their norm that of the whole model."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megagraph_cli.layout.dims import AXES, ParallelDims
from megagraph_cli.parallel import data
from megagraph_cli.parallel.data import GradientBuffer, bucket_lengths
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
    """(gradients after reduce, this rank's square sum, the whole square sum, gradients after scaling to LIMIT)."""
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
    buffer.scale(LIMIT / whole.sqrt())
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
                factor = LIMIT / square**0.5
                assert float((got - after[name] * factor).abs().max()) <= TOLERANCE * 10
        if dims.pp == 1:
            assert by_rank[1][case][1] == 0.0


def lone_mesh() -> Mesh:
    dims = ParallelDims(1, 1, 1)
    return Mesh(dims=dims, place=dims.place(0), pp=None, cp=None, loss=None)  # type: ignore[arg-type]


def test_gradients_accumulate_into_the_buffer_and_are_scaled_in_it() -> None:
    parameters = parameters_of(0)
    buffer = GradientBuffer(parameters, {SHARED}, lone_mesh())
    for _ in range(2):
        sum((p * 0.01).sum() for p in parameters.values()).backward()  # type: ignore[union-attr]
    buffer.reduce()
    assert torch.equal(buffer.flat, torch.full((15,), 0.02, dtype=torch.float64))
    assert (buffer.own.numel(), buffer.shared.numel()) == (11, 4)
    assert abs(float(buffer.square_sum()) - 15 * 0.02**2) <= TOLERANCE
    buffer.scale(torch.tensor(0.5))
    assert torch.equal(buffer.flat, torch.full((15,), 0.01, dtype=torch.float64))
    buffer.zero()
    assert not any(p.grad is None or p.grad.any() for p in parameters.values())


def test_a_stage_without_shared_parameters() -> None:
    buffer = GradientBuffer({"a": nn.Parameter(torch.ones(4))}, set(), lone_mesh())
    buffer.flat.fill_(2.0)
    assert buffer.shared.numel() == 0
    assert float(buffer.square_sum()) == 16.0


@pytest.mark.parametrize(
    ("sizes", "lengths"),
    [([], [0]), ([5], [1]), ([5, 5, 5], [2, 1]), ([9, 1, 30, 1, 1], [2, 1, 2]), ([10, 10], [1, 1]), ([1, 1, 7], [3])],
)
def test_buckets_take_consecutive_sizes_until_they_are_full(sizes: list[int], lengths: list[int]) -> None:
    assert bucket_lengths(sizes, 10) == lengths


def overlapped(rank: int, last: bool) -> tuple[int, list[Tensor], list[Tensor]]:
    """(sums that left before the backward ended, the reduced gradients, the expected ones)."""
    layers = nn.Sequential(*(nn.Linear(3, 3, dtype=torch.float64) for _ in range(4)))
    parameters = dict(layers.named_parameters())
    for number, parameter in enumerate(parameters.values()):
        parameter.data.normal_(generator=torch.Generator().manual_seed(number))
    batches = [
        torch.full((2, 3), 1.0 + index + 3 * of_rank, dtype=torch.float64) for of_rank in range(2) for index in (0, 1)
    ]
    expected = torch.autograd.grad(
        sum((layers(x).square().sum() for x in batches), torch.zeros(())), layers.parameters()
    )
    with mock.patch.object(data, "BUCKET_BYTES", 1):
        buffer = GradientBuffer(parameters, set(), build_mesh(ParallelDims(1, 2, 1), AXES, "cpu"))
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reductions:
        for index in (0, 1):
            if index and last:
                buffer.expect_last()
            layers(batches[2 * rank + index]).square().sum().backward()
        before = reductions.call_count
        buffer.reduce()
        assert reductions.call_count == len(parameters)
    return before, [p.grad.clone() for p in parameters.values() if p.grad is not None], list(expected)


@pytest.mark.ranks
@pytest.mark.parametrize("last", [True, False])
def test_gradients_leave_during_the_last_backward_and_only_then(last: bool) -> None:
    for before, got, expected in run_ranks(2, overlapped, last):
        assert before == (8 if last else 0)
        for mine, theirs in zip(got, expected, strict=True):
            assert float((mine - theirs).abs().max()) <= TOLERANCE * float(theirs.abs().max()) * 10
