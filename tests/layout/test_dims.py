"""Ranks laid over a mesh, and every way to factor a number of workers."""

from __future__ import annotations

import itertools

import pytest

from megagraph_cli.layout.dims import AXES, ParallelDims, Place, factorisations


@pytest.mark.parametrize("order", list(itertools.permutations(AXES)))
def test_places_number_the_mesh_row_major(order: tuple[str, ...]) -> None:
    dims = ParallelDims(pp=2, dp=3, cp=4)
    coordinates = itertools.product(*(range(dims.degree(axis)) for axis in order))
    expected = [Place(**dict(zip(order, each, strict=True))) for each in coordinates]
    assert [dims.place(rank, order) for rank in range(dims.size)] == expected


def test_cp_is_innermost_by_default() -> None:
    dims = ParallelDims(pp=2, dp=1, cp=2)
    assert [str(dims.place(rank)) for rank in (0, 1, 2)] == ["pp=0 dp=0 cp=0", "pp=0 dp=0 cp=1", "pp=1 dp=0 cp=0"]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 12, 17])
def test_factorisations_are_all_and_each_once(size: int) -> None:
    brute = [(pp, dp, cp) for pp, dp, cp in itertools.product(range(1, size + 1), repeat=3) if pp * dp * cp == size]
    assert [(dims.pp, dims.dp, dims.cp) for dims in factorisations(size)] == brute
