"""Splits to the letter of their definition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megagraph_cli.errors import EXIT_USAGE, MgraphError
from megagraph_cli.graph.graph import Graph, Masks
from megagraph_cli.graph.splits import make_split

NUM_NODES = 97


def graph(masks: Masks | None = None) -> Graph:
    labels = np.random.default_rng(3).integers(-1, 4, NUM_NODES)
    none = np.zeros(0, np.int32)
    return Graph(
        name="tiny",
        digest="",
        path=Path(),
        indptr=np.zeros(NUM_NODES + 1, np.int64),
        indices=none,
        labels=labels,
        num_classes=4,
        features=None,
        clusters=none,
        cluster_sizes=none,
        coarse_indptr=np.zeros(1, np.int64),
        coarse_indices=none,
        masks=masks,
        licence="",
        source="",
        counts={},
    )


def masks(count: int) -> Masks:
    part = np.random.default_rng(4).integers(0, 4, (count, NUM_NODES))
    return Masks(part == 0, part == 1, part == 2)


@pytest.mark.parametrize("seed", [0, 1, 42])
@pytest.mark.parametrize("split", ["auto", "random:0.6,0.2,0.2", "random: 0.6, 0.2, 0.2"])
def test_random_split_to_the_letter(split: str, seed: int) -> None:
    g = graph()
    ids = np.flatnonzero(g.labels >= 0)
    np.random.default_rng(seed).shuffle(ids)
    n = len(ids)
    first, second = int(0.6 * n), int(0.8 * n)
    found = make_split(g, split, seed)
    np.testing.assert_array_equal(found.train, np.sort(ids[:first]))
    np.testing.assert_array_equal(found.val, np.sort(ids[first:second]))
    np.testing.assert_array_equal(found.test, np.sort(ids[second:]))


def test_fractions_below_one_leave_nodes_out() -> None:
    found = make_split(graph(), "random:0.1,0.2,0.3", 0)
    n = int((graph().labels >= 0).sum())
    assert found.train.size == n // 10
    assert found.train.size + found.val.size == n * 3 // 10
    assert found.train.size + found.val.size + found.test.size == n * 6 // 10


@pytest.mark.parametrize(("split", "index"), [("auto", 0), ("public:0", 0), ("public:2", 2)])
def test_published_masks_without_unlabelled_nodes(split: str, index: int) -> None:
    published = masks(3)
    g = graph(published)
    found = make_split(g, split, 0)
    for part in ("train", "val", "test"):
        expected = np.flatnonzero(getattr(published, part)[index] & (g.labels >= 0))
        np.testing.assert_array_equal(getattr(found, part), expected)
        assert getattr(found, part).dtype == np.int64


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("public:3", "public:0 to public:2"),
        ("public", "by number"),
        ("public:x", "by number"),
        ("public:-1", "by number"),
        ("random", "not a number"),
        ("random:0.6,0.2", "2 parts"),
        ("random:0.6,0.3,0.2", "at most 1"),
        ("random:0,0.5,0.5", "above 0"),
        ("random:0.6,-0.2,0.2", "above 0"),
        ("random:a,b,c", "not a number"),
        ("random:1/0,0,0", "not a number"),
        ("fixed", "not known"),
        ("", "not known"),
    ],
)
def test_bad_specs_are_one_sentence(split: str, expected: str) -> None:
    with pytest.raises(MgraphError, match=expected) as caught:
        make_split(graph(masks(3)), split, 0)
    assert caught.value.exit_code == EXIT_USAGE


def test_public_split_of_a_graph_without_one() -> None:
    with pytest.raises(MgraphError, match="no published split"):
        make_split(graph(), "public:0", 0)
    with pytest.raises(MgraphError, match="negative"):
        make_split(graph(), "auto", -1)


def test_no_labelled_node_gives_empty_parts() -> None:
    found = make_split(replace(graph(), labels=np.full(NUM_NODES, -1)), "auto", 0)
    assert (found.train.size, found.val.size, found.test.size) == (0, 0, 0)


def test_targets_in_two_parts_are_counted() -> None:
    """Three masks that overlap on purpose: the count is that of the ids that stand in two or three of them."""
    train, val, test = (np.zeros((1, NUM_NODES), dtype=np.bool_) for _ in range(3))
    train[0, :50], val[0, 40:60], test[0, 45:] = True, True, True
    g = graph(Masks(train, val, test))
    parts = [set(np.flatnonzero(mask[0] & (g.labels >= 0)).tolist()) for mask in (train, val, test)]
    twice = (parts[0] & parts[1]) | (parts[0] & parts[2]) | (parts[1] & parts[2])
    assert make_split(g, "public:0", 0).shared == len(twice) > 0
    assert make_split(graph(masks(1)), "public:0", 0).shared == 0
    assert make_split(graph(), "auto", 0).shared == 0
