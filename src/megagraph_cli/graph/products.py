"""Products of two nodes' feature rows, for compiled kernels. ``g`` is a sampler.SamplingArrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.half import half_value


@njit(nogil=True, cache=True)
def agreement(g: Any, a: int, b: int) -> float:
    """Cosine of two signed sparse rows over the cosine of their absolute values; norms cancel."""
    left, right = g.feature_indptr[a], g.feature_indptr[b]
    dot, absolute = 0.0, 0.0
    while left < g.feature_indptr[a + 1] and right < g.feature_indptr[b + 1]:
        if g.feature_indices[left] < g.feature_indices[right]:
            left += 1
        elif g.feature_indices[left] > g.feature_indices[right]:
            right += 1
        else:
            if g.feature_half_data.shape[0] > 0:
                product = half_value(g.feature_half_data[left]) * half_value(g.feature_half_data[right])
            else:
                product = np.float64(g.feature_data[left]) * np.float64(g.feature_data[right])
            dot += product
            absolute += abs(product)
            left += 1
            right += 1
    return dot / absolute if absolute > 0.0 else 0.0


@njit(nogil=True, cache=True)
def dense_dot(x: NDArray[np.float32], half: NDArray[np.uint16], a: int, b: int) -> float:
    """Product of two dense rows, which are in ``half`` where that has any."""
    if half.shape[0] > 0:
        total = 0.0
        for column in range(half.shape[1]):
            total += half_value(half[a, column]) * half_value(half[b, column])
        return total
    # Four sums keep the adder busy; the order is written out, so every machine gets the same value.
    s0, s1, s2, s3 = 0.0, 0.0, 0.0, 0.0
    whole = x.shape[1] // 4 * 4
    for column in range(0, whole, 4):
        s0 += np.float64(x[a, column]) * np.float64(x[b, column])
        s1 += np.float64(x[a, column + 1]) * np.float64(x[b, column + 1])
        s2 += np.float64(x[a, column + 2]) * np.float64(x[b, column + 2])
        s3 += np.float64(x[a, column + 3]) * np.float64(x[b, column + 3])
    for column in range(whole, x.shape[1]):
        s0 += np.float64(x[a, column]) * np.float64(x[b, column])
    return (s0 + s1) + (s2 + s3)
