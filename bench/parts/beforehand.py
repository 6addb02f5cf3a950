"""The training worker with all its batches built before the first step: what a step takes that never waits for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

from megagraph_cli.graph.loader import Prefetcher
from megagraph_cli.runtime import train
from megagraph_cli.runtime.setup import Worker, run_worker


class Beforehand(Prefetcher[Any]):
    """Builds everything on entry, then hands it out."""

    most = 0

    def __init__(self, build: Callable[[int], Any], count: int, *more: Any, **options: Any) -> None:
        super().__init__(build, count, *more, **options)
        self._all = [build(index) for index in range(min(count, self.most))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._all = []

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all)


def main(worker: Worker, values: dict[str, Any]) -> None:
    """Train for the job's ``max_steps``."""
    Beforehand.most = values["max_steps"]
    train.Prefetcher = Beforehand  # type: ignore[misc]
    train.main(worker, values)


if __name__ == "__main__":
    run_worker(main)
