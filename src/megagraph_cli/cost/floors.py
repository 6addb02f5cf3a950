"""Bytes that a module needs while it runs: the larger of two moments, fitted as such.

One moment grows with the micro-batch. In the other, gradients of the weights stand side by side before they are
added up while what the forward had saved is already going: it does not grow with the micro-batch, it even shrinks.
Small micro-batches show the one, large ones the other; a single line through both would be wrong for all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megagraph_cli.cost.arrays import Array, Regressors
from megagraph_cli.cost.regression import Design, fit_coefficients
from megagraph_cli.cost.size import Size

FLOORS = {"forward_transient_bytes": "forward_floor_bytes", "backward_transient_bytes": "backward_floor_bytes"}
"""The second moment of a quantity: constant bytes less some for each row."""
WORTH = 0.7
"""Two moments must bring the squared residuals down to this share, else one explains as much."""
Terms = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Sample:
    """Measured bytes of one module at one size; its regressors' names share the module's prefix."""

    regressors: Regressors
    size: Size
    value: float

    @property
    def prefix(self) -> str:
        return next(iter(self.regressors)).split(".")[0]


def with_floor(terms: Terms, quantity: str, prefix: str, size: Size, value: Any) -> Any:
    """The larger of a quantity's growing moment, ``value``, and of its other one."""
    found = terms.get(FLOORS.get(quantity, ""), {})
    if f"{prefix}.call" not in found:
        return value
    return np.maximum(value, found[f"{prefix}.call"] - found[f"{prefix}.less_rows"] * size.tokens)


def fit_moments(samples: Sequence[Sample]) -> tuple[dict[str, float], dict[str, float]]:
    """(coefficients of the growing moment, of the other one where a module shows it) of one quantity."""
    growing: dict[str, float] = {}
    floors: dict[str, float] = {}
    for prefix in sorted({sample.prefix for sample in samples}):
        mine = [sample for sample in samples if sample.prefix == prefix]
        one, other = _fit_module(mine)
        growing |= one
        floors |= {f"{prefix}.{name}": value for name, value in other.items()}
    return growing, floors


def _fit_module(samples: Sequence[Sample]) -> tuple[dict[str, float], dict[str, float]]:
    """One module: which samples show which moment is found by trying every number of rows between them."""
    single = fit_coefficients([sample.regressors for sample in samples], [sample.value for sample in samples])
    least = _squares(samples, single, {}) * WORTH
    best: tuple[dict[str, float], dict[str, float]] = (single, {})
    rows = sorted({sample.size.tokens for sample in samples})
    for most in rows[:-1]:
        small = [sample for sample in samples if sample.size.tokens <= most]
        large = [sample for sample in samples if sample.size.tokens > most]
        if len(large) < 2:
            continue
        grown = fit_coefficients([sample.regressors for sample in large], [sample.value for sample in large])
        other = _fit_floor(small)
        squares = _squares(samples, grown, other)
        if squares < least:
            least, best = squares, (grown, other)
    return best


def _fit_floor(samples: Sequence[Sample]) -> dict[str, float]:
    falling = [{"call": 1.0, "less_rows": -float(sample.size.tokens)} for sample in samples]
    found, _ = Design(falling, [sample.value for sample in samples]).solve()
    return {name: float(f"{value:.12g}") for name, value in zip(("call", "less_rows"), found, strict=True)}


def _squares(samples: Sequence[Sample], grown: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Squared relative residuals under the larger of two moments."""
    values: Array = np.array([sample.value for sample in samples])
    guesses = [sum(grown.get(name, 0.0) * value for name, value in sample.regressors.items()) for sample in samples]
    if other:
        floors = [other["call"] - other["less_rows"] * sample.size.tokens for sample in samples]
        guesses = np.maximum(guesses, floors).tolist()
    scale = np.maximum(values, np.median(values) * 1e-3 if np.any(values > 0) else 1.0)
    return float((((np.array(guesses) - values) / scale) ** 2).sum())
