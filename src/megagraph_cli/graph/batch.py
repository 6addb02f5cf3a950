"""From targets to what the workers of one replica read: sequences, labels and the input rows of a rank.

Legend: T targets of a micro-batch, S rows, R rows of one rank, n distinct feature rows, V nodes, G global tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.graph.gather import gather_rows
from megagraph_cli.graph.graph import DenseFeatures, Graph, SparseFeatures
from megagraph_cli.graph.readahead import enter_resident, read_ahead
from megagraph_cli.graph.sequences import Sequences, build_sequences, pack, unpack
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
    """One micro-batch on the host. ``targets`` and ``labels`` int64 [T]; ``real`` bool [T, N' + N_s] is False on
    padding rows."""

    targets: NDArray[np.int64]
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


class Peers(Protocol):
    """The ranks of one replica on one host, which need the same sequences: each builds its share of them."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def exchange(self, mine: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Bytes [size, n] of all peers, in the order of their ranks; every peer gives n bytes of its own."""
        ...


@dataclass(frozen=True)
class Drawn:
    """A replica's sequences, and which feature rows this rank needs of each micro-batch (None on later stages)."""

    targets: NDArray[np.int64]
    sequences: Sequences
    places: list[InputRows] | None


@dataclass(frozen=True)
class BatchBuilder:
    """Builds the micro-batches of one replica for one rank.

    ``num_microbatches`` and ``microbatch_size`` cut the replica's targets; ``input_layout`` with ``cp_rank`` says
    which rows this rank embeds (None on later stages, which need no features); ``use_features`` is False where the
    model reads a table alone. With ``peers``, all of them build the same batches in the same order.
    """

    graph: Graph
    spec: SequenceSpec
    num_microbatches: int
    microbatch_size: int
    threads: int
    input_layout: RowLayout | None = None
    cp_rank: int = 0
    use_features: bool = True
    peers: Peers | None = None

    def with_weights(self, weights: Sequence[float]) -> BatchBuilder:
        """The same with other sampling weights p [4]."""
        first, second, third, fourth = weights
        return replace(self, spec=replace(self.spec, weights=(first, second, third, fourth)))

    def warm_up(self) -> None:
        """Load the compiled kernels, or compile them, and enter what of the graph is in memory in the process's tables,
        before a step would wait for that."""
        enter_resident(self.graph)
        self._build(np.full(1, -1, dtype=np.int64), 0, 0)
        if self.use_features and isinstance(self.graph.features, DenseFeatures):
            gather_rows(self.graph.features.x, np.zeros(0, dtype=np.int64))

    def build(self, targets: NDArray[np.int64], *, epoch: int, view: int) -> list[MicroBatch]:
        """Micro-batches of ``targets`` int64 [K T] (-1 = padded target)."""
        return self.finish(self.draw(targets, epoch=epoch, view=view))

    def draw(self, targets: NDArray[np.int64], *, epoch: int, view: int) -> Drawn:
        """The sequences of a batch; the feature rows that they need are read ahead where the disk still has them."""
        assert targets.shape == (self.num_microbatches * self.microbatch_size,)
        sequences = self._sequences(targets, epoch, view)
        if self.input_layout is None:
            return Drawn(targets, sequences, None)
        places = [place_inputs(self.graph, part, self.input_layout, self.cp_rank) for part in self._parts(sequences)]
        if self.use_features:
            read_ahead(self.graph.features, [place.rows for place in places])
        return Drawn(targets, sequences, places)

    def finish(self, drawn: Drawn) -> list[MicroBatch]:
        """The micro-batches of drawn sequences, with the features that this rank embeds."""
        labels = np.where(drawn.targets >= 0, self.graph.labels[drawn.targets], IGNORED_LABEL).astype(np.int64)
        features = self.graph.features if self.use_features else None
        batches = []
        cut = partial(np.split, indices_or_sections=self.num_microbatches)
        for number, (part, targets, own) in enumerate(
            zip(self._parts(drawn.sequences), cut(drawn.targets), cut(labels), strict=True)
        ):
            inputs = None if drawn.places is None else read_features(features, drawn.places[number])
            real = np.concatenate((part.nodes >= 0, part.supers >= 0), axis=1)
            batches.append(MicroBatch(targets=targets, sequences=part, real=real, labels=own, inputs=inputs))
        return batches

    def _sequences(self, targets: NDArray[np.int64], epoch: int, view: int) -> Sequences:
        if self.peers is None:
            return self._build(targets, epoch, view)
        share = -(-targets.size // self.peers.size)
        padded = np.full(share * self.peers.size, -1, dtype=np.int64)
        padded[: targets.size] = targets
        mine = padded[self.peers.rank * share : (self.peers.rank + 1) * share]
        parts = self.peers.exchange(pack(self._build(mine, epoch, view)))
        return unpack(parts, targets.size, self.spec.num_sampled, self.spec.num_super)

    def _build(self, targets: NDArray[np.int64], epoch: int, view: int) -> Sequences:
        return build_sequences(
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

    def _parts(self, sequences: Sequences) -> list[Sequences]:
        size = self.microbatch_size
        return [sequences.rows(start, start + size) for start in range(0, self.num_microbatches * size, size)]


def place_inputs(graph: Graph, sequences: Sequences, layout: RowLayout, cp_rank: int) -> InputRows:
    """Distinct feature rows of a rank's rows, ascending, and which row has which; no features yet."""
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
    return InputRows(rows, place)


def read_features(features: DenseFeatures | SparseFeatures | None, inputs: InputRows) -> InputRows:
    """The same rows with their features as float32, each read once however many sequences it is in."""
    if isinstance(features, DenseFeatures):
        return replace(inputs, dense=gather_rows(features.x, inputs.rows))
    if isinstance(features, SparseFeatures):
        columns, offsets, values = gather_sparse(features, inputs.rows)
        return replace(inputs, columns=columns, offsets=offsets, values=values)
    return inputs


def gather_inputs(graph: Graph, sequences: Sequences, layout: RowLayout, cp_rank: int, use_features: bool) -> InputRows:
    """The rows that a rank embeds, with their features where it uses them."""
    return read_features(graph.features if use_features else None, place_inputs(graph, sequences, layout, cp_rank))


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
    return features.indices[places].astype(np.int64), offsets, features.data[places].astype(np.float32, copy=False)


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
