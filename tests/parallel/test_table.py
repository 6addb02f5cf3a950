"""Touched rows of a table: summed by id, gathered over dp x cp, the same on every rank, and few bytes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megagraph_cli.layout.dims import AXES, ParallelDims
from megagraph_cli.parallel.mesh import build_mesh
from megagraph_cli.parallel.table import RowSum, TableGradient, TouchedRows, distinct_rows
from tests.ranks import run_ranks
from tests.runtime.small import one_rank

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
def test_distinct_rows_are_each_there_once_and_counted(count: int) -> None:
    ids = torch.randint(0, ROWS + 1, (count,), generator=torch.Generator().manual_seed(count))
    real = [row for row in range(ROWS) if row in ids.tolist()]
    distinct, number = distinct_rows(ids, ROWS)
    assert distinct.tolist() == real + [ROWS] * (min(count, ROWS) - len(real))
    assert number.tolist() == [len(real)]


def test_rows_are_added_to_those_of_their_ids_and_those_of_no_row_change_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    for held in ([1, 4, 9, ROWS], list(range(ROWS))):
        touched = TouchedRows(torch.tensor(held), torch.zeros(len(held), DIM, dtype=torch.float64))
        expected = torch.zeros(ROWS, DIM, dtype=torch.float64)
        for ids in ([9, 1], [ROWS, 4, ROWS], [], [1, 4, 9, ROWS]):
            rows = torch.randn(len(ids), DIM, generator=generator, dtype=torch.float64)
            rows[torch.tensor(ids, dtype=torch.int64) == ROWS] = 0
            touched.add(torch.tensor(ids, dtype=torch.int64), rows)
            expected += plain_sum(torch.tensor(ids), rows)
        assert float((plain_sum(touched.ids, touched.rows) - expected).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("length", [1, 2, 5])
def test_rows_of_several_ranks_are_added_up_piece_by_piece(length: int) -> None:
    """Three ranks touch up to five rows, the last two of them fewer."""
    ids = torch.tensor([[1, 4, 6, 9, 10], [0, 4, 9, ROWS, ROWS], [7, ROWS, ROWS, ROWS, ROWS]])
    rows = torch.randn(3, 5, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[ids == ROWS] = 0
    expected = plain_sum(ids.view(-1), rows.view(-1, DIM))
    total = RowSum(ids.clone(), torch.zeros(ROWS, DIM, dtype=torch.float64), 5)
    for first in range(0, 5, length):
        total.add(first, rows[:, first : first + length])
    touched = total.touched
    assert touched.ids[touched.ids < ROWS].tolist() == [0, 1, 4, 6, 7, 9, 10]
    assert float((plain_sum(touched.ids, touched.rows) - expected).abs().max()) <= TOLERANCE


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


def test_a_table_that_nobody_needs_is_gone() -> None:
    table = nn.Parameter(torch.zeros(ROWS, DIM))
    with one_rank():
        gradient = TableGradient(table, build_mesh(ParallelDims(1, 1, 1), AXES, "cpu"))
    left = weakref.ref(table)
    del table, gradient
    gc.collect()
    assert left() is None


def test_one_rank_gathers_nothing_and_holds_the_touched_rows_alone() -> None:
    with one_rank():
        dense, ids, square, held_bytes = reduced(0, ParallelDims(1, 1, 1))
    whole = expected(range(1))
    assert ids.tolist() == [1, 4, 9, 10]
    assert held_bytes == 4 * DIM * 8
    assert float((dense - whole).abs().max()) <= TOLERANCE
    assert abs(square - float(whole.square().sum())) <= TOLERANCE * 10
