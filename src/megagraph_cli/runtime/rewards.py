"""Rewards of the sampler's arms, summed while held-out targets are evaluated, over all ranks.

A context rank sums over its own columns, a replica over its own targets; the ranks of other stages add nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megagraph_cli.graph.batch import MicroBatch
from megagraph_cli.graph.rewards import importance
from megagraph_cli.graph.sampler import ARMS
from megagraph_cli.model.attention import BiasWeights
from megagraph_cli.model.bias import AttentionBias
from megagraph_cli.model.blocks import Layer
from megagraph_cli.model.target_scores import LocalRow, TargetRow, node_scores, target_probabilities
from megagraph_cli.parallel.target_row import SharedRow
from megagraph_cli.runtime.build import StageParts


class ArmRewards:
    """Listens to the last layer of one rank's stage; all ranks make one and read it together."""

    def __init__(self, parts: StageParts) -> None:
        stage, mesh = parts.runner.stage, parts.mesh
        self._layer = stage.layers[str(stage.shape.num_layers - 1)] if stage.head is not None else None
        self._row: TargetRow = LocalRow() if mesh.dims.cp == 1 else SharedRow(mesh.cp, mesh.dims.cp)
        self._builder = parts.builder
        self._mine = parts.workload.batch.rows(mesh.dims.cp).rows_of(mesh.place.cp)
        self._device = parts.device
        self._sums = torch.zeros(len(ARMS) + 1, dtype=torch.float64, device=parts.device)
        self._batch: list[tuple[Tensor, Tensor]] = []
        self._next = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within it, the last layer's attention of every micro-batch that was expected is added up."""
        if self._layer is None:
            yield
            return
        assert isinstance(self._layer, Layer)
        self._layer.attention.listener = self._listen
        try:
            yield
        finally:
            self._layer.attention.listener = None

    def expect(self, batch: Sequence[MicroBatch]) -> None:
        """The micro-batches that will be inferred next, in their order."""
        if self._layer is not None:
            self._batch, self._next = [self._rows_of(part) for part in batch], 0

    def _rows_of(self, part: MicroBatch) -> tuple[Tensor, Tensor]:
        """(place of the arm in the sums, weight) of this rank's rows [B, R]; place 0 for rows that no arm drew."""
        arms = part.sequences.arms
        share = importance(self._builder.graph, part.targets, arms, self._builder.spec.weights)
        places = np.zeros((len(arms), self._mine.stop), dtype=np.int64)
        weights = np.zeros(places.shape)
        stop = min(arms.shape[1], self._mine.stop)
        places[:, :stop], weights[:, :stop] = arms[:, :stop].astype(np.int64) + 1, share[:, :stop]
        mine = slice(self._mine.start, self._mine.stop)
        return (
            torch.from_numpy(np.ascontiguousarray(places[:, mine])).to(self._device),
            torch.from_numpy(np.ascontiguousarray(weights[:, mine])).to(self._device),
        )

    def _listen(self, q: Tensor, k: Tensor, v: Tensor, bias: AttentionBias, learned: BiasWeights) -> None:
        places, weights = self._batch[self._next]
        self._next += 1
        scores = node_scores(target_probabilities(q, k, bias, learned, self._row), v)
        self._sums.index_add_(0, places.flatten(), (scores.double() * weights).flatten())

    def means(self, num_sequences: int) -> list[float]:
        """Mean rewards [4] over ``num_sequences`` sequences of all ranks, as rank 0 has them."""
        dist.all_reduce(self._sums)
        dist.broadcast(self._sums, src=0)
        return [value / num_sequences for value in self._sums[1:].tolist()]
