"""From targets to what the workers of one replica read: sequences, labels and the input rows of a rank.

Legend: T targets of a micro-batch, S rows, R rows of one rank, n distinct feature rows, V nodes, G global tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.graph.graph import DenseFeatures, Graph, SparseFeatures
from megagraph_cli.graph.sequences import Sequences, build_sequences
from megagraph_cli.layout.batches import microbatch_targets
from megagraph_cli.layout.rows import RowLayout

IGNORED_LABEL = -100
"""Label of padded targets, the one that cross-entropy leaves out."""


@dataclass(frozen=True)
class InputRows:
    """Feature rows that one rank of the first stage embeds.

    ``rows`` int64 [n]: distinct feature rows; ``place`` int64 [T, R]: position of each row of the rank among
    [the n rows | G global tokens | zero]. Features are dense [n, F] or CSR, as the graph stores them, or absent.
    """

    rows: NDArray[np.int64]
    place: NDArray[np.int64]
    dense: NDArray[np.float32] | None = None
    columns: NDArray[np.int64] | None = None
    offsets: NDArray[np.int64] | None = None
    values: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch on the host. ``labels`` int64 [T]; ``real`` bool [T, N' + N_s] is False on padding rows."""

    sequences: Sequences
    real: NDArray[np.bool_]
    labels: NDArray[np.int64]
    inputs: InputRows | None


@dataclass(frozen=True)
class SequenceSpec:
    """How the sequences of a workload are drawn; ``weights`` float64 [4] are the sampling weights p."""

    num_sampled: int
    num_super: int
    num_global: int
    rng_seed: int
    weights: tuple[float, float, float, float] = (0.25, 0.25, 0.25, 0.25)


@dataclass(frozen=True)
class BatchBuilder:
    """Builds the micro-batches of one replica for one rank.

    ``num_microbatches`` and ``microbatch_size`` cut the replica's targets; ``input_layout`` with ``cp_rank`` says
    which rows this rank embeds (None on later stages, which need no features); ``use_features`` is False where the
    model reads a table alone.
    """

    graph: Graph
    spec: SequenceSpec
    num_microbatches: int
    microbatch_size: int
    threads: int
    input_layout: RowLayout | None = None
    cp_rank: int = 0
    use_features: bool = True

    def build(self, targets: NDArray[np.int64], *, epoch: int, view: int) -> list[MicroBatch]:
        """Micro-batches of ``targets`` int64 [K T] (-1 = padded target)."""
        assert targets.shape == (self.num_microbatches * self.microbatch_size,)
        return [self._build_one(part, epoch, view) for part in np.split(targets, self.num_microbatches)]

    def _build_one(self, targets: NDArray[np.int64], epoch: int, view: int) -> MicroBatch:
        sequences = build_sequences(
            self.graph,
            targets,
            num_sampled=self.spec.num_sampled,
            num_super=self.spec.num_super,
            num_global=self.spec.num_global,
            weights=np.asarray(self.spec.weights),
            rng_seed=self.spec.rng_seed,
            epoch=epoch,
            view=view,
            threads=self.threads,
        )
        labels = np.where(targets >= 0, self.graph.labels[targets], IGNORED_LABEL)
        inputs = None
        if self.input_layout is not None:
            inputs = gather_inputs(self.graph, sequences, self.input_layout, self.cp_rank, self.use_features)
        return MicroBatch(
            sequences=sequences,
            real=np.concatenate((sequences.nodes >= 0, sequences.supers >= 0), axis=1),
            labels=labels.astype(np.int64),
            inputs=inputs,
        )


def gather_inputs(graph: Graph, sequences: Sequences, layout: RowLayout, cp_rank: int, use_features: bool) -> InputRows:
    """Distinct feature rows of a rank's rows, each read once however many sequences it is in."""
    supers = np.where(sequences.supers >= 0, sequences.supers.astype(np.int64) + graph.num_nodes, -1)
    known = np.concatenate((sequences.nodes.astype(np.int64), supers), axis=1)
    mine = layout.rows_of(cp_rank)
    ids = known[:, mine.start : mine.stop]
    rows, place = np.unique(ids, return_inverse=True)
    place = place.reshape(ids.shape)
    if rows.size and rows[0] < 0:
        rows, place = rows[1:], place - 1
    zero_row = rows.size + layout.num_global
    place[place < 0] = zero_row
    tail = np.array([_place_of(layout, row, rows.size, zero_row) for row in mine[ids.shape[1] :]], dtype=np.int64)
    place = np.concatenate((place, np.broadcast_to(tail, (len(ids), tail.size))), axis=1)
    place = np.ascontiguousarray(place, dtype=np.int64)
    features = graph.features if use_features else None
    if isinstance(features, DenseFeatures):
        return InputRows(rows, place, dense=features.x[rows])
    if isinstance(features, SparseFeatures):
        columns, offsets, values = gather_sparse(features, rows)
        return InputRows(rows, place, columns=columns, offsets=offsets, values=values)
    return InputRows(rows, place)


def _place_of(layout: RowLayout, row: int, num_rows: int, zero_row: int) -> int:
    """Place of a row past the nodes and super nodes: its global token, or the zero row."""
    token = row - layout.num_sampled - layout.num_super
    return num_rows + token if token < layout.num_global else zero_row


def gather_sparse(
    features: SparseFeatures, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """(columns [nnz], offsets [n + 1], values [nnz]) of some rows of a CSR matrix, vectorised."""
    starts = features.indptr[rows]
    lengths = features.indptr[rows + 1] - starts
    offsets = np.zeros(rows.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    places = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
    return features.indices[places].astype(np.int64), offsets, np.asarray(features.data[places])


def epoch_order(train: NDArray[np.int64], rng_seed: int, epoch: int) -> NDArray[np.int64]:
    """The order in which one epoch visits the training targets: the same under every plan."""
    return np.random.default_rng([rng_seed, epoch]).permutation(train)


def replica_targets(
    targets: NDArray[np.int64], batch_size: int, dp: int, dp_rank: int, num_microbatches: int
) -> NDArray[np.int64]:
    """One replica's share of a global batch, padded with -1 to dp x K equal micro-batches of static size."""
    share = microbatch_targets(batch_size, dp, num_microbatches) * num_microbatches
    padded = np.full(share * dp, -1, dtype=np.int64)
    padded[: targets.size] = targets
    return padded[dp_rank * share : (dp_rank + 1) * share]
