"""The memory meter on known allocations, each of its blind spots included: to the byte."""

from __future__ import annotations

import numpy as np
import torch

from megagraph_cli.runtime.meters import live_tensor_bytes, metered
from tests.runtime.small import CPU


def tensor(size_bytes: int) -> torch.Tensor:
    return torch.zeros(size_bytes, dtype=torch.uint8)


def test_what_lives_before_counts_once_for_each_storage() -> None:
    before = live_tensor_bytes()
    held = tensor(40_000)
    views = [held[:10], held.view(200, 200), held.detach()]
    assert live_tensor_bytes() - before == 40_000
    del held
    assert live_tensor_bytes() - before == 40_000
    del views
    assert live_tensor_bytes() == before


def test_tensors_over_numpy_memory_made_before_count_as_live() -> None:
    before = live_tensor_bytes()
    batch = torch.from_numpy(np.zeros(1000))
    assert live_tensor_bytes() - before == 8000
    with metered(CPU) as reading:
        moved = batch + batch
    assert reading.start_bytes == before + 8000
    assert reading.peak_bytes - reading.start_bytes == moved.nbytes


def test_a_block_that_allocates_nothing_peaks_where_it_starts() -> None:
    held = tensor(1000)
    with metered(CPU) as reading:
        held.add_(held)
    assert reading.start_bytes == reading.peak_bytes == reading.end_bytes == live_tensor_bytes()


def test_the_peak_is_the_most_alive_at_once_and_the_end_what_is_left() -> None:
    """5000 alone, then 3000 + 1000 kept: the peak is 5000, not the 9000 that were asked for in all."""
    with metered(CPU) as reading:
        first = tensor(5000)
        del first
        kept = [tensor(3000), tensor(1000)]
    assert reading.peak_bytes - reading.start_bytes == 5000
    assert reading.end_bytes - reading.start_bytes == sum(t.nbytes for t in kept)


def test_temporaries_inside_an_operator_count() -> None:
    """exp + exp makes two temporaries of 8000 bytes before the sum's own 8000."""
    x = torch.ones(1000, dtype=torch.float64)
    with metered(CPU) as reading:
        total = x.exp() + x.exp()
    assert reading.peak_bytes - reading.start_bytes == 3 * 8000
    assert reading.end_bytes - reading.start_bytes == total.nbytes


def test_what_autograd_keeps_counts_until_the_backward_frees_it() -> None:
    weight = torch.ones(1000, dtype=torch.float64, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    with metered(CPU) as ahead:
        out = weight.exp().sum()
    assert ahead.end_bytes - ahead.start_bytes == 8000 + 8  # exp keeps its result
    with metered(CPU) as both:
        weight.exp().sum().backward()
    assert both.end_bytes == both.start_bytes
    assert both.peak_bytes - both.start_bytes >= 2 * 8000  # the result of exp and a gradient
    assert out.isfinite()


def test_freeing_something_older_is_not_seen_so_the_reading_is_never_too_small() -> None:
    """The profiler does not know blocks from before it began; the peak is above the truth by the bytes freed."""
    older = tensor(7000)
    before = live_tensor_bytes()
    with metered(CPU) as reading:
        del older
        newer = tensor(2000)
    true_peak = before - 7000 + newer.nbytes
    assert reading.start_bytes == before
    assert reading.peak_bytes == true_peak + 7000


def test_numpy_memory_taken_inside_the_block_is_not_seen() -> None:
    """Why batches are made before the metered step, where they count as live."""
    with metered(CPU) as reading:
        batch = torch.from_numpy(np.zeros(1000))
    assert reading.peak_bytes == reading.start_bytes
    assert live_tensor_bytes() - reading.start_bytes == batch.nbytes


def test_readings_from_zero_tell_changes_alone() -> None:
    held = tensor(9000)
    with metered(CPU, from_zero=True) as reading:
        kept = tensor(100)
    assert (reading.start_bytes, reading.peak_bytes, reading.end_bytes) == (0, 100, 100)
    assert held.nbytes + kept.nbytes == 9100
