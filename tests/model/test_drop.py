"""Dropout's draws against the hash spelled out in whole numbers, and masks that no cut of the batch changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megagraph_cli.model import drop as drop_module
from megagraph_cli.model import dropout
from megagraph_cli.model.drop import ATTENTION, RESIDUAL_1, Drop, keep_mask, place_key
from megagraph_cli.model.dropout import drop_add

WORD, LONG = 2**32 - 1, 2**64 - 1
LIKE = torch.zeros(1, dtype=torch.float64)


def mix(x: int) -> int:
    """lowbias32."""
    x ^= x >> 16
    x = x * 0x7FEB352D & WORD
    x ^= x >> 15
    x = x * 0x846CA68B & WORD
    return x ^ (x >> 16)


def split_mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & LONG
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & LONG
    return x ^ (x >> 31)


def unmixed_end(x: int) -> int:
    """The hash before its last step."""
    return x ^ (x >> 16)


def draw(drop: Drop, sequence: int, head: int, row: int, column: int) -> int:
    key = split_mix((drop.key + 0x9E3779B97F4A7C15 * (drop.first_sequence + sequence + 1)) & LONG)
    base = (key & WORD) ^ mix(((key >> 32) + 0x85EBCA6B * row) & WORD)
    word = mix((base + 0xC2B2AE35 * head) & WORD)
    # x ^ (x >> 16) undoes itself on 32 bits: the draw is the hash without its last step.
    return unmixed_end(mix((word + 0x9E3779B9 * column) & WORD))


def signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.5])
def test_masks_are_the_hash_spelled_out(probability: float) -> None:
    drop = Drop(probability, place_key(2**64 - 5, 3, ATTENTION), first_sequence=7)
    mask = keep_mask(drop, (3, 2, 4, 9), first_row=5, first_column=6, like=LIKE)
    for index in torch.cartesian_prod(*map(torch.arange, mask.shape)).tolist():
        head, sequence, row, column = index
        kept = signed(draw(drop, sequence, head, 5 + row, 6 + column)) >= round(probability * 2**32) - 2**31
        assert float(mask[head, sequence, row, column]) == (drop.kept if kept else 0.0)


def test_the_rate_is_p_and_what_is_kept_makes_up_for_it() -> None:
    mask = keep_mask(Drop(0.1, 11), (8, 64, 17, 17), first_row=0, first_column=0, like=LIKE)
    # 148,000 draws: five standard errors are 0.004.
    assert abs(float((mask == 0).double().mean()) - 0.1) < 0.004
    assert abs(float(mask.mean()) - 1) < 0.005
    for dim in range(4):
        others = [d for d in range(4) if d != dim]
        rates = (mask == 0).double().mean(dim=others)
        error = (0.09 * mask.shape[dim] / mask.numel()) ** 0.5
        assert float((rates - 0.1).abs().max()) < 5 * error


def test_neighbours_are_independent() -> None:
    """Along every dim, two neighbours are dropped together as often as chance has it."""
    mask = keep_mask(Drop(0.5, 5), (8, 32, 32, 32), first_row=0, first_column=0, like=LIKE) == 0
    for dim in range(4):
        size = mask.shape[dim] - 1
        both = mask.narrow(dim, 0, size) == mask.narrow(dim, 1, size)
        assert abs(float(both.double().mean()) - 0.5) < 5 * (0.25 / both.numel()) ** 0.5


def test_no_cut_of_batch_or_rows_changes_a_mask() -> None:
    drop = Drop(0.3, 99, first_sequence=4)
    whole = keep_mask(drop, (2, 6, 8, 8), first_row=0, first_column=0, like=LIKE)
    later = drop._replace(first_sequence=7)
    part = keep_mask(later, (2, 3, 5, 2), first_row=3, first_column=6, like=LIKE)
    assert torch.equal(part, whole[:, 3:, 3:, 6:])


def test_places_layers_and_steps_have_keys_of_their_own() -> None:
    keys = {place_key(seed, layer, place) for seed in range(9) for layer in range(-1, 9) for place in range(4)}
    assert len(keys) == 9 * 10 * 4
    assert all(0 <= key <= LONG for key in keys)


@pytest.mark.parametrize("size", [8, 24, 12, 1], ids=["compiled", "compiled wider", "plain", "one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("with_residual", [True, False])
def test_drop_add_is_residual_plus_mask_times_x(size: int, dtype: torch.dtype, with_residual: bool) -> None:
    drop = Drop(0.4, place_key(1, 2, RESIDUAL_1), first_sequence=5, first_row=17)
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(4, 3, size, generator=generator, dtype=dtype).requires_grad_() for _ in range(2))
    mask = keep_mask(drop, (1, 4, 3, size), first_row=17, first_column=0, like=x)[0]
    assert 0 < int((mask == 0).sum()) < mask.numel()
    out = drop_add(x, residual if with_residual else None, drop)
    expected = mask * x + (residual if with_residual else 0)
    # A fused multiply-add rounds once where this rounds twice.
    assert torch.allclose(out, expected, rtol=0, atol=2 * torch.finfo(dtype).eps * 8)
    weights = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
    out.backward(weights)
    assert torch.equal(gradient(x), mask * weights)
    assert torch.equal(gradient(residual), weights) if with_residual else residual.grad is None


@pytest.mark.parametrize("size", [16, 12], ids=["compiled", "plain"])
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16, None], ids=str)
def test_bfloat16_rounds_the_result_alone(size: int, residual_dtype: torch.dtype | None) -> None:
    """1 / (1 - 0.3) is no bfloat16: rounded, it would make up for 0.16 % too much, and in the forward alone."""
    drop = Drop(0.3, place_key(1, 2, RESIDUAL_1))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, size, generator=generator).bfloat16().requires_grad_()
    residual = None
    if residual_dtype is not None:
        residual = torch.randn(4, 3, size, generator=generator).to(residual_dtype)
    mask = keep_mask(drop, (1, 4, 3, size), first_row=0, first_column=0, like=LIKE)[0]
    exact = mask * x.detach().double() + (0 if residual is None else residual.double())
    out = drop_add(x, residual, drop)
    assert out.dtype == (residual_dtype or torch.bfloat16)
    # Half a unit in the last place of the result, and the roundings of float32 before it.
    slack = torch.finfo(out.dtype).eps / 2 * exact.abs() + 4 * torch.finfo(torch.float32).eps * 8
    assert bool(((out.double() - exact).abs() <= slack).all())
    out.backward(torch.ones_like(out))
    assert torch.equal(gradient(x), mask.bfloat16())


@pytest.mark.parametrize("at_once", [1, 100, 2 * 5 * 4 * 7, 1 << 22])
def test_masks_drawn_in_parts_are_the_same(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def mask() -> Tensor:
        return keep_mask(Drop(0.3, 8), (2, 5, 9, 4), first_row=3, first_column=2, like=LIKE)

    whole = mask()
    monkeypatch.setattr(drop_module, "_DRAWS_AT_ONCE", at_once)
    assert torch.equal(mask(), whole)


def gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def test_drop_add_takes_views() -> None:
    drop = Drop(0.4, 3)
    whole = torch.arange(4.0 * 5 * 16).view(4, 5, 16)
    view = whole[:, :1, :8]
    assert torch.equal(drop_add(view, view, drop), drop_add(view.clone(), view.clone(), drop))


def test_without_numba_the_masks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    drop, x = Drop(0.4, 3), torch.ones(4, 5, 16)
    compiled = drop_add(x, None, drop)
    monkeypatch.setattr(dropout, "drop_rows", None)
    assert torch.equal(drop_add(x, None, drop), compiled)
