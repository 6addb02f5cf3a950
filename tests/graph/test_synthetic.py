"""Generated graphs: exactly the sizes asked for, heavy-tailed, with communities, a function of the spec."""

from __future__ import annotations

import numpy as np
import pytest
from raw_layouts import whole

from megagraph_cli.errors import EXIT_USAGE, MgraphError
from megagraph_cli.graph.readers.adjacency import undirected
from megagraph_cli.graph.synthetic import Spec, generate, generate_demo, parse_spec


@pytest.mark.parametrize(
    "spec",
    [
        Spec(1, 0, 0, 1),
        Spec(2, 0, 3, 2),
        Spec(30, 217, 2, 3),  # half of all pairs
        Spec(100, 300, 0, 100),
        Spec(5000, 40000, 8, 7, 3),
    ],
)
def test_sizes_are_exact(spec: Spec) -> None:
    raw = generate(spec)
    clean = undirected(raw.tails, raw.heads, spec.nodes)
    assert raw.num_nodes == spec.nodes
    assert clean.indices.size == 2 * spec.edges
    assert (clean.self_loops, clean.duplicates) == (0, 0)
    np.testing.assert_array_equal(np.unique(raw.labels), np.arange(spec.classes))
    if spec.features:
        assert whole(raw.features).shape == (spec.nodes, spec.features)
        assert whole(raw.features).dtype == np.float32
    else:
        assert raw.features is None


def test_function_of_the_spec() -> None:
    one, two, other = (generate(Spec(2000, 9000, 4, 3, seed)) for seed in (5, 5, 6))
    assert np.array_equal(one.tails, two.tails)
    assert np.array_equal(one.heads, two.heads)
    assert np.array_equal(whole(one.features), whole(two.features))
    assert not np.array_equal(one.tails, other.tails)


def test_heavy_tail_and_communities() -> None:
    raw = generate(Spec(20000, 200000, 0, 5))
    degrees = np.bincount(np.concatenate([raw.tails, raw.heads]), minlength=20000)
    assert degrees.max() > 15 * degrees.mean()
    # 75 % of edges stay in a community, the rest meets the same class one time in five.
    same = (raw.labels[raw.tails] == raw.labels[raw.heads]).mean()
    assert 0.6 < same < 0.9


def test_demo_is_small_and_labelled() -> None:
    raw = generate_demo()
    assert raw.num_nodes == 4000
    assert raw.tails.size == 16000
    assert (raw.labels >= 0).all()
    assert np.bincount(raw.labels).min() > 700


def test_spec_round_trip_and_defaults() -> None:
    full = "synthetic:nodes=2449029,edges=61859140,features=100,classes=47,seed=1"
    assert parse_spec(full) == Spec(2449029, 61859140, 100, 47, 1)
    assert parse_spec(full).name == full
    assert parse_spec("synthetic:edges=5, nodes=10") == Spec(10, 5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "unknown key ''"),
        ("nodes=10", "does not say edges"),
        ("edges=10", "does not say nodes"),
        ("nodes=10,edges=5,colour=3", "unknown key 'colour'"),
        ("nodes=10,edges=five", "not a whole number"),
        ("nodes=10,edges=-5", "not a whole number"),
        ("nodes=10,edges=5,nodes=10", "twice"),
        ("nodes=0,edges=0", "0 nodes"),
        ("nodes=10,edges=23", "at most 22"),
        ("nodes=10,edges=5,classes=11", "11 classes"),
        ("nodes=10,edges=5,classes=0", "0 classes"),
        ("nodes=9999999999,edges=5", "9999999999 nodes"),
    ],
)
def test_bad_specs_are_one_sentence(text: str, expected: str) -> None:
    with pytest.raises(MgraphError, match=expected) as caught:
        parse_spec(f"synthetic:{text}")
    assert caught.value.exit_code == EXIT_USAGE
