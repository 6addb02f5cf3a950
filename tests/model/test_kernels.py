"""The compiled kernel against the one in plain torch: any number of heads, channels and rows, any layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megagraph_cli.layout.rows import RowLayout
from megagraph_cli.model.attention import Block, BlockKernel, kernel_for
from megagraph_cli.model.block import BiasWeights, block_of, target_block_of
from megagraph_cli.model.compiled import CompiledKernel, cut
from megagraph_cli.model.drop import Drop
from megagraph_cli.model.plain import PlainKernel
from tests.model.cases import Case, bias_of, make_case, share

# float64: sums over at most 160 keys of terms of size a few; float32 likewise, relative to the largest element.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4}
DROP = Drop(0.3, 2**63 + 12345, first_sequence=17)


@pytest.fixture
def threads() -> Iterator[None]:
    """Two threads, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def worst(case: Case, block: Block, dtype: torch.dtype) -> float:
    """The largest difference from plain torch in outputs and gradients, relative to the largest element or 1."""
    rows = block.features.shape[2]
    q, k, v = (t.to(dtype) for t in (case.q[:, :, :rows], case.k, case.v))
    weights = BiasWeights(*(t.to(dtype) for t in case.weights))
    block = replace(block, features=block.features.to(dtype))
    found = []
    for kernel in (CompiledKernel(), PlainKernel()):
        out, lse = kernel.forward(q, k, v, block, weights)
        grad = case.grad[:, :, :rows].to(dtype)
        grads = kernel.backward(grad, (grad * out).sum(-1), lse, q, k, v, block, weights)
        found.append([out, *grads])
    found[1][5] = torch.zeros_like(found[1][5])  # the offset's gradient: zero but for rounding
    assert all(a.shape == b.shape for a, b in zip(*found, strict=True))
    return max(difference(a, b) for a, b in zip(*found, strict=True))


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1)) if b.numel() else 0.0


@pytest.mark.parametrize("drop", [None, DROP], ids=["whole", "dropped"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (RowLayout(15, 1, 1), {"batch": 5, "heads": 8, "head_dim": 8, "powers": 6}),
        (RowLayout(1, 0, 0), {"batch": 3, "heads": 1, "head_dim": 1, "powers": 1}),
        (RowLayout(5, 1, 4), {"heads": 3, "head_dim": 5, "powers": 2}),
        (RowLayout(62, 4, 4), {"heads": 16, "head_dim": 16, "powers": 12}),
        (RowLayout(150, 6, 3), {"heads": 12, "head_dim": 17, "powers": 7}),
    ],
    ids=["default", "smallest", "odd", "wide", "long"],
)
def test_compiled_equals_plain(layout: RowLayout, sizes: dict[str, int], dtype: torch.dtype, drop: Drop | None) -> None:
    case = make_case(layout, **sizes)
    bias = bias_of(case, layout, 0)
    for block in (block_of(bias, 0, drop), target_block_of(bias, drop)):
        assert worst(case, block, dtype) <= TOLERANCE[dtype]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("batch", [1, 3, 16], ids=["rows shared out", "rows of three", "sequences shared out"])
def test_threads_change_nothing_but_rounding(batch: int) -> None:
    layout = RowLayout(200, 10, 3)
    case = make_case(layout, batch=batch, heads=8)
    assert worst(case, block_of(bias_of(case, layout, 0), 0, DROP), torch.float64) <= TOLERANCE[torch.float64]


def test_a_block_of_another_owner_has_its_own_tokens_and_masks() -> None:
    whole = RowLayout(9, 1, 3)
    layout = replace(whole, cp=3)
    case = make_case(whole, heads=8)
    for rank in range(3):
        bias = bias_of(case, layout, rank)
        cut_case = replace(case, **{name: share(getattr(case, name), layout, rank) for name in ("q", "k", "v", "grad")})
        for owner in range(3):
            assert worst(cut_case, block_of(bias, owner, DROP), torch.float64) <= TOLERANCE[torch.float64]


