"""The sizes that the profile measures (layers in a row, micro-batches, messages, targets) and the ways of layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from megagraph_cli.artifacts.profile import Context, Recompute
from megagraph_cli.layout.pieces import num_pieces

_T = TypeVar("_T")
MESSAGE_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22)
LARGER_MESSAGES = (1 << 25, 1 << 28)
"""Sizes of a sum beyond these, up to what the model's whole gradient has, while they do not take long."""
LARGER_S = 0.25
"""The longest that a larger message may be expected to take, by the one before."""
DEPTHS = (1, 2, 4, 8)
DEEPER = (12, 16)
"""Layers in a row of models that have more than ``DEPTHS``: a cache may be left as late as that (paper: past 8)."""
RUNS = 3
LEAST_TOP = 2
"""The smallest largest micro-batch: one sequence alone tells no slope."""


MOST_TOUCHED = {"cpu": 1 << 22, "cuda": 1 << 24}
"""Numbers in the touched rows that are measured, at most: larger ones take as long by number."""
TOUCHED_PARTS = (64, 8, 1)
_SPLIT = 8
"""Pieces of few touched rows."""


class Way(NamedTuple):
    """How a plan runs its layers: values of the fields of that name in plan.json."""

    recompute: Recompute
    context: Context


PLAIN = Way("none", "ring")


def ways(cp: int) -> list[Way]:
    """Every way in which a plan of that context degree may run its layers, the plain one first."""
    contexts: tuple[Context, ...] = ("ring",) if cp == 1 else ("ring", "allgather")
    recomputes: tuple[Recompute, ...] = ("none", "full")
    return [Way(recompute, context) for context in contexts for recompute in recomputes]


@dataclass(frozen=True)
class Sizes:
    """Layers in a row and sequences of a micro-batch that are measured in every combination, ``runs`` times each.

    Runs of ``deep`` layers are measured at the two smallest micro-batches alone: where a layer holds more, the cache is
    left after fewer of them.
    """

    layers: tuple[int, ...]
    microbatches: tuple[int, ...]
    deep: tuple[int, ...] = ()
    runs: int = RUNS

    def microbatches_of(self, layers: int) -> tuple[int, ...]:
        """The micro-batches at which a run of ``layers`` is measured."""
        return self.microbatches[:2] if layers in self.deep else self.microbatches

    def least(self) -> Sizes:
        """What is left when time is short: two of each, which still tell a constant from a slope, measured once.

        The largest micro-batch stays, so that nothing that would be foretold is extrapolated instead.
        """
        return replace(self, layers=self.layers[:2], microbatches=ends(self.microbatches), deep=(), runs=1)


@dataclass(frozen=True)
class Grid:
    """All sizes of one profile. ``deep``: layers in a row beyond ``layers``, see ``Sizes``."""

    layers: tuple[int, ...]
    microbatches: tuple[int, ...]
    messages: tuple[int, ...]
    targets: tuple[int, ...]
    deep: tuple[int, ...] = ()

    @classmethod
    def of(cls, batch_size: int, num_layers: int, *, quick: bool, largest: int) -> Grid:
        """Micro-batches up to ``largest`` in steps that tell a constant from a slope; messages over four decades."""
        top = max(1, min(batch_size, largest))
        parts = (8, 2, 1) if quick else (16, 4, 2, 1)
        # The last layer of a model is another module.
        most = max(1, num_layers - 1)
        deeper = () if quick else DEEPER
        return cls(
            layers=tuple(n for n in (DEPTHS[:2] if quick else DEPTHS) if n <= most),
            microbatches=tuple(sorted({max(1, top // part) for part in parts})),
            messages=MESSAGE_BYTES[::2] if quick else MESSAGE_BYTES,
            targets=tuple(sorted({max(1, top // part) for part in parts})),
            deep=tuple(sorted({min(n, most) for n in deeper} - set(range(DEPTHS[-1] + 1)))),
        )

    def sizes(self, way: Way, cp: int) -> Sizes:
        """Sizes of a way to run layers: what differs from the plain way is told from fewer of them.

        The cache is left by what a stage holds, whatever the way: only whole sequences run the plain way go deep.
        """
        if way == PLAIN:
            return Sizes(self.layers, self.microbatches, self.deep if cp == 1 else ())
        some = {self.microbatches[0], *self.microbatches[-2:]} if len(self.microbatches) > 3 else self.microbatches
        return Sizes(tuple(sorted({self.layers[0], *self.layers[1:3][-1:]})), tuple(sorted(some)))


def touched_sizes(most_rows: int, dim: int, device: str) -> list[tuple[int, int]]:
    """(touched rows of ``dim`` numbers, pieces), ascending: up to ``most_rows``, in the pieces that training has.

    Few rows also in more pieces: where pieces grow as the rows do, nothing else tells one from the other.
    """
    top = max(1, min(most_rows, MOST_TOUCHED[device] // dim))
    sizes = {max(1, top // part) for part in TOUCHED_PARTS}
    few = max(min(sizes), min(_SPLIT, top))
    return sorted({(rows, num_pieces(rows, dim, rows, device)) for rows in sizes} | {(few, min(_SPLIT, few))})


def ends(sizes: tuple[_T, ...]) -> tuple[_T, ...]:
    """The smallest and the largest of ascending sizes."""
    return sizes if len(sizes) < 2 else (sizes[0], sizes[-1])
