"""Products of rows of bytes: exactly the integers' sum, however often a kernel asks for one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.bytedot import byte_dot


@njit
def _products(flat: NDArray[np.int8], width: int, row: int, rows: int) -> Any:
    found = np.empty(rows, dtype=np.int64)
    for other in range(rows):
        found[other] = byte_dot(flat, row * width, other * width, width)
    return found


@pytest.mark.parametrize("width", [16, 64, 128, 192])
def test_products_are_the_integers_sums_without_the_last_eight_bytes(width: int) -> None:
    code = np.random.default_rng(width).integers(-128, 128, (50, width)).astype(np.int8)
    code[0], code[1] = -128, 127
    expected = code[:, :-8].astype(np.int64) @ code[:, :-8].astype(np.int64).T
    for row in range(3):
        assert np.array_equal(_products(code.reshape(-1), width, row, 50), expected[row])
