"""The training worker with blocks of steps in turn: with batches built before the block, and with the loader.

A machine's speed wanders by a tenth and more within a minute, which is as much as what is to be measured: steps of both
kinds therefore lie seconds apart, in one process. Each rank writes the seconds of its steps into the run folder.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from megagraph_cli.graph.loader import Prefetcher
from megagraph_cli.runtime import train
from megagraph_cli.runtime.setup import Worker, run_worker

BLOCK = 20
_FIRST, _LAST = 4, 3
"""Steps of a block that do not count: the loader begins with batches in hand, and ends before its last steps."""
FILE = "blocks-0.json"
"""What rank 0 writes: [seconds of the steps that count, seconds waited for a batch in them] of every block."""


class InTurn:
    """Hands out ``count`` batches in order: those of even blocks are built before the first of them is, those of odd
    ones by a Prefetcher."""

    most = 0
    blocks: list[tuple[list[float], float]]

    def __init__(self, build: Callable[[int], Any], count: int, **options: Any) -> None:
        self._build, self._count, self._options = build, min(count, self.most), options
        self._loader: Prefetcher[Any] | None = None
        self.stall_s = 0.0
        InTurn.blocks = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def make_room(self) -> None:
        """As a Prefetcher's."""
        if self._loader:
            self._loader.make_room()

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, self._count, BLOCK):
            if first // BLOCK % 2 == 0:
                yield from self._timed([self._build(index) for index in range(first, min(first + BLOCK, self._count))])
                continue
            with Prefetcher(lambda index, first=first: self._build(first + index), BLOCK, **self._options) as loader:
                self._loader = loader
                yield from self._timed(loader)
            self._loader = None

    def _timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches; the steps between them are entered in ``blocks`` once all were taken."""
        starts, waited = [], []
        for batch in batches:
            starts.append(time.perf_counter())
            waited.append(self._loader.stall_s if self._loader else 0.0)
            yield batch
        steps = [end - start for start, end in pairwise(starts)]
        InTurn.blocks.append((steps[_FIRST : len(steps) - _LAST], waited[-_LAST - 1] - waited[_FIRST]))


def main(worker: Worker, values: dict[str, Any]) -> None:
    """Train for the job's ``max_steps``, an odd number of blocks."""
    InTurn.most = values["max_steps"]
    train.Prefetcher = InTurn  # type: ignore[misc, assignment]
    train.main(worker, values)
    if os.environ["RANK"] == "0":
        (Path(values["run_dir"]) / FILE).write_text(json.dumps(InTurn.blocks), encoding="utf-8")


if __name__ == "__main__":
    run_worker(main)
