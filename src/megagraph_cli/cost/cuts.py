"""Linear programs that bound a pipeline's step time over a box of layer splits.

Times are affine in the layers, so the length of any path through the step's work is too, and the step time, the
largest of them, is convex. Every path met so far is a cut: the step takes at least its length. The least step time
under all cuts is a linear program; its multipliers combine the cuts into one linear function, whose minimum over the
box is worked out here without the solver's tolerances (docs/cost-model.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from megagraph_cli.cost.partition import Split
from megagraph_cli.cost.predict import StageTables
from megagraph_cli.cost.simulate import critical_counts
from megagraph_cli.cost.terms import Array

MOST_ROUNDS = 25
CLOSE = 1e-10


@dataclass(frozen=True, order=True)
class Box:
    """Splits whose stage s holds between ``low[s]`` and ``high[s]`` layers."""

    low: Split
    high: Split

    def tightened(self, num_layers: int) -> Box | None:
        """The same splits of ``num_layers`` in the smallest box, or None where there are none."""
        low, high = self.low, self.high
        spare_low, spare_high = num_layers - sum(low), num_layers - sum(high)
        if spare_low < 0 or spare_high > 0 or any(a > b for a, b in zip(low, high, strict=True)):
            return None
        new_low = tuple(max(a, b + spare_high) for a, b in zip(low, high, strict=True))
        new_high = tuple(min(b, a + spare_low) for a, b in zip(low, high, strict=True))
        return Box(new_low, new_high)

    def cut_at(self, stage: int, layers: int) -> list[Box]:
        """The splits with at most ``layers`` on a stage, and those with more."""
        lower = (*self.high[:stage], layers, *self.high[stage + 1 :])
        upper = (*self.low[:stage], layers + 1, *self.low[stage + 1 :])
        return [Box(self.low, lower), Box(upper, self.high)]


@dataclass(frozen=True)
class Relaxed:
    """A lower bound of the step time over a box, and the fractional layers that the bound was found at."""

    bound_s: float
    point: Array

    def rounded(self, box: Box) -> Split:
        """A split in the box near the point: the largest fractions are rounded up."""
        split = [max(low, math.floor(value + CLOSE)) for value, low in zip(self.point, box.low, strict=True)]
        left = round(float(self.point.sum())) - sum(split)
        by_fraction = sorted(range(len(split)), key=lambda stage: (split[stage] - self.point[stage], stage))
        while left > 0:
            for stage in by_fraction:
                if left and split[stage] < box.high[stage]:
                    split[stage] += 1
                    left -= 1
        return tuple(split)

    def branches(self, box: Box) -> list[Box]:
        """The box cut in two at the most fractional stage, else at the widest; none where it holds one split."""
        fraction = np.abs(self.point - np.round(self.point))
        stage = int(np.argmax(fraction))
        if fraction[stage] > CLOSE and box.low[stage] < box.high[stage]:
            return box.cut_at(stage, min(math.floor(self.point[stage]), box.high[stage] - 1))
        stage = max(range(len(box.low)), key=lambda s: box.high[s] - box.low[s])
        if box.low[stage] == box.high[stage]:
            return []
        return box.cut_at(stage, (box.low[stage] + box.high[stage]) // 2)


class Cuts:
    """Paths of one 1F1B setting, as linear functions of the layers of each stage."""

    def __init__(self, tables: StageTables, stage_bounds: Sequence[Array]) -> None:
        self._tables = tables
        self.num_programs = 0
        self._constants: list[float] = []
        self._weights: list[Array] = []
        costs = (tables.forward_s, tables.backward_s, tables.tail_s)
        # Entry n - 1 is n layers: (time without a layer, time of a layer) of each stage.
        self._forward, self._backward, self._tail = (_affine(cost) for cost in costs)
        for stage, bound in enumerate(stage_bounds):
            if tables.width > 1:
                slopes = np.zeros(tables.pp)
                # A bound of one stage is the larger of two lines of one origin, hence convex: its chord is no bound,
                # the line through its first two entries is.
                slopes[stage] = float(bound[1] - bound[0])
                self._add(float(bound[0]) - slopes[stage], slopes)

    def _add(self, constant: float, weights: Array) -> None:
        self._constants.append(constant)
        self._weights.append(weights)

    def relax(self, box: Box, enough_s: float) -> Relaxed:
        """Cut until the bound meets the step time at its own point, passes ``enough_s``, or gains no more."""
        best = Relaxed(0.0, np.array(box.low, dtype=float))
        for _ in range(MOST_ROUNDS):
            point, multipliers = self._solve(box)
            bound_s = self._safe_bound(box, multipliers)
            if bound_s > best.bound_s:
                best = Relaxed(bound_s, point)
            if best.bound_s >= enough_s or not self._violated(point, bound_s):
                break
        return best

    def _solve(self, box: Box) -> tuple[Array, Array]:
        """The linear program: layers (fractional) that minimise the largest cut, and the cuts' multipliers."""
        pp = self._tables.pp
        self.num_programs += 1
        constants, weights = np.array(self._constants), np.array(self._weights)
        scale = float(np.abs(constants).max()) or 1.0
        columns = np.hstack([weights, -np.ones((len(weights), 1)) * scale])
        solved = linprog(
            c=np.append(np.zeros(pp), 1.0),
            A_ub=columns / scale,
            b_ub=-constants / scale,
            A_eq=np.append(np.ones(pp), 0.0)[None, :],
            b_eq=[self._tables.num_layers],
            bounds=[*zip(box.low, box.high, strict=True), (None, None)],
            method="highs",
        )
        assert solved.status == 0, f"the bound's linear program failed: {solved.message}"
        multipliers = np.maximum(-np.asarray(solved.ineqlin.marginals, dtype=float), 0.0)
        return np.asarray(solved.x[:pp], dtype=float), multipliers / multipliers.sum()

    def _safe_bound(self, box: Box, multipliers: Array) -> float:
        """Least value over the box of the combined cuts: layers go where a layer costs least."""
        constant = float(multipliers @ np.array(self._constants))
        weights = multipliers @ np.array(self._weights)
        total = constant + float(weights @ np.array(box.low, dtype=float))
        left = self._tables.num_layers - sum(box.low)
        for stage in np.argsort(weights, kind="stable"):
            added = min(left, box.high[stage] - box.low[stage])
            total += float(weights[stage]) * added
            left -= added
        return total

    def _violated(self, point: Array, bound_s: float) -> bool:
        """Add the longest path at a point where it exceeds the bound."""
        forward = self._forward[0] + point * self._forward[1]
        backward = self._backward[0] + point * self._backward[1]
        tail = self._tail[0] + point * self._tail[1]
        counts = critical_counts(forward.tolist(), backward.tolist(), self._tables.setting.num_microbatches, "1f1b")
        ahead, back = (np.array(part, dtype=float) for part in np.split(np.array(counts), 2))
        slowest = np.zeros(self._tables.pp)
        slowest[int(np.argmax(tail))] = 1.0
        constant = float(ahead @ self._forward[0] + back @ self._backward[0] + slowest @ self._tail[0])
        weights = ahead * self._forward[1] + back * self._backward[1] + slowest * self._tail[1]
        if constant + float(weights @ point) <= bound_s * (1 + CLOSE):
            return False
        self._add(constant, weights)
        return True


def _affine(cost: Sequence[Array]) -> tuple[Array, Array]:
    """(time without a layer, time of a layer) for each stage of a table."""
    slope = np.array([float(values[1] - values[0]) if len(values) > 1 else 0.0 for values in cost])
    return np.array([float(values[0]) for values in cost]) - slope, slope
