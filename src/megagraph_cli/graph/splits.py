"""Which labelled nodes train, validate and test: published masks or a random cut."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.errors import MgraphError
from megagraph_cli.graph.graph import Graph, Split
from megagraph_cli.layout.splits import DEFAULT_RANDOM, SplitRule, parse_split


def make_split(graph: Graph, split: str, split_seed: int) -> Split:
    """The target ids of each part; nodes without a label are in none.

    ``auto`` is the first published split where there is one, else ``random:0.6,0.2,0.2``; ``public:K`` the K-th
    mask from 0; ``random:a,b,c`` shuffles the labelled ids with numpy's default_rng(split_seed) and cuts at
    floor(a n), floor((a+b) n) and floor((a+b+c) n).
    Raises MgraphError (exit 2) on an unknown split, a mask that does not exist or fractions that cannot be.
    """
    try:
        rule = parse_split(split)
    except ValueError as error:
        raise MgraphError(f"split {error}") from error
    if rule.kind == "auto":
        return _random(graph, DEFAULT_RANDOM, split_seed) if graph.masks is None else _public(graph, 0)
    return _public(graph, rule.index) if rule.kind == "public" else _random(graph, rule, split_seed)


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


def _random(graph: Graph, rule: SplitRule, split_seed: int) -> Split:
    if split_seed < 0:
        raise MgraphError(f"split_seed {split_seed} is negative; use 0 or above")
    ids = np.flatnonzero(np.asarray(graph.labels) >= 0).astype(np.int64)
    np.random.default_rng(split_seed).shuffle(ids)
    cuts = [int(sum(rule.fractions[: part + 1]) * ids.size) for part in range(3)]
    train, val, test = (np.sort(part) for part in np.split(ids, cuts)[:3])
    return Split(train, val, test)
