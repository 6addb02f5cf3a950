"""Bias channels against matrix powers in numpy, whole and cut over context ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megagraph_cli.layout.rows import RowLayout
from megagraph_cli.model import bias
from megagraph_cli.model.bias import AttentionBias, TokenRows, Topology, build_bias
from tests.model.small import dense_channels, make_topology

POWERS = 6
# Entries are at most 1 and a power is a sum of at most 12 terms: some tens of roundings of 1.1e-16.
TOLERANCE = 1e-14

LAYOUTS = [
    RowLayout(1, 0, 0),
    RowLayout(2, 0, 0),
    RowLayout(9, 0, 2),
    RowLayout(1, 1, 0),
    RowLayout(5, 1, 1),
    RowLayout(6, 2, 2),
    RowLayout(9, 3, 0),
]


def build(topology: Topology, layout: RowLayout, cp_rank: int, scale: float = 1.0) -> AttentionBias:
    return build_bias(topology, layout, cp_rank, powers=POWERS, scale=scale, dtype=torch.float64)


def whole(topology: Topology, layout: RowLayout) -> Tensor:
    """The rows of all context ranks put together: [M, B, padded S, padded S]."""
    rows = [torch.cat(list(build(topology, layout, rank).features), dim=-1) for rank in range(layout.cp)]
    return torch.cat(rows, dim=-2)


def known_pairs(topology: Topology, layout: RowLayout) -> np.ndarray:
    """Pairs [B, S, S] of rows that are no padding: what padded rows hold is masked, so nobody reads it."""
    batch = topology.real.shape[0]
    known = np.concatenate([topology.real.numpy(), np.ones((batch, layout.num_global), dtype=np.bool_)], axis=1)
    return known[:, :, None] & known[:, None, :]


@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_channels_are_the_powers_of_the_induced_adjacency(layout: RowLayout, cp: int) -> None:
    topology = make_topology(layout)
    cut = replace(layout, cp=cp)
    got = whole(topology, cut).numpy()
    rows = layout.sequence_rows
    difference = np.abs(got[:, :, :rows, :rows] - dense_channels(topology, layout, POWERS))
    assert difference[:, known_pairs(topology, layout)].max() <= TOLERANCE
    assert not got[:, :, rows:].any()
    assert not got[:, :, :, rows:].any()


@pytest.mark.parametrize("at_once", [0.1, 0.5, 1, 2])
def test_channels_built_in_pieces_are_the_same(at_once: float, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = RowLayout(9, 3, 2)
    topology = make_topology(layout)
    assert topology.real.shape[0] > at_once
    together = whole(topology, layout)
    monkeypatch.setattr(bias, "MOST_PAIRS", int(at_once * layout.sequence_rows**2))
    torch.testing.assert_close(whole(topology, layout), together, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_channels_are_symmetric(layout: RowLayout) -> None:
    features = whole(make_topology(layout), layout)
    assert float((features - features.transpose(-1, -2)).abs().max()) <= TOLERANCE


def test_a_pair_with_a_super_node_knows_clusters_alone() -> None:
    """Two nodes of one cluster look alike to a super node, however differently they lie among the nodes."""
    layout = RowLayout(6, 1, 0)
    topology = make_topology(layout)
    topology.coarse_index[:, 1] = topology.coarse_index[:, 0]
    features = build(topology, layout, 0).features[0]
    assert torch.equal(features[:, :2, 0, 6], features[:, :2, 1, 6])
    assert not torch.equal(features[:, :2, 0, :6], features[:, :2, 1, :6])


def test_one_cluster_counts_once_however_many_rows_lie_in_it() -> None:
    """All rows in one cluster of normalised weight a: every power is a^m, not (rows x a)^m."""
    layout = RowLayout(3, 1, 0)
    topology = make_topology(layout)
    index = torch.zeros_like(topology.coarse_index)
    bits = torch.zeros_like(topology.coarse_bits)
    bits[:, 0, 0] = 1
    scale = torch.zeros_like(topology.coarse_scale)
    scale[:, 0] = 0.5
    topology = replace(topology, coarse_index=index, coarse_bits=bits, coarse_scale=scale)
    features = build(topology, layout, 0).features[0]
    for channel in range(POWERS):
        assert torch.equal(features[channel, :, 3, :], torch.full((3, 4), 0.25 ** (channel + 1), dtype=torch.float64))


@pytest.mark.parametrize("cp", [1, 2, 3, 5])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_padded_keys_are_the_rows_without_a_node_and_those_past_the_sequence(layout: RowLayout, cp: int) -> None:
    topology = make_topology(layout)
    cut = replace(layout, cp=cp)
    padded = torch.cat(list(build(topology, cut, 0).padded_keys), dim=-1)
    known = layout.num_sampled + layout.num_super
    assert padded.shape == (3, cut.padded_rows)
    assert torch.equal(padded[:, :known], ~topology.real)
    assert not padded[:, known : layout.sequence_rows].any()
    assert bool(padded[:, layout.sequence_rows :].all())


@pytest.mark.parametrize("cp", [1, 2, 3, 7])
def test_global_tokens_lie_where_the_layout_says(cp: int) -> None:
    layout = RowLayout(5, 1, 3, cp)
    found = []
    for rank in range(cp):
        place = TokenRows.of(layout, rank)
        assert 0 <= place.start <= place.stop <= layout.rows_per_rank
        rows = layout.rows_of(rank)
        found += [(rows[i], place.first + i - place.start) for i in range(place.start, place.stop)]
    assert found == [(6, 0), (7, 1), (8, 2)]


def test_bias_scale_multiplies_every_channel() -> None:
    layout = RowLayout(6, 2, 2, cp=2)
    topology = make_topology(layout)
    plain, scaled = (build(topology, layout, 1, scale) for scale in (1.0, 2.5))
    assert torch.equal(scaled.features, plain.features * 2.5)
    assert torch.equal(scaled.padded_keys, plain.padded_keys)