def test_views_of_one_projection_are_read_where_they_lie() -> None:
    layout = RowLayout(15, 1, 1)
    case = make_case(layout, batch=4, heads=8, head_dim=8)
    block = block_of(bias_of(case, layout, 0), 0, None)
    together = torch.stack((case.q, case.k, case.v)).permute(2, 3, 0, 4, 1).contiguous()
    q, k, v = (together[:, :, i].permute(3, 0, 1, 2) for i in range(3))
    assert torch.equal(q, case.q)
    for a, b in zip(
        CompiledKernel().forward(q, k, v, block, case.weights),
        CompiledKernel().forward(case.q, case.k, case.v, block, case.weights),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_bfloat16_is_computed_in_float32() -> None:
    """Inputs are rounded, nothing else: the kernel gives what it gives for the rounded inputs in float32."""
    layout = RowLayout(15, 1, 1)
    case = make_case(layout, batch=4, heads=8, head_dim=8)
    whole = block_of(bias_of(case, layout, 0), 0, DROP)
    block = replace(whole, features=whole.features.float())
    weights = BiasWeights(*(t.float() for t in case.weights))
    narrow = [t.bfloat16() for t in (case.q, case.k, case.v)]
    found = []
    for tensors in (narrow, [t.float() for t in narrow]):
        out, lse = CompiledKernel().forward(*tensors, block, weights)
        grad = case.grad.float()
        found.append([out, lse, *CompiledKernel().backward(grad, (grad * out).sum(-1), lse, *tensors, block, weights)])
    assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_row_without_columns_has_no_output_and_no_gradient() -> None:
    layout = RowLayout(4, 0, 0)
    case = make_case(layout)
    case.padded[:] = True
    block = block_of(bias_of(case, layout, 0), 0, None)
    kernel = CompiledKernel()
    out, lse = kernel.forward(case.q, case.k, case.v, block, case.weights)
    assert not out.any()
    assert bool((lse <= -1e29).all())
    assert bool(torch.isfinite(lse).all())
    for grad in kernel.backward(case.grad, lse * 0, lse, case.q, case.k, case.v, block, case.weights):
        assert not grad.any()


@pytest.mark.parametrize("tile_scores", [1, 400], ids=["one row", "five rows"])
@pytest.mark.parametrize("drop", [None, DROP], ids=["whole", "dropped"])
def test_plain_torch_by_rows_is_plain_torch_at_once(tile_scores: int, drop: Drop | None) -> None:
    case = make_case(RowLayout(14, 2, 4))
    block = block_of(bias_of(case, case.layout, 0), 0, drop)
    found = []
    for kernel in (PlainKernel(), PlainKernel(tile_scores)):
        out, lse = kernel.forward(case.q, case.k, case.v, block, case.weights)
        delta = (case.grad * out).sum(-1)
        found.append([out, lse, *kernel.backward(case.grad, delta, lse, case.q, case.k, case.v, block, case.weights)])
    assert max(difference(a, b) for a, b in zip(*found, strict=True)) <= TOLERANCE[torch.float64]


def test_parts_cover_everything_once() -> None:
    assert cut(7, 3) == [(0, 2), (2, 4), (4, 7)]
    assert cut(2, 2) == [(0, 1), (1, 2)]


def test_a_cpu_gets_the_compiled_kernel_and_everything_else_the_plain_one() -> None:
    assert isinstance(kernel_for(torch.zeros(1)), CompiledKernel)
    assert isinstance(kernel_for(torch.zeros(1, device="meta")), PlainKernel)


def test_the_block_kernel_is_the_one_for_its_tensors() -> None:
    layout = RowLayout(3, 0, 1)
    case = make_case(layout)
    block = block_of(bias_of(case, layout, 0), 0, None)
    out, _ = BlockKernel().forward(case.q, case.k, case.v, block, case.weights)
    assert torch.equal(out, CompiledKernel().forward(case.q, case.k, case.v, block, case.weights)[0])
