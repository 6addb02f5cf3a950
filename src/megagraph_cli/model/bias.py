"""Topology channels of the attention bias: powers of the induced normalised adjacency (paper.md, "Bias channels").

Legend: B sequences, S all rows, R rows of this rank, P context ranks (owners of column blocks), N node rows,
Q distinct clusters of a sequence, M bias channels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megagraph_cli.layout.rows import RowLayout
from megagraph_cli.model.drop import Drop, place_key

MOST_PAIRS = 1 << 20
"""Pairs of rows whose adjacency is dense at the same time: 4 MiB in float32."""


@dataclass(frozen=True)
class Topology:
    """Induced adjacency of one micro-batch, whole sequences, the same on every rank of a replica.

    ``node_bits`` uint8 [B, N, ceil(N/8)] (A + I, little-endian bits), ``node_scale`` [B, N];
    ``coarse_bits`` uint8 [B, Q, ceil(Q/8)], ``coarse_scale`` [B, Q]; ``coarse_index`` [B, N + N_s] places each
    row among the distinct clusters; ``real`` bool [B, N + N_s] is False on padding rows.
    """

    node_bits: Tensor
    node_scale: Tensor
    coarse_bits: Tensor
    coarse_scale: Tensor
    coarse_index: Tensor
    real: Tensor

    def sequences(self, start: int, stop: int) -> Topology:
        """Some consecutive sequences; no copies."""
        return Topology(*(getattr(self, field.name)[start:stop] for field in fields(self)))


@dataclass(frozen=True)
class TokenRows:
    """Where the global tokens lie inside one block of rows: local positions [start, stop) hold tokens first, ..."""

    start: int
    stop: int
    first: int

    @classmethod
    def of(cls, layout: RowLayout, cp_rank: int) -> TokenRows:
        rows = layout.rows_of(cp_rank)
        begin = layout.num_sampled + layout.num_super
        start = min(max(begin, rows.start), rows.stop)
        stop = max(start, min(layout.sequence_rows, rows.stop))
        return cls(start - rows.start, stop - rows.start, start - begin if stop > start else 0)

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def tokens(self) -> slice:
        """The global tokens that lie here."""
        return slice(self.first, self.first + self.count)

    @property
    def rows(self) -> slice:
        """The local rows they occupy."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class AttentionBias:
    """What attention needs of one micro-batch on one rank, built once per micro-batch and stage.

    ``features`` [P, M, B, R, R]: channels of this rank's rows against the columns of each owner, in memory side by
    side for each pair;
    ``padded_keys`` bool [P, B, R]: columns that nobody may attend to; ``tokens`` the global tokens' places in each
    owner's block; ``cp_rank`` the block that is this rank's own; ``drop_seed`` stands for (rng_seed, step) in the
    keys of dropout, ``first_sequence`` is the place of the first sequence in the global batch;
    ``empty`` are the owners of padding alone.
    """

    features: Tensor
    padded_keys: Tensor
    tokens: tuple[TokenRows, ...]
    cp_rank: int
    drop_seed: int = 0
    first_sequence: int = 0
    empty: frozenset[int] = frozenset()

    def drop(self, probability: float, layer: int, place: int) -> Drop | None:
        """Dropout of one place of a layer for the rows of this rank; None where nothing is dropped."""
        if probability == 0:
            return None
        first_row = self.cp_rank * self.features.shape[3]
        return Drop(probability, place_key(self.drop_seed, layer, place), self.first_sequence, first_row)


