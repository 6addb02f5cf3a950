"""Ranks of one replica share the host's work: who is with whom, and that batches come out as if built alone."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megagraph_cli.graph.batch import BatchBuilder
from megagraph_cli.graph.loader import Begun, Prefetcher
from megagraph_cli.layout.dims import AXES, ParallelDims
from megagraph_cli.parallel import replica
from megagraph_cli.parallel.collectives import all_gather
from megagraph_cli.parallel.mesh import build_mesh
from megagraph_cli.parallel.replica import replica_peers
from megagraph_cli.runtime.build import make_builder
from megagraph_cli.runtime.live import live_tensor_bytes
from tests.ranks import run_ranks
from tests.runtime.small import small_graph, small_workload

BATCH = 9
"""Targets of a batch: the shares of two ranks are not equal."""
DEPTH = 2


def builder_of(dims: ParallelDims) -> BatchBuilder:
    graph = small_graph()
    return make_builder(small_workload(graph), graph, build_mesh(dims, AXES, "cpu"), 3, BATCH // 3, 1)


def targets_of(index: int) -> np.ndarray:
    targets = np.arange(index, index + BATCH)
    targets[-1] = -1
    return targets


def batches_agree(rank: int) -> None:
    for dims in (ParallelDims(2, 1, 1), ParallelDims(1, 1, 2)):
        together = builder_of(dims)
        assert together.peers is not None
        assert (together.peers.rank, together.peers.size) == (rank, 2)
        alone = replace(together, peers=None)
        for index in range(3):
            whole = together.build(targets_of(index), epoch=index, view=1)
            expected = alone.build(targets_of(index), epoch=index, view=1)
            for ours, theirs in zip(whole, expected, strict=True):
                np.testing.assert_array_equal(ours.real, theirs.real)
                np.testing.assert_array_equal(ours.labels, theirs.labels)
                for field in fields(ours.sequences):
                    got, want = getattr(ours.sequences, field.name), getattr(theirs.sequences, field.name)
                    assert got.dtype == want.dtype
                    np.testing.assert_array_equal(got, want, err_msg=field.name)
    assert builder_of(ParallelDims(1, 2, 1)).peers is None
    assert replica_peers(ParallelDims(2, 1, 1), AXES, 2, timedelta(seconds=30)) is None


def leaves_early(rank: int, holds: bool) -> list[int]:
    """Leave after the third batch, with the loader of rank 1 far behind that of rank 0; the numbers begun.

    With ``holds``, rank 1 alone makes room before it asks for the next batch.
    """
    builder = builder_of(ParallelDims(2, 1, 1))
    begun = []

    def draw(index: int) -> object:
        if rank == 1:
            time.sleep(0.1)
        begun.append(index)
        return builder.draw(targets_of(index), epoch=1, view=0)

    with Prefetcher(Begun(draw, builder.finish, 20), 20, DEPTH, holds=holds) as batches:  # type: ignore[arg-type]
        for index, _ in enumerate(batches):
            if rank == 1:
                batches.make_room()
            if index == 2:
                break
    return begun


def bytes_seen(rank: int) -> tuple[list[int], np.ndarray]:
    """Live tensors' bytes before, while and after peers exchange 1000 bytes each, and the first byte of each peer's."""
    peers = replica_peers(ParallelDims(2, 1, 1), AXES, 1, timedelta(seconds=30))
    assert peers is not None
    seen = [live_tensor_bytes()]

    def gather(*arguments: Any, **named: Any) -> Any:
        seen.append(live_tensor_bytes())
        return all_gather(*arguments, **named)

    with mock.patch.object(replica, "all_gather", gather):
        whole = peers.exchange(np.full(1000, 5 + rank, dtype=np.uint8))
    return [*seen, live_tensor_bytes()], whole[:, 0]


@pytest.mark.ranks
def test_what_peers_exchange_is_no_tensor_to_the_memory_meter() -> None:
    for seen, first in run_ranks(2, bytes_seen):
        assert len(seen) == 3
        assert len(set(seen)) == 1
        assert first.tolist() == [5, 6]


@pytest.mark.ranks
def test_batches_built_together_are_those_built_alone() -> None:
    run_ranks(2, batches_agree)


@pytest.mark.ranks
@pytest.mark.parametrize("holds", [False, True])
def test_ranks_that_leave_early_together_have_built_the_same_batches(holds: bool) -> None:
    # Three taken, DEPTH ahead, and one begun before the last of these is ended.
    assert run_ranks(2, leaves_early, holds, deadline_s=60) == [list(range(3 + DEPTH + 1))] * 2
