"""The cache break: layers of a stage take longer once all that it holds no longer fits into the cache.

The paper's gamma (``cache_penalty``) and l_break (``cache_break_layers``): every layer of a stage with more than
l_break = c_break / (b x d) layers takes gamma times as long. What c_break counts (layers, or the sequences or rows that
they hold) is found from the data, as are both values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from megagraph_cli.cost.arrays import Regressors
from megagraph_cli.cost.regression import Design
from megagraph_cli.cost.size import Size
from megagraph_cli.cost.terms import layer_own_names

UNITS: dict[str, Callable[[Size], int]] = {
    "sequences": lambda size: size.microbatch,
    "rows": lambda size: size.tokens,
    "layers": lambda size: 1,  # noqa: ARG005
}
"""What a layer of a stage holds, by the ways of counting it."""
TRIAL_PENALTIES = (1.2, 1.7, 2.6)
MOST_PENALTY = 8.0
MOST_TRIALS = 12
"""Thresholds tried at first, spread over all; then their neighbours."""
LEAST_PENALTY = 1.03
CLOSE = 2e-3
"""Layer samples that are met to this share, in the root mean square, leave nothing to explain."""
WORTH = 0.75
"""A break must bring the squared residuals down to this share, else it is noise that it explains."""


@dataclass(frozen=True)
class CacheBreak:
    """Layers take ``penalty`` times as long where the layers of a stage hold more than ``most`` of a unit together."""

    penalty: float
    unit: str
    most: float

    def factor(self, size: Size) -> Any:
        """By how much a layer's own work takes longer; an array where ``size.layers`` is one."""
        held = np.asarray(size.layers) * UNITS[self.unit](size)
        return np.where(held > self.most, self.penalty, 1.0)

    def applied(self, regressors: Regressors, size: Size) -> Regressors:
        """Regressors of a sample or a part, the layers' own ones scaled."""
        factor = self.factor(size)
        own = layer_own_names(size)
        return {name: value * factor if name in own else value for name, value in regressors.items()}

    def break_layers(self, size: Size) -> int:
        """Most layers that a stage can hold at this size before they slow down (0: not even one)."""
        return int(self.most // UNITS[self.unit](size))

    def terms(self, reference: Size) -> dict[str, float]:
        """As it stands in cost_model.json; ``cache_break_layers`` at the micro-batch of ``reference``."""
        return {
            "cache_penalty": float(f"{self.penalty:.12g}"),
            f"break_{self.unit}": float(self.most),
            "cache_break_layers": float(self.most / UNITS[self.unit](reference)),
        }

    @classmethod
    def of(cls, terms: Mapping[str, Mapping[str, float]]) -> CacheBreak | None:
        """The break of a cost model; None where the profile saw none."""
        found = terms.get("cache")
        if found is None:
            return None
        unit = next(unit for unit in UNITS if f"break_{unit}" in found)
        return cls(found["cache_penalty"], unit, found[f"break_{unit}"])


@dataclass(frozen=True)
class LayerSamples:
    """All samples of one time quantity, with what a break would change in their regressors."""

    design: Design
    sizes: Sequence[Size]
    is_layer: NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Sequence[Regressors], values: Sequence[float], sizes: Sequence[Size]) -> LayerSamples:
        """``sizes`` with no middle layer are those of other modules, which no break touches."""
        return cls(Design(rows, values), sizes, np.array([bool(size.layers) for size in sizes]))

    def squares(self, found: CacheBreak | None) -> float:
        """Squared relative residuals of the layer samples when all samples are fitted under a break, or none."""
        factors = None
        if found is not None:
            own = np.array([name in self._own_names for name in self.design.names])
            slow = np.array([float(found.factor(size)) for size in self.sizes])
            factors = np.where(own[None, :], slow[:, None], 1.0)
        _, residuals = self.design.solve(factors)
        return float((residuals[self.is_layer] ** 2).sum())

    @cached_property
    def _own_names(self) -> frozenset[str]:
        return frozenset[str]().union(*(layer_own_names(size) for size in self.sizes))


Judge = Callable[[CacheBreak | None], float]
"""Squared relative residuals of all layer samples when fitted under a break, or under none."""


def find_break(sizes: Sequence[Size], judge: Judge) -> CacheBreak | None:
    """The break that explains the layer samples of these sizes best; None where none is worth it."""
    plain = judge(None)
    if plain <= len(sizes) * CLOSE**2:
        return None
    best: tuple[float, CacheBreak] | None = None
    for unit, count in UNITS.items():
        # A threshold between two measured loads cannot be told from the lower one.
        loads = sorted({float(size.layers * count(size)) for size in sizes})[:-1]
        tried: dict[int, tuple[float, CacheBreak]] = {}

        def trial(
            index: int,
            unit: str = unit,
            loads: list[float] = loads,
            tried: dict[int, tuple[float, CacheBreak]] = tried,
        ) -> None:
            if 0 <= index < len(loads) and index not in tried:
                trials = [CacheBreak(penalty, unit, loads[index]) for penalty in TRIAL_PENALTIES]
                tried[index] = min(((judge(each), each) for each in trials), key=lambda pair: pair[0])

        for index in range(0, len(loads), max(1, len(loads) // MOST_TRIALS)):
            trial(index)
        stride = max(1, len(loads) // MOST_TRIALS) // 2
        while tried and stride:
            centre = min(tried, key=lambda index: tried[index][0])
            trial(centre - stride)
            trial(centre + stride)
            stride //= 2
        for residual, found in sorted(tried.values(), key=lambda pair: pair[0])[:2]:
            if residual < plain:
                refined = _refined(found, judge)
                if best is None or refined[0] < best[0] * (1 - 1e-9):
                    best = refined
    if best is None or best[0] > plain * WORTH or best[1].penalty < LEAST_PENALTY:
        return None
    return best[1]


def _refined(found: CacheBreak, judge: Judge) -> tuple[float, CacheBreak]:
    """The penalty that leaves the least residual at the threshold found."""

    def residual(penalty: float) -> float:
        return judge(CacheBreak(penalty, found.unit, found.most))

    solved = minimize_scalar(residual, bounds=(1.0, MOST_PENALTY), method="bounded", options={"xatol": 1e-5})
    return float(solved.fun), CacheBreak(float(solved.x), found.unit, found.most)
