"""Gathered keys and values give what the ring gives: the same outputs bit for bit, the same gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megagraph_cli.layout.rows import RowLayout
from megagraph_cli.model.attention import BiasWeights
from megagraph_cli.parallel.allgather import allgather_attention, gather_blocks, scatter_sum
from megagraph_cli.parallel.context import ContextAttention, Ring, ring_attention
from megagraph_cli.runtime.build import RingAttend
from tests.model.cases import bias_of, make_case, share
from tests.ranks import run_ranks

# dK and dV are summed over at most 3 ranks in another order than on the ring: a few roundings of 1e-16.
TOLERANCE = 1e-13
LAYOUTS = [RowLayout(1, 0, 0), RowLayout(2, 1, 1), RowLayout(15, 1, 1), RowLayout(60, 6, 3)]


def results(rank: int, layout: RowLayout, attention: ContextAttention) -> tuple[Tensor, list[Tensor]]:
    """(outputs of this rank's real rows, gradients of q, k, v and the bias weights)."""
    size = dist.get_world_size()
    case = make_case(layout, seed=layout.sequence_rows)
    local = replace(layout, cp=size)
    q, k, v = (share(t, local, rank).requires_grad_() for t in (case.q, case.k, case.v))
    weights = BiasWeights(*(t.clone().requires_grad_() for t in case.weights))
    attend = RingAttend(Ring(dist.group.WORLD, rank, size), attention)  # type: ignore[arg-type]
    out = attend(q, k, v, bias_of(case, local, rank), weights, None)
    out.backward(share(case.grad, local, rank))
    real = max(0, min(local.rows_per_rank, layout.sequence_rows - rank * local.rows_per_rank))
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in (q, k, v, *weights)]
    return out.detach()[:, :, :real], grads


def both(rank: int) -> list[tuple[bool, float, float]]:
    """For each layout: outputs equal, largest difference of a gradient, largest gradient."""
    found = []
    for layout in LAYOUTS:
        (ring, ring_grads), (gathered, grads) = (
            results(rank, layout, a) for a in (ring_attention, allgather_attention)
        )
        worst = max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(ring_grads, grads, strict=True))
        largest = max(float(a.abs().max()) if a.numel() else 0.0 for a in ring_grads)
        found.append((torch.equal(ring, gathered), worst, largest))
    return found


def blocks_and_sums(rank: int) -> tuple[list[tuple[int, float]], list[float]]:
    ring = Ring(dist.group.WORLD, rank, dist.get_world_size())  # type: ignore[arg-type]
    visits = [(owner, float(block[0])) for owner, block in gather_blocks(ring, torch.full((2,), 10.0 + rank))]
    mine = torch.tensor([[100.0 * rank + owner] for owner in range(ring.size)])
    return visits, scatter_sum(ring, mine).tolist()


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 3])
def test_gathering_equals_the_ring(size: int) -> None:
    by_rank = run_ranks(size, both)
    for layout, ranks in zip(LAYOUTS, zip(*by_rank, strict=True), strict=True):
        largest = max(each[2] for each in ranks)
        assert largest > 0.1, layout
        for equal, worst, _ in ranks:
            assert equal, layout
            assert worst <= TOLERANCE * max(1.0, largest), layout


@pytest.mark.ranks
def test_blocks_come_in_the_rings_order_and_sums_go_to_their_owner() -> None:
    for rank, (visits, total) in enumerate(run_ranks(3, blocks_and_sums)):
        assert visits == [((rank - hop) % 3, 10.0 + (rank - hop) % 3) for hop in range(3)]
        assert total == [300.0 + 3 * rank]
