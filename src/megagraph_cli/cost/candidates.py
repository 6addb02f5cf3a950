"""One setting of the search with its best splits, whatever the schedule: bounds first, exact answers when asked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from megagraph_cli.cost.one_f_one_b import TOLERANCE, OneFOneB
from megagraph_cli.cost.partition import (
    Choice,
    Split,
    caps_within,
    count_splits,
    count_within,
    gpipe_front,
    least_need,
)
from megagraph_cli.cost.setting import Setting, StageTables
from megagraph_cli.cost.simulate import simulate


class Candidate(Protocol):
    """What the search asks of a setting. ``need_bytes`` limits peak and margin of every stage."""

    @property
    def setting(self) -> Setting: ...

    @property
    def max_gap(self) -> float:
        """The most, as a fraction, by which an answer given so far may be beaten; 0 where all are proven."""

    def num_splits(self) -> int:
        """Plans of this setting."""

    def num_within(self, need_bytes: int) -> int:
        """Those within the limit."""

    def least_need(self) -> int:
        """The smallest limit that a plan of this setting fits in."""

    def need_of(self, split: Split) -> int:
        """Peak and margin of the worst stage under a split."""

    def quick_bound(self, need_bytes: int) -> float:
        """A lower bound of the step time within the limit; infinite where no plan fits."""

    def fastest(self, need_bytes: int, cutoff_s: float = math.inf) -> Choice | None:
        """The fastest plan within the limit, or None where none is faster than ``cutoff_s``."""

    def leanest(self, choice: Choice, need_bytes: int) -> Choice:
        """Among plans as fast as ``choice``, the one with the fewest bytes at its peak."""


@dataclass(frozen=True)
class _AnySplit:
    tables: StageTables

    @property
    def setting(self) -> Setting:
        return self.tables.setting

    @property
    def max_gap(self) -> float:
        return 0.0

    def num_splits(self) -> int:
        return count_splits(self.tables.num_layers, self.tables.pp)

    def num_within(self, need_bytes: int) -> int:
        return count_within(caps_within(self.tables, need_bytes), self.tables.num_layers)

    def least_need(self) -> int:
        return least_need(self.tables)

    def need_of(self, split: Split) -> int:
        return _need_of(self.tables, split)


def _need_of(tables: StageTables, split: Split) -> int:
    return max(int(need[held - 1]) for need, held in zip(tables.need_bytes, split, strict=True))


@dataclass(frozen=True)
class GPipeCandidate(_AnySplit):
    """All splits of a GPipe setting, through its non-dominated ones."""

    @cached_property
    def _front(self) -> list[tuple[int, Choice]]:
        return [(_need_of(self.tables, choice.split), choice) for choice in gpipe_front(self.tables)]

    def quick_bound(self, need_bytes: int) -> float:
        choice = self.fastest(need_bytes)
        return math.inf if choice is None else choice.step_s

    def fastest(self, need_bytes: int, cutoff_s: float = math.inf) -> Choice | None:
        within = (choice for need, choice in self._front if need <= need_bytes)
        choice = next(within, None)
        return choice if choice is not None and choice.step_s < cutoff_s else None

    def leanest(self, choice: Choice, need_bytes: int) -> Choice:  # noqa: ARG002
        return choice  # the front holds the fewest bytes of every time


@dataclass(frozen=True)
class OneFOneBCandidate(_AnySplit):
    """All splits of a 1F1B setting, through branch and bound."""

    @cached_property
    def _solver(self) -> OneFOneB:
        return OneFOneB(self.tables)

    @property
    def max_gap(self) -> float:
        return self._solver.max_gap

    def quick_bound(self, need_bytes: int) -> float:
        return self._solver.quick_bound(need_bytes)

    def fastest(self, need_bytes: int, cutoff_s: float = math.inf) -> Choice | None:
        return self._solver.solve(need_bytes, cutoff_s)

    def leanest(self, choice: Choice, need_bytes: int) -> Choice:  # noqa: ARG002
        cutoff_s = choice.step_s * (1 + 3 * TOLERANCE)
        values = np.unique(np.concatenate(list({id(need): need for need in self.tables.need_bytes}.values())))
        low = int(np.searchsorted(values, self.least_need()))
        high = int(np.searchsorted(values, _need_of(self.tables, choice.split)))
        best, stride = choice, 1
        # Mostly the first look, one value below, finds nothing; then twice as far each time, and back by halves.
        while low < high:
            look = max(low, high - stride)
            found = self._solver.solve(int(values[look]), cutoff_s)
            if found is None:
                low = look + 1
                stride = max(1, stride // 4)
            else:
                best, high = found, int(np.searchsorted(values, _need_of(self.tables, found.split)))
                stride *= 2
        return best


@dataclass(frozen=True)
class PinnedSplit:
    """A setting whose split is given."""

    tables: StageTables
    split: Split

    @property
    def setting(self) -> Setting:
        return self.tables.setting

    @cached_property
    def _choice(self) -> Choice:
        tables = self.tables

        def held(table: tuple[np.ndarray, ...]) -> list[float]:
            return [float(values[layers - 1]) for values, layers in zip(table, self.split, strict=True)]

        setting, forward, backward = self.setting, held(tables.forward_s), held(tables.backward_s)
        timeline = simulate(forward, backward, tables.transfer_s, setting.num_microbatches, setting.schedule)
        step_s = max(timeline.makespan_s + max(held(tables.tail_s)), tables.host_s)
        return Choice(step_s, int(max(held(tables.peak_bytes))), self.split)

    @property
    def max_gap(self) -> float:
        return 0.0

    def num_splits(self) -> int:
        return 1

    def num_within(self, need_bytes: int) -> int:
        return int(self.least_need() <= need_bytes)

    def least_need(self) -> int:
        return _need_of(self.tables, self.split)

    def need_of(self, split: Split) -> int:
        return _need_of(self.tables, split)

    def quick_bound(self, need_bytes: int) -> float:
        return self._choice.step_s if self.num_within(need_bytes) else math.inf

    def fastest(self, need_bytes: int, cutoff_s: float = math.inf) -> Choice | None:
        return self._choice if self.quick_bound(need_bytes) < cutoff_s else None

    def leanest(self, choice: Choice, need_bytes: int) -> Choice:  # noqa: ARG002
        return choice


def candidate_of(tables: StageTables, layers: Split | None) -> Candidate:
    """The candidate of a setting, with its split pinned or open."""
    if layers is not None:
        return PinnedSplit(tables, layers)
    return GPipeCandidate(tables) if tables.setting.schedule == "gpipe" else OneFOneBCandidate(tables)
