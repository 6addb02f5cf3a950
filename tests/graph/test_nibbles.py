"""Coded rows of features: digits and their products are exactly the integers', however often a kernel asks for one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.nibbles import (
    LARGEST_CODE,
    OFFSET,
    digits_dot,
    plane_bytes,
    read_codes,
    write_digits,
)

COLUMNS = [1, 7, 32, 39, 100, 129, 192, 300]


@njit
def _products(flat: NDArray[np.uint8], width: int, columns: int, row: int, rows: int) -> Any:
    plane = plane_bytes(columns)
    codes = np.zeros(3 + 2 * plane, dtype=np.int8)
    total = OFFSET * read_codes(flat, row * width, codes, 3, columns, plane)
    found = np.empty((rows, 2), dtype=np.int64)
    for other in range(rows):
        found[other, 0] = digits_dot(flat, other * width, codes, 3, plane) - total
        found[other, 1] = digits_dot(flat, other * width + plane, codes, 3, plane) - total
    return found


def _rows(columns: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Codes [50, columns] and their planes, with bytes of any kind where the tail and padding are."""
    rng = np.random.default_rng(columns)
    codes = rng.integers(-LARGEST_CODE, LARGEST_CODE + 1, (50, columns))
    codes[0], codes[1] = -LARGEST_CODE, LARGEST_CODE
    planes = rng.integers(0, 256, (50, 2 * plane_bytes(columns))).astype(np.uint8)
    for row, of_row in zip(planes, codes, strict=True):
        write_digits(of_row, row)
    return codes, planes


@pytest.mark.parametrize("columns", COLUMNS)
def test_products_of_the_planes_are_the_integers_sums(columns: int) -> None:
    codes, planes = _rows(columns)
    high = (codes + 8) // 16
    low = codes - 16 * high
    assert high.min() >= -8
    assert high.max() <= 7
    for row in range(3):
        expected = np.stack([high @ codes[row], low @ codes[row]], axis=1)
        np.testing.assert_array_equal(
            _products(planes.reshape(-1), planes.shape[1], columns, row, 50), expected, err_msg=f"row {row}"
        )


@njit
def _read(flat: NDArray[np.uint8], place: int, columns: int, codes: NDArray[np.int8]) -> int:
    return int(read_codes(flat, place, codes, 1, columns, plane_bytes(columns)))


@pytest.mark.parametrize("columns", COLUMNS)
def test_codes_are_read_as_they_were_written(columns: int) -> None:
    codes, planes = _rows(columns)
    plane, half = plane_bytes(columns), (columns + 1) // 2
    found = np.empty(2 * plane + 2, dtype=np.int8)
    for row in range(50):
        found[:] = 77
        assert _read(planes.reshape(-1), row * planes.shape[1], columns, found) == codes[row].sum()
        assert found[0] == found[-1] == 77
        # Blocks of 64 bytes of a plane, then of 16: the codes of a block's lower halves, those of its upper halves.
        wide = plane // 64 * 64
        blocks = [(at, 64) for at in range(0, wide, 64)] + [(at, 16) for at in range(wide, plane, 16)]
        first, second = (
            np.concatenate([found[1 + 2 * at + side * size :][:size] for at, size in blocks]) for side in (0, 1)
        )
        np.testing.assert_array_equal(np.concatenate((first[:half], second[: columns - half])), codes[row])
        assert not first[half:].any()
        assert not second[columns - half :].any()
