"""Layer splits: how many there are, and the best of one setting without going through them.

A split gives each of pp stages at least one layer. Proofs stand in docs/cost-model.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.cost.arrays import Array
from megagraph_cli.cost.setting import StageTables

Split = tuple[int, ...]
Caps = Sequence[int]


@dataclass(frozen=True)
class Choice:
    """A split with its step time and peak bytes."""

    step_s: float
    peak_bytes: int
    split: Split


def count_splits(num_layers: int, pp: int) -> int:
    """Splits of ``num_layers`` on ``pp`` stages: C(L - 1, pp - 1)."""
    return math.comb(num_layers - 1, pp - 1) if 1 <= pp <= num_layers else 0


def caps_within(tables: StageTables, need_bytes: int) -> list[int]:
    """Most layers each stage can hold within ``need_bytes`` (peak and margin); 0 where even one is too many."""
    caps: dict[int, int] = {}
    for need in tables.need_bytes:
        if id(need) not in caps:
            caps[id(need)] = int(np.searchsorted(need, need_bytes, side="right"))
    return [caps[id(need)] for need in tables.need_bytes]


def fits(caps: Caps, num_layers: int) -> bool:
    """Whether some split stays within the caps."""
    return min(caps) >= 1 and sum(caps) >= num_layers


def count_within(caps: Caps, num_layers: int) -> int:
    """Exact number of splits within the caps, by dynamic programming over stages."""
    pp = len(caps)
    if not fits(caps, num_layers):
        return 0
    if min(caps) >= num_layers - pp + 1:
        return count_splits(num_layers, pp)
    # ways[m]: splits of m layers beyond the one that every stage has
    spare = num_layers - pp
    ways = [1] + [0] * spare
    for cap in caps:
        running = list(itertools.accumulate(ways))
        ways = [running[m] - (running[m - cap] if m >= cap else 0) for m in range(spare + 1)]
    return ways[spare]


def least_need(tables: StageTables) -> int:
    """Smallest ``need_bytes`` of the worst stage over all splits: the smallest limit that this setting fits in."""
    values = np.unique(np.concatenate(list({id(need): need for need in tables.need_bytes}.values())))
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if fits(caps_within(tables, int(values[middle])), tables.num_layers):
            high = middle
        else:
            low = middle + 1
    return int(values[low])


def first_split(caps: Caps, num_layers: int) -> Split:
    """The lexicographically first split within the caps."""
    left, room = num_layers, sum(caps)
    split = []
    for cap in caps:
        room -= cap
        held = max(1, left - room)
        split.append(held)
        left -= held
    return tuple(split)


def balanced(total: int, parts: int) -> Split:
    """``total`` layers on ``parts`` stages as evenly as can be, the larger ones last."""
    small, large = divmod(total, parts) if parts else (0, 0)
    return (small,) * (parts - large) + (small + 1,) * large


def gpipe_front(tables: StageTables) -> list[Choice]:
    """Every non-dominated (step time, peak bytes) of a GPipe setting over all splits, fastest first.

    What remains to be tried are the layers of the first and of the last stage, at most (L - pp + 1)^2 pairs, and how
    many of the stages between them, which are alike, hold more layers than the cache (docs/cost-model.md).
    """
    pp, count, width = tables.pp, tables.setting.num_microbatches, tables.width
    if pp == 1:
        only = width - 1
        time = count * (tables.forward_s[0][only] + tables.backward_s[0][only]) + tables.tail_s[0][only]
        return [Choice(max(float(time), tables.host_s), int(tables.peak_bytes[0][only]), (width,))]
    ends = _Ends.of(tables)
    most, passes = ends.most(), ends.passes(tables)
    stages = [(0, ends.first), (pp - 1, ends.last)]
    if pp > 2:
        assert tables.need_bytes[1] is tables.need_bytes[pp - 2], "GPipe's middle stages are alike"
        stages.append((1, most))

    def worst(table: Sequence[NDArray[Any]]) -> Array:
        return np.asarray(np.maximum.reduce([table[stage][layers - 1] for stage, layers in stages]), dtype=float)

    transfer_s = tables.transfer_s
    ways = np.maximum(worst(tables.forward_s), transfer_s) + np.maximum(worst(tables.backward_s), transfer_s)
    makespan = passes + 2 * (pp - 1) * transfer_s + (count - 1) * ways
    time = _trimmed(np.maximum(makespan + worst(tables.tail_s), tables.host_s))
    peak = worst(tables.peak_bytes)
    return [
        Choice(float(time[i]), int(peak[i]), ends.split(i))
        for i in non_dominated(time, np.asarray(peak, dtype=np.int64))
    ]


@dataclass(frozen=True)
class _Ends:
    """Splits worth a try: layers of the first and last stage, and of the ``stages`` between them.

    ``broken`` of these hold more than ``within`` layers each, as evenly as can be; the others hold ``within`` each, or
    all are even where none is broken.
    """

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    broken: NDArray[np.int64]
    middle: NDArray[np.int64]
    stages: int
    within: int

    @classmethod
    def of(cls, tables: StageTables) -> _Ends:
        pp, num_layers = tables.pp, tables.num_layers
        first, last = _end_layers(num_layers, pp)
        middle, stages = num_layers - first - last, pp - 2
        # Where even one layer is too many all stages are beyond alike, as if there were no break.
        within = min(tables.break_layers or num_layers, num_layers)
        least = np.minimum(1, np.maximum(middle - stages * within, 0))
        most = np.clip(middle - stages * within, 0, stages)
        repeats = most - least + 1
        # Every number of broken stages from the least to the most, for each pair in turn.
        starts = np.repeat(np.cumsum(repeats) - repeats, repeats)
        broken = np.arange(int(repeats.sum())) - starts + np.repeat(least, repeats)
        fill = [np.repeat(each, repeats) for each in (first, last, middle)]
        return cls(fill[0], fill[1], broken, fill[2], stages, within)

    @property
    def _beyond(self) -> NDArray[np.int64]:
        """Layers on the broken stages."""
        return self.middle - (self.stages - self.broken) * self.within

    def most(self) -> NDArray[np.int64]:
        """Layers of the fullest of the middle stages."""
        even = -(-self.middle // max(self.stages, 1))
        return np.where(self.broken > 0, -(-self._beyond // np.maximum(self.broken, 1)), even)

    def passes(self, tables: StageTables) -> Array:
        """Forward and backward of one micro-batch through all stages."""
        both = [forward + backward for forward, backward in zip(tables.forward_s, tables.backward_s, strict=True)]
        total = both[0][self.first - 1] + both[-1][self.last - 1]
        if not self.stages:
            return np.asarray(total, dtype=float)
        table = np.append(both[1], both[1][-1])
        spread = np.where(self.broken > 0, self.broken, self.stages)
        small, large = np.divmod(np.where(self.broken > 0, self._beyond, self.middle), spread)
        total = total + (spread - large) * table[small - 1] + large * table[small]
        unbroken = np.where(self.broken > 0, self.stages - self.broken, 0)
        return np.asarray(total + unbroken * table[min(self.within, len(table)) - 1], dtype=float)

    def split(self, index: int) -> Split:
        first, last, broken = int(self.first[index]), int(self.last[index]), int(self.broken[index])
        if broken:
            full = balanced(int(self._beyond[index]), broken)
            return (first, *(self.within,) * (self.stages - broken), *full, last)
        return (first, *balanced(int(self.middle[index]), self.stages), last)


def _trimmed(time: Array) -> Array:
    """Times without their last digits, where only the order of summation speaks: equal plans compare equal."""
    scale = 10.0 ** (12 - math.ceil(math.log10(float(time.max()))))
    return np.asarray(np.round(time * scale) / scale, dtype=float)


def _end_layers(num_layers: int, pp: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """All pairs (layers of the first stage, of the last) that leave each middle stage at least one."""
    width = num_layers - pp + 1
    first = np.arange(1, width + 1)
    if pp == 2:
        return first, num_layers - first
    pairs = np.argwhere(first[:, None] + first[None, :] <= width + 1) + 1
    return pairs[:, 0], pairs[:, 1]


def non_dominated(time: Array, peak: NDArray[np.int64]) -> list[int]:
    """Indices of the points that no other undercuts in time or bytes without exceeding it in the other, by time."""
    order = np.lexsort((peak, time))
    best = np.minimum.accumulate(peak[order])
    keep = np.concatenate([[True], peak[order][1:] < best[:-1]])
    return [int(i) for i in order[keep]]
