"""The ring equals dense attention: outputs and all gradients, for 1 to 4 ranks and any number of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megagraph_cli.layout import halves
from megagraph_cli.layout.rows import RowLayout
from megagraph_cli.model.attention import BiasWeights, BlockKernel, Drop, LocalAttend, block_of
from megagraph_cli.model.plain import PlainKernel
from megagraph_cli.parallel.context import Ring, merge
from megagraph_cli.runtime.build import RingAttend
from tests.model.cases import Case, bias_of, make_case, share
from tests.model.dense_attend import DenseAttend
from tests.ranks import run_ranks

# float64 rounding is 1.1e-16; sums over at most 70 keys of terms of size a few leave some 1e-14.
TOLERANCE = 1e-12

LAYOUTS = [RowLayout(rows, 0, 0) for rows in (1, 2, 3, 5, 17, 70)] + [
    RowLayout(1, 0, 1),
    RowLayout(2, 1, 1),
    RowLayout(3, 2, 2),
    RowLayout(5, 1, 4),
    RowLayout(15, 1, 1),
    RowLayout(60, 6, 3),
    RowLayout(62, 4, 4),
]


def _leaves(case: Case) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in (case.q, case.k, case.v, *case.weights)]


def dense_results(case: Case, *, target: bool, drop: Drop | None = None) -> list[Tensor]:
    """[out, dq, dk, dv, dchannel, doffset, dtoken] of the whole sequence on one process."""
    q, k, v, *weights = _leaves(case)
    bias = bias_of(case, replace(case.layout, cp=1), 0)
    attend = DenseAttend()
    if target:
        out = attend.target(q[:, :, :1], k, v, bias, BiasWeights(*weights), drop)
        out.backward(case.grad[:, :, :1])
    else:
        out = attend(q, k, v, bias, BiasWeights(*weights), drop)
        out.backward(case.grad)
    return [out.detach()] + [_grad(t) for t in (q, k, v, *weights)]


def _grad(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _innermost(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(dim, -1).contiguous().movedim(-1, dim)


def ring_results(
    rank: int, layouts: list[RowLayout], target: bool, batch: int = 2, drop: Drop | None = None, halved: bool = False
) -> float:
    """The largest difference from dense over all layouts, on this rank's rows; weights' gradients summed first."""
    if halved:  # however few pairs a block has; the rank is a process of its own
        halves.PAIRS_TO_HALVE = 0
    size = dist.get_world_size()
    attend = RingAttend(Ring(dist.group.WORLD, rank, size))
    worst = 0.0
    for layout in layouts:
        case = make_case(layout, batch=batch, heads=8 if halved else 2, seed=layout.sequence_rows)
        local = replace(layout, cp=size)
        q, k, v = (share(t, local, rank).requires_grad_() for t in (case.q, case.k, case.v))
        weights = BiasWeights(*(t.clone().requires_grad_() for t in case.weights))
        bias = bias_of(case, local, rank)
        grad = share(case.grad, local, rank)
        if halved:  # as the model lays them out: heads and channels innermost, so that kernels take parts uncopied
            q, k, v = (_innermost(t.detach(), 0).requires_grad_() for t in (q, k, v))
            grad, bias = _innermost(grad, 0), replace(bias, features=_innermost(bias.features, 1))
        if target:
            query = q[:, :, :1]
            out = attend.target(query, k, v, bias, weights, drop)
            out.backward(grad[:, :, :1] if rank == 0 else torch.zeros_like(out))
        else:
            out = attend(q, k, v, bias, weights, drop)
            out.backward(grad)
        got = [_grad(t) for t in weights]
        for tensor in got:
            dist.all_reduce(tensor)
        expected = dense_results(case, target=target, drop=drop)
        pairs = list(zip(got, expected[4:], strict=True))
        pairs += [(_grad(t), share(e, local, rank)) for t, e in zip((q, k, v), expected[1:4], strict=True)]
        pairs.append((out.detach(), expected[0]) if target else (out.detach(), share(expected[0], local, rank)))
        real = slice(0, max(0, min(local.rows_per_rank, layout.sequence_rows - rank * local.rows_per_rank)))
        for index, (a, b) in enumerate(pairs):
            # Outputs of padded query rows mean nothing and get no gradient.
            compare = (a, b) if target or index != len(pairs) - 1 else (a[:, :, real], b[:, :, real])
            if compare[0].numel():
                worst = max(worst, float((compare[0] - compare[1]).abs().max()))
    return worst


EVERY_ROW_COUNT = [RowLayout(max(1, rows - 2), min(1, max(0, rows - 2)), int(rows > 1)) for rows in range(1, 71)]


@pytest.mark.ranks
@pytest.mark.parametrize("target", [False, True], ids=["all rows", "target row"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ring_equals_dense_for_every_number_of_rows(size: int, target: bool) -> None:
    assert max(run_ranks(size, ring_results, EVERY_ROW_COUNT + LAYOUTS, target)) <= TOLERANCE


@pytest.mark.ranks
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_ring_that_halves_its_own_block_equals_dense(size: int, batch: int) -> None:
    """Halves of one, equal and unequal numbers of sequences; each sequence keeps its own dropout masks."""
    drop = Drop(0.3, 17, first_sequence=3)
    assert max(run_ranks(size, ring_results, LAYOUTS, False, batch, drop, True)) <= TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("target", [False, True], ids=["all rows", "target row"])
def test_local_equals_dense(layout: RowLayout, target: bool) -> None:
    case = make_case(layout, seed=7)
    q, k, v, *weights = _leaves(case)
    bias = bias_of(case, layout, 0)
    rows = 1 if target else layout.sequence_rows
    call = LocalAttend().target if target else LocalAttend()
    out = call(q[:, :, :rows], k, v, bias, BiasWeights(*weights), None)
    out.backward(case.grad[:, :, :rows])
    got = [out.detach()] + [_grad(t) for t in (q, k, v, *weights)]
    for a, b in zip(got, dense_results(case, target=target), strict=True):
        assert a.shape == b.shape
        assert float((a - b).abs().max() if a.numel() else 0.0) <= TOLERANCE


def test_gradients_match_finite_differences() -> None:
    layout = RowLayout(3, 1, 2)
    case = make_case(layout, batch=1, heads=2, head_dim=2, powers=2)
    bias = bias_of(case, layout, 0)

    def attend(*tensors: Tensor) -> Tensor:
        q, k, v, *weights = tensors
        return LocalAttend()(q, k, v, bias, BiasWeights(*weights), None)

    assert torch.autograd.gradcheck(attend, tuple(_leaves(case)), atol=1e-7)


def test_dropout_masks_are_the_same_in_forward_and_backward() -> None:
    layout = RowLayout(6, 1, 1)
    case = make_case(layout, batch=1)
    bias = bias_of(case, layout, 0)

    def attend(*tensors: Tensor) -> Tensor:
        q, k, v, *weights = tensors
        return LocalAttend()(q, k, v, bias, BiasWeights(*weights), Drop(0.4, 11))

    leaves = tuple(_leaves(case))
    assert torch.autograd.gradcheck(attend, leaves, atol=1e-7)
    q, k, v, *weights = leaves
    dense = DenseAttend()(q, k, v, bias, BiasWeights(*weights), Drop(0.4, 11))
    assert float((attend(*leaves) - dense).detach().abs().max()) <= TOLERANCE


def test_merging_partial_softmaxes_equals_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 2, 4, 9, generator=generator, dtype=torch.float64)
    values = torch.randn(2, 2, 9, 3, generator=generator, dtype=torch.float64)
    parts = [
        (torch.softmax(s, -1) @ v, torch.logsumexp(s, -1))
        for s, v in ((scores[..., :4], values[:, :, :4]), (scores[..., 4:], values[:, :, 4:]))
    ]
    out, lse = merge(*parts[0], *parts[1])
    assert float((out - torch.softmax(scores, -1) @ values).abs().max()) <= 1e-14
    assert float((lse - torch.logsumexp(scores, -1)).abs().max()) <= 1e-14


def test_a_block_of_padding_alone_weighs_nothing_and_yields_no_nan() -> None:
    layout = RowLayout(4, 0, 0, cp=2)
    case = make_case(RowLayout(4, 0, 0))
    case.padded[:, 2:] = True
    bias = bias_of(case, layout, 0)
    q, k, v = (share(t, layout, 0) for t in (case.q, case.k, case.v))
    kernel = BlockKernel()
    own = kernel.forward(q, k, v, block_of(bias, 0, None), case.weights)
    padding = kernel.forward(
        q, share(case.k, layout, 1), share(case.v, layout, 1), block_of(bias, 1, None), case.weights
    )
    out, lse = merge(*own, *padding)
    assert torch.isfinite(padding[0]).all()
    assert torch.equal(out, own[0])
    assert torch.equal(lse, own[1])


def test_bfloat16_autocast_leaves_the_statistics_in_float32() -> None:
    """The recomputed probabilities of a row sum to 1: forward and backward must see the same scores."""
    layout = RowLayout(15, 1, 1)
    case = make_case(layout, batch=4, heads=2, head_dim=4, powers=4)
    weights = BiasWeights(*(t.float() for t in case.weights))
    bias = bias_of(case, layout, 0)
    block = replace(block_of(bias, 0, None), features=bias.features[0].float())
    q, k, v = (t.bfloat16() for t in (case.q, case.k, case.v))
    with torch.autocast("cpu", torch.bfloat16):
        _, lse = PlainKernel().forward(q, k, v, block, weights)
    sums = (PlainKernel().scores(q, k, block, weights) - lse.unsqueeze(-1)).exp().sum(-1)
    assert float((sums - 1).abs().max()) <= 1e-5
