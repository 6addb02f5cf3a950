"""Keeping a profile within its seconds: which parts are measured whole, which at the least sizes, which not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Extent = Literal["full", "least", "none"]
_FIRST_S = 3.0
"""Seconds that count as taken as foretold before the first work: one short work must not decide about all others."""
_CARE = 1.5
"""By how much works may take longer than thought without the budget being exceeded."""


@dataclass(frozen=True)
class Work:
    """One part of the profile and about how long it takes, whole (``full_s``) and at its least (``least_s``).

    ``take`` is told whether only the least is wanted. What is ``optional`` tells no coefficient that the rest does not.
    """

    what: str
    take: Callable[[bool], None]
    full_s: float
    least_s: float
    optional: bool = False


class Pace:
    """Decides about one work after the other, so that what must be measured ends by ``limit_s``.

    A function of what it is told: ranks that are told the same decide the same. How far estimates are off is learnt
    on the way.
    """

    def __init__(self, works: Sequence[Work], limit_s: float) -> None:
        self.works, self.limit_s = works, limit_s
        self._foretold_s = self._taken_s = _FIRST_S
        self._begun: tuple[float, float] | None = None

    def choose(self, place: int, elapsed_s: float) -> Extent:
        """How much of the work at ``place`` to take when ``elapsed_s`` of the budget are gone, all before it done."""
        if self._begun is not None:
            begin_s, foretold_s = self._begun
            self._taken_s += elapsed_s - begin_s
            self._foretold_s += foretold_s
        work = self.works[place]
        slow, least_s = _CARE * self.scale, _CARE * self._least_s(place + 1)
        extent: Extent = "full"
        if elapsed_s + slow * work.full_s + least_s > self.limit_s:
            gone = elapsed_s + slow * work.least_s > self.limit_s
            extent = "none" if work.optional and gone else "least"
        foretold = {"full": work.full_s, "least": work.least_s, "none": 0.0}
        self._begun = elapsed_s, foretold[extent]
        return extent

    @property
    def scale(self) -> float:
        """By how much works have taken longer than foretold."""
        return self._taken_s / self._foretold_s

    def left_s(self, place: int, elapsed_s: float) -> float:
        """About how long the works from ``place`` on will take."""
        whole_s = self.scale * sum(work.full_s for work in self.works[place:])
        return max(self._least_s(place), min(whole_s, self.limit_s - elapsed_s))

    def _least_s(self, place: int) -> float:
        return self.scale * sum(work.least_s for work in self.works[place:] if not work.optional)
