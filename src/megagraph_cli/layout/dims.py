"""Degrees of the three parallel axes and the place of each rank in their mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

AXES = ("pp", "dp", "cp")


@dataclass(frozen=True)
class Place:
    """Coordinates of one rank: pipeline stage, data replica, context block."""

    pp: int
    dp: int
    cp: int

    def __str__(self) -> str:
        return f"pp={self.pp} dp={self.dp} cp={self.cp}"


@dataclass(frozen=True, order=True)
class ParallelDims:
    """Degrees (pp, dp, cp). Field order is the default mesh order: cp innermost, on the fastest links."""

    pp: int
    dp: int
    cp: int

    def __post_init__(self) -> None:
        assert min(self.pp, self.dp, self.cp) >= 1, self

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.cp

    def degree(self, axis: str) -> int:
        return int(getattr(self, axis))

    def shape(self, mesh_order: Sequence[str] = AXES) -> tuple[int, ...]:
        """Mesh shape, outermost axis first."""
        return tuple(self.degree(axis) for axis in mesh_order)

    def place(self, rank: int, mesh_order: Sequence[str] = AXES) -> Place:
        """Coordinates of ``rank`` when ranks are laid row-major over ``mesh_order``."""
        coordinate: dict[str, int] = {}
        for axis in reversed(list(mesh_order)):
            rank, coordinate[axis] = divmod(rank, self.degree(axis))
        return Place(**coordinate)

    def __str__(self) -> str:
        return f"pp={self.pp},cp={self.cp},dp={self.dp}"


def factorisations(size: int) -> Iterator[ParallelDims]:
    """Every (pp, dp, cp) whose product is ``size``, ascending."""
    for pp in range(1, size + 1):
        if size % pp:
            continue
        rest = size // pp
        for dp in range(1, rest + 1):
            if rest % dp == 0:
                yield ParallelDims(pp=pp, dp=dp, cp=rest // dp)