def build_bias(
    topology: Topology,
    layout: RowLayout,
    cp_rank: int,
    *,
    powers: int,
    scale: float,
    dtype: torch.dtype,
    drop_seed: int = 0,
    first_sequence: int = 0,
) -> AttentionBias:
    """Channels and masks of this rank's rows; the products are over whole sequences, so no plan changes their order."""
    batch = topology.node_bits.shape[0]
    rows = layout.rows_per_rank
    by_pair = topology.node_scale.new_zeros((batch, rows, layout.padded_rows, powers), dtype=dtype)
    features = by_pair.permute(3, 0, 1, 2)
    # A dense adjacency is as large as a channel of all rows, which a rank of several never holds: a few at a time.
    most = max(1, MOST_PAIRS // layout.sequence_rows**2)
    for start in range(0, batch, most):
        part = topology.sequences(start, start + most)
        _fill_nodes(features[:, start : start + most], part, layout, cp_rank)
        if layout.num_super:
            _fill_supers(features[:, start : start + most], part, layout, cp_rank)
    if scale != 1.0:
        by_pair *= scale
    return AttentionBias(
        features=by_pair.view(batch, rows, layout.cp, rows, powers).permute(2, 4, 0, 1, 3),
        padded_keys=_padded_keys(topology.real, layout),
        tokens=tuple(TokenRows.of(layout, owner) for owner in range(layout.cp)),
        cp_rank=cp_rank,
        drop_seed=drop_seed,
        first_sequence=first_sequence,
        empty=layout.empty_ranks,
    )


class _Adjacency:
    """Normalised adjacency [B, n, n] as packed bits [B, n, ceil(n/8)] and row scales [B, n]: dense where it is used.

    It is symmetric, so that some of its columns are some of its rows.
    """

    def __init__(self, bits: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self._bits, self._scale = bits, scale.to(dtype)
        batch, self._size = scale.shape
        self._step = max(1, MOST_PAIRS // max(1, batch * self._size))
        self._whole = self._dense(bits, self._scale) if self._step >= self._size else None

    def _dense(self, bits: Tensor, scale: Tensor) -> Tensor:
        """Rows [B, r, n] of these bits and scales."""
        shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
        found = ((bits.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., : self._size].to(scale.dtype)
        return found.mul_(scale.unsqueeze(-1)).mul_(self._scale.unsqueeze(-2))

    def rows(self, start: int, stop: int) -> Tensor:
        """Consecutive rows [B, stop - start, n]."""
        if self._whole is not None:
            return self._whole[:, start:stop]
        return self._dense(self._bits[:, start:stop], self._scale[:, start:stop])

    def chosen(self, places: Tensor) -> Tensor:
        """Rows [B, r, n] at ``places`` int64 [B, r]."""
        bits = torch.gather(self._bits, 1, places.unsqueeze(-1).expand(-1, -1, self._bits.shape[-1]))
        return self._dense(bits, torch.gather(self._scale, 1, places))

    def after(self, x: Tensor) -> Tensor:
        """x @ A for x [B, r, n]."""
        if self._whole is not None:
            return x @ self._whole
        out = torch.empty_like(x)
        for start in range(0, self._size, self._step):
            part = slice(start, start + self._step)
            torch.matmul(x, self.rows(part.start, part.stop).transpose(1, 2), out=out[:, :, part])
        return out


def _fill_nodes(features: Tensor, topology: Topology, layout: RowLayout, cp_rank: int) -> None:
    rows = layout.rows_of(cp_rank)
    first, last = min(rows.start, layout.num_nodes), min(rows.stop, layout.num_nodes)
    if first == last:
        return
    adjacency = _Adjacency(topology.node_bits, topology.node_scale, features.dtype)
    power_BrN = adjacency.rows(first, last)
    for channel in range(features.shape[0]):
        features[channel, :, : last - first, : layout.num_nodes] = power_BrN
        if channel + 1 < features.shape[0]:
            power_BrN = adjacency.after(power_BrN)


def _fill_supers(features: Tensor, topology: Topology, layout: RowLayout, cp_rank: int) -> None:
    """Pairs with a super node: powers of the coarse adjacency, its rows of super nodes only (thin products)."""
    nodes, columns = layout.num_nodes, layout.num_nodes + layout.num_super
    rows = layout.rows_of(cp_rank)
    coarse = _Adjacency(topology.coarse_bits, topology.coarse_scale, features.dtype)
    place = topology.coarse_index.long()
    power_BsQ = coarse.chosen(place[:, nodes:])
    mine = slice(min(rows.start, columns), min(rows.stop, columns))
    supers = slice(min(max(rows.start, nodes), columns), min(max(rows.stop, nodes), columns))
    for channel in range(features.shape[0]):
        pairs = torch.gather(power_BsQ, 2, place[:, None, :].expand(-1, layout.num_super, -1))
        features[channel, :, : mine.stop - mine.start, nodes:columns] = pairs[:, :, mine].transpose(1, 2)
        local = slice(supers.start - rows.start, supers.stop - rows.start)
        if supers.stop > supers.start:
            features[channel, :, local, :columns] = pairs[:, supers.start - nodes : supers.stop - nodes]
        if channel + 1 < features.shape[0]:
            power_BsQ = coarse.after(power_BsQ)


def _padded_keys(real: Tensor, layout: RowLayout) -> Tensor:
    batch, known = real.shape
    padded = real.new_ones((batch, layout.padded_rows))
    padded[:, :known] = ~real
    padded[:, known : layout.sequence_rows] = False
    return padded.view(batch, layout.cp, layout.rows_per_rank).transpose(0, 1).contiguous()
