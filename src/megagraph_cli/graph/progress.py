"""How far a long piece of preparation is: its share done, its rate and the time left, every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

Report = Callable[[str], None]
"""Told one line at a time what is being done."""

EVERY_S = 2.0


class Pace:
    """Reports on one piece of work of ``total`` units; pieces that end within ``EVERY_S`` say nothing."""

    def __init__(
        self, report: Report, what: str, total: float, unit: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report, self._what, self._total, self._unit = report, what, total, unit
        self._clock = clock
        self._start = self._said = clock()

    def at(self, done: float) -> None:
        """``done`` units are done by now."""
        now = self._clock()
        if now - self._said < EVERY_S or not 0 < done < self._total:
            return
        self._said = now
        rate = done / (now - self._start)
        left_s = (self._total - done) / rate
        self._report(
            f"{self._what}: {done / self._total:.0%}, {_short(rate)}{self._unit}/s, "
            f"{left_s // 60:.0f}:{left_s % 60:02.0f} left"
        )


def _short(value: float) -> str:
    """Three significant digits: 950 , 1.21 k, 34.5 M."""
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "
