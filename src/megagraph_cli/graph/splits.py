"""Which labelled nodes train, validate and test: published masks or a random cut."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.errors import MgraphError
from megagraph_cli.graph.graph import Graph, Split

DEFAULT_RANDOM = "random:0.6,0.2,0.2"
_HELP = "use auto, public, public:K or random:0.6,0.2,0.2"


def make_split(graph: Graph, split: str, split_seed: int) -> Split:
    """The target ids of each part; nodes without a label are in none.

    ``auto`` is the first published split where there is one, else ``random:0.6,0.2,0.2``; ``public:K`` the K-th
    mask from 0; ``random:a,b,c`` shuffles the labelled ids with numpy's default_rng(split_seed) and cuts at
    floor(a n), floor((a+b) n) and floor((a+b+c) n).
    Raises MgraphError (exit 2) on an unknown split, a mask that does not exist or fractions that cannot be.
    """
    kind, _, argument = split.partition(":")
    if split == "auto":
        return _random(graph, DEFAULT_RANDOM, split_seed) if graph.masks is None else _public(graph, 0)
    if kind == "public":
        if argument and not argument.isdecimal():
            raise MgraphError(f"split {split!r} does not name a mask by number; {_HELP}")
        return _public(graph, int(argument or 0))
    if kind == "random":
        return _random(graph, split, split_seed)
    raise MgraphError(f"split {split!r} is not known; {_HELP}")


def _public(graph: Graph, index: int) -> Split:
    if graph.masks is None:
        raise MgraphError(f"{graph.name} has no published split; use random:0.6,0.2,0.2")
    count = graph.masks.train.shape[0]
    if index >= count:
        raise MgraphError(f"{graph.name} has {count} published splits; use public:0 to public:{count - 1}")
    labelled = np.asarray(graph.labels) >= 0

    def ids(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        return np.flatnonzero(mask[index] & labelled).astype(np.int64)

    return Split(ids(graph.masks.train), ids(graph.masks.val), ids(graph.masks.test))


def _random(graph: Graph, split: str, split_seed: int) -> Split:
    if split_seed < 0:
        raise MgraphError(f"split_seed {split_seed} is negative; use 0 or above")
    fractions = _fractions(split)
    ids = np.flatnonzero(np.asarray(graph.labels) >= 0).astype(np.int64)
    np.random.default_rng(split_seed).shuffle(ids)
    # Exact fractions: floor(0.6 n) must not depend on how a sum of floats rounds.
    cuts = [int(sum(fractions[: part + 1]) * ids.size) for part in range(3)]
    train, val, test = (np.sort(part) for part in np.split(ids, cuts)[:3])
    return Split(train, val, test)


def _fractions(split: str) -> list[Fraction]:
    texts = split.partition(":")[2].split(",")
    try:
        fractions = [Fraction(text.strip()) for text in texts]
    except (ValueError, ZeroDivisionError) as error:
        raise MgraphError(f"split {split!r} has a part that is not a number; {_HELP}") from error
    if len(fractions) != 3:
        raise MgraphError(f"split {split!r} has {len(fractions)} parts instead of train, val and test; {_HELP}")
    if fractions[0] <= 0 or min(fractions) < 0 or sum(fractions) > 1:
        raise MgraphError(f"split {split!r} needs fractions above 0 that add up to at most 1; {_HELP}")
    return fractions
