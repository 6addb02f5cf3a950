"""How well predictions agree with measurements."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megagraph_cli.artifacts.cost_model import Quality
from megagraph_cli.cost.arrays import Array


def mape(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Mean absolute error as a fraction of the measured."""
    truth, guess = np.array(measured, dtype=float), np.array(predicted, dtype=float)
    return float(np.mean(np.abs(truth - guess) / truth))


def r_squared(measured: Sequence[float], predicted: Sequence[float]) -> float | None:
    """Share of the variance that is explained; None where nothing varies."""
    truth, guess = np.array(measured, dtype=float), np.array(predicted, dtype=float)
    spread = float(((truth - truth.mean()) ** 2).sum())
    return 1.0 - float(((truth - guess) ** 2).sum()) / spread if spread > 0 else None


def max_under(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Worst shortfall of a prediction as a fraction of the measured; 0 where none falls short."""
    truth, guess = np.array(measured, dtype=float), np.array(predicted, dtype=float)
    return max(0.0, float(np.max((truth - guess) / truth)))


def spearman(measured: Sequence[float], predicted: Sequence[float]) -> float | None:
    """Correlation of ranks, equal values sharing their mean rank; None where either has no order."""
    first, second = _ranks(measured), _ranks(predicted)
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Sequence[float]) -> Array:
    _, place, counts = np.unique(np.array(values, dtype=float), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray(((ends - counts + ends - 1) / 2)[place], dtype=float)


def short(value: float) -> float:
    """Six digits: more would be noise in an artifact."""
    return float(f"{value:.6g}")


def quality(measured: Sequence[float], predicted: Sequence[float], num_fit: int) -> Quality:
    """Agreement on what was held out, ``num_fit`` others having been fitted; nulls where nothing above 0 was."""
    pairs = [(truth, guess) for truth, guess in zip(measured, predicted, strict=True) if truth > 0]
    if not pairs:
        return Quality(mape=None, r2=None, max_under=None, num_fit=num_fit, num_held_out=0)
    truth, guess = zip(*pairs, strict=True)
    r2 = r_squared(truth, guess)
    return Quality(
        mape=short(mape(truth, guess)),
        r2=None if r2 is None else short(r2),
        max_under=short(max_under(truth, guess)),
        num_fit=num_fit,
        num_held_out=len(pairs),
    )
