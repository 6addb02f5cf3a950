"""The memory meter on known allocations, each of its blind spots included: to the byte."""

from __future__ import annotations

import threading

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.runtime.live import live_tensor_bytes
from megagraph_cli.runtime.meters import metered
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


def test_freeing_something_older_is_seen() -> None:
    older = tensor(7000)
    before = live_tensor_bytes()
    with metered(CPU) as reading:
        del older
        newer = tensor(2000)
        larger = tensor(6000)
    assert reading.start_bytes == before
    assert reading.peak_bytes == before - 7000 + newer.nbytes + larger.nbytes
    assert reading.end_bytes == live_tensor_bytes()


def test_what_an_earlier_block_allocated_and_this_one_frees_counts_once() -> None:
    with metered(CPU):
        older = tensor(7000)
    with metered(CPU) as reading:
        del older
        larger = tensor(9000)
    assert reading.peak_bytes == max(reading.start_bytes, reading.start_bytes - 7000 + larger.nbytes)
    assert reading.end_bytes == reading.start_bytes - 7000 + larger.nbytes


def test_a_block_metered_from_zero_sees_the_end_of_what_the_block_before_it_allocated() -> None:
    """So a backward's rise is what it adds to the activations that are still held."""
    with metered(CPU, from_zero=True):
        saved = tensor(7000)
    with metered(CPU, from_zero=True) as reading:
        smaller = tensor(2000)
        del saved
        larger = tensor(6000)
    assert reading.peak_bytes == max(smaller.nbytes, smaller.nbytes + larger.nbytes - 7000)
    assert reading.end_bytes == smaller.nbytes + larger.nbytes - 7000


def test_a_view_keeps_something_older_alive() -> None:
    older = tensor(7000)
    with metered(CPU) as reading:
        view = older[:1]
        del older
        newer = tensor(2000)
        del view
        tensor(8000)
    assert reading.peak_bytes == reading.start_bytes + newer.nbytes + 8000 - 7000


def test_numpy_memory_that_becomes_a_tensor_counts_until_it_dies() -> None:
    with metered(CPU) as reading:
        first = torch.from_numpy(np.zeros(1000))
        del first
        second = torch.from_numpy(np.zeros(300))
        third = tensor(100)
    assert reading.peak_bytes - reading.start_bytes == 8000
    assert reading.end_bytes - reading.start_bytes == second.nbytes + third.nbytes
    assert reading.end_bytes == live_tensor_bytes()


@njit(cache=True)
def numba_zeros(count: int) -> NDArray[np.float64]:
    return np.zeros(count)


def test_numba_memory_that_becomes_a_tensor_counts() -> None:
    numba_zeros(1)
    with metered(CPU) as reading:
        kept = torch.from_numpy(numba_zeros(500))
    assert reading.peak_bytes - reading.start_bytes == kept.nbytes == 4000


def test_what_another_thread_leaves_alive_counts_from_the_start() -> None:
    """Nothing tells when it came, so it counts together with what was freed before: never too small."""
    kept: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: kept.append(tensor(3000)))
    with metered(CPU) as reading:
        tensor(500)
        thread.start()
        thread.join()
    assert reading.peak_bytes - reading.start_bytes == 3000 + 500
    assert reading.end_bytes == live_tensor_bytes()


def test_what_another_thread_frees_is_seen() -> None:
    older = [tensor(4000)]
    thread = threading.Thread(target=older.clear)
    with metered(CPU) as reading:
        thread.start()
        thread.join()
        kept = tensor(1000)
    assert reading.peak_bytes == reading.start_bytes
    assert reading.end_bytes == reading.start_bytes - 4000 + kept.nbytes


def test_numpy_memory_of_another_thread_comes_and_goes_unheard() -> None:
    thread = threading.Thread(target=lambda: torch.from_numpy(np.zeros(5000)))
    with metered(CPU) as reading:
        thread.start()
        thread.join()
        kept = tensor(100)
    assert reading.peak_bytes - reading.start_bytes == reading.end_bytes - reading.start_bytes == kept.nbytes


def test_numpy_is_overheard_inside_the_block_alone() -> None:
    from_numpy = torch.from_numpy
    with metered(CPU, from_zero=True) as reading:
        assert torch.from_numpy is not from_numpy
        kept = torch.from_numpy(np.zeros(10))
    assert torch.from_numpy is from_numpy
    assert reading.peak_bytes == kept.nbytes


def test_categories_add_up_to_the_peak() -> None:
    weight, state, other = tensor(500), tensor(700), tensor(90)
    holders = {"parameters": [weight, weight[:3]], "optimizer": [state]}
    with metered(CPU, holders=holders) as reading:
        made = tensor(40)
    known = {name: reading.categories[name] for name in ("parameters", "optimizer", "activations")}
    assert known == {"parameters": 500, "optimizer": 700, "activations": made.nbytes}
    assert reading.categories["buffers"] >= other.nbytes
    assert sum(reading.categories.values()) == reading.peak_bytes


def test_readings_from_zero_tell_changes_alone() -> None:
    held = tensor(9000)
    with metered(CPU, from_zero=True) as reading:
        kept = tensor(100)
    assert (reading.start_bytes, reading.peak_bytes, reading.end_bytes) == (0, 100, 100)
    assert held.nbytes + kept.nbytes == 9100
