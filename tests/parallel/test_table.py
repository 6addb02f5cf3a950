"""Touched rows of a table: summed by id, gathered over dp x cp, the same on every rank, and few bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from megagraph_cli.layout.dims import AXES, ParallelDims
from megagraph_cli.parallel.mesh import build_mesh
from megagraph_cli.parallel.table import TableGradient, count_distinct, sum_by_row
from tests.ranks import run_ranks

ROWS, DIM = 11, 3
# float64: sums of at most six numbers of size one.
TOLERANCE = 1e-14

LOOKUPS = {0: [[1, 4, 9], [4, 10]], 1: [[0, 4], [4, 9, 10, 2, 3]], 2: [[], [7]]}
"""Rows that each rank looks up in its two micro-batches."""


def plain_sum(ids: Tensor, rows: Tensor) -> Tensor:
    whole = torch.zeros(ROWS, DIM, dtype=rows.dtype)
    for id_, row in zip(ids.tolist(), rows, strict=True):
        if id_ < ROWS:
            whole[id_] += row
    return whole


@pytest.mark.parametrize("count", [0, 1, 2, 7, 40])
def test_rows_of_equal_id_are_added_up(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(0, ROWS + 1, (count,), generator=generator)
    rows = torch.randn(count, DIM, generator=generator, dtype=torch.float64)
    rows[ids == ROWS] = 0
    distinct = ids.unique()
    real = distinct[distinct < ROWS]
    assert int(count_distinct(ids)) == distinct.numel()
    for size in {real.numel(), distinct.numel(), ROWS, 50}:
        touched = sum_by_row(ids, rows, ROWS, size)
        assert touched.ids.shape == (size,)
        assert touched.rows.shape == (size, DIM)
        assert touched.ids[: real.numel()].tolist() == real.tolist()
        assert touched.ids[real.numel() :].tolist() == [ROWS] * (size - real.numel())
        assert not touched.rows[real.numel() :].any()
        assert float((plain_sum(touched.ids, touched.rows) - plain_sum(ids, rows)).abs().max()) <= TOLERANCE


def weight(rank: int, microbatch: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + microbatch)
    return torch.randn(count, DIM, generator=generator, dtype=torch.float64)


def reduced(rank: int, dims: ParallelDims) -> tuple[Tensor, Tensor, float, int]:
    """(dense gradient, ids, this rank's square sum, bytes that hold the gradient)."""
    table = nn.Parameter(torch.zeros(ROWS, DIM, dtype=torch.float64))
    gradient = TableGradient(table, build_mesh(dims, AXES, "cpu"))
    lookups = [torch.tensor(ids, dtype=torch.int64) for ids in LOOKUPS[rank]]
    gradient.begin(lookups)
    for microbatch, ids in enumerate(lookups):
        out = functional.embedding(ids, table, sparse=True)
        (out * weight(rank, microbatch, ids.numel())).sum().backward()  # type: ignore[no-untyped-call]
    gradient.reduce()
    assert table.grad is None
    assert gradient.touched is not None
    square = float(gradient.square_sum())
    touched_bytes = gradient.touched.rows.nbytes
    gradient.scale(torch.tensor(0.5))
    return gradient.dense() * 2, gradient.touched.ids, square, touched_bytes


def expected(ranks: range) -> Tensor:
    parts = [
        plain_sum(torch.tensor(ids, dtype=torch.int64), weight(rank, microbatch, len(ids)))
        for rank in ranks
        for microbatch, ids in enumerate(LOOKUPS[rank])
    ]
    return torch.stack(parts).sum(dim=0)


@pytest.mark.ranks
@pytest.mark.parametrize("dims", [ParallelDims(1, 2, 1), ParallelDims(1, 1, 2), ParallelDims(1, 3, 1)], ids=str)
def test_every_rank_has_the_sum_of_all_to_the_last_bit(dims: ParallelDims) -> None:
    by_rank = run_ranks(dims.size, reduced, dims)
    whole = expected(range(dims.size))
    for rank, (dense, ids, square, _) in enumerate(by_rank):
        assert torch.equal(dense, by_rank[0][0])
        assert float((dense - whole).abs().max()) <= TOLERANCE
        assert ids[ids < ROWS].tolist() == whole.abs().sum(dim=1).nonzero().flatten().tolist()
        assert abs(square - (0.0 if rank else float(whole.square().sum()))) <= TOLERANCE * 100


def test_one_rank_gathers_nothing_and_holds_the_touched_rows_alone() -> None:
    dims = ParallelDims(1, 1, 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dense, ids, square, held_bytes = reduced(0, dims)
    finally:
        dist.destroy_process_group()
    whole = expected(range(1))
    assert ids.tolist() == [1, 4, 9, 10]
    assert held_bytes == 4 * DIM * 8
    assert float((dense - whole).abs().max()) <= TOLERANCE
    assert abs(square - float(whole.square().sum())) <= TOLERANCE * 10
