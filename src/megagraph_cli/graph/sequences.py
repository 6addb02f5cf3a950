"""Sequences of a batch of targets: sampled nodes, super nodes, and the graphs they induce, as bits.

Legend: T targets, N' ``num_sampled`` (the target included), N_s ``num_super``, K = N' + N_s the most clusters a
sequence can touch.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.graph.draws import draw_slice
from megagraph_cli.graph.graph import Graph
from megagraph_cli.graph.induced import induce_slice
from megagraph_cli.graph.sampler import ARMS, SamplingArrays, sampling_arrays

_TRIES_PER_ROW = 16  # paper: Sampling
_SLICES_PER_THREAD = 4  # targets near hubs are slower than others: small slices even the threads out


@dataclass(frozen=True)
class Sequences:
    """T sequences; padding is -1 in ids and arms, 0 in bits, scales and ``coarse_index``.

    ``nodes`` int32 [T, N'] (column 0 the target), ``arms`` int8 [T, N'] (which arm drew the node, -1 for the
    target), ``supers`` int32 [T, N_s] (cluster ids, first the target's own).

    ``node_bits`` uint8 [T, N', ceil(N'/8)]: rows of A + I among the nodes, packed with bitorder="little";
    ``node_scale`` float32 [T, N']: (degree in the whole graph + 1)^-1/2. Then A^[i, j] = bit * scale_i * scale_j.

    ``coarse_bits`` uint8 [T, K, ceil(K/8)] and ``coarse_scale`` float32 [T, K]: the same for A^_c among the
    distinct clusters of the nodes and of the super nodes, each once, in order of first appearance;
    ``coarse_index`` int16 [T, N' + N_s]: the place of every row's cluster (nodes, then super nodes) among them.
    Without super nodes these three are empty (K = 0). Source: paper, Sampling, Coarsening, Bias channels.
    """

    nodes: NDArray[np.int32]
    arms: NDArray[np.int8]
    supers: NDArray[np.int32]
    node_bits: NDArray[np.uint8]
    node_scale: NDArray[np.float32]
    coarse_bits: NDArray[np.uint8]
    coarse_scale: NDArray[np.float32]
    coarse_index: NDArray[np.int16]

    def rows(self, start: int, stop: int) -> Sequences:
        """Some consecutive sequences; no copies."""
        return Sequences(*(getattr(self, field.name)[start:stop] for field in fields(self)))


class _Rows(NamedTuple):
    """The arrays of some consecutive sequences, in the form that compiled kernels take."""

    nodes: NDArray[np.int32]
    arms: NDArray[np.int8]
    supers: NDArray[np.int32]
    node_bits: NDArray[np.uint8]
    node_scale: NDArray[np.float32]
    coarse_bits: NDArray[np.uint8]
    coarse_scale: NDArray[np.float32]
    coarse_index: NDArray[np.int16]

    def part(self, start: int, stop: int) -> _Rows:
        return _Rows._make(array[start:stop] for array in self)


class _Draw(NamedTuple):
    """What all sequences of one call have in common."""

    arrays: SamplingArrays
    targets: NDArray[np.int64]
    key: NDArray[np.int64]
    weights: NDArray[np.float64]
    max_tries: int


def build_sequences(
    graph: Graph,
    targets: NDArray[np.int64],
    *,
    num_sampled: int,
    num_super: int,
    num_global: int = 0,
    weights: NDArray[np.float64],
    rng_seed: int,
    epoch: int,
    view: int,
    threads: int,
) -> Sequences:
    """Build the sequences of ``targets`` int64 [T]; a target of -1 gives a sequence of padding alone.

    ``weights`` float64 [4] are the sampling weights p of the arms (sampler.ARMS). Every sequence is a pure
    function of (rng_seed, epoch, target, view, weights): threads and the other targets change nothing.
    Source: paper, Sampling.
    """
    assert num_sampled >= 1, f"num_sampled {num_sampled} leaves no room for the target"
    assert num_super >= 0
    assert num_sampled + num_super < 2**15, "coarse_index counts clusters in int16"
    assert targets.ndim == 1
    assert targets.size == 0 or (targets.min() >= -1 and targets.max() < graph.num_nodes), "no such target"
    weights = np.ascontiguousarray(weights, dtype=np.float64)
    assert weights.shape == (len(ARMS),)
    assert bool(np.isfinite(weights).all()), f"sampling weights {weights}"
    assert weights.min() >= 0.0, f"sampling weights {weights}"
    rows = _padding(targets.shape[0], num_sampled, num_super)
    draw = _Draw(
        sampling_arrays(graph),
        np.ascontiguousarray(targets, dtype=np.int64),
        np.array([rng_seed, epoch, view], dtype=np.int64),
        weights,
        _TRIES_PER_ROW * (num_sampled + num_super + num_global),
    )
    _build(draw, rows, max(1, threads))
    return Sequences(*rows)


def _build(draw: _Draw, rows: _Rows, threads: int) -> None:
    num_targets = draw.targets.shape[0]
    if threads == 1 or num_targets < 2:
        _build_slice(draw, rows, 0, num_targets)
        return
    cuts = np.linspace(0, num_targets, min(threads * _SLICES_PER_THREAD, num_targets) + 1).astype(int).tolist()
    with ThreadPoolExecutor(threads, thread_name_prefix="sequences") as pool:
        parts = [pool.submit(_build_slice, draw, rows, *cut) for cut in pairwise(cuts)]
        for part in parts:
            part.result()


def _build_slice(draw: _Draw, rows: _Rows, start: int, stop: int) -> None:
    part = rows.part(start, stop)
    draw_slice(
        draw.arrays,
        draw.targets[start:stop],
        draw.key,
        draw.weights,
        draw.max_tries,
        part.nodes,
        part.arms,
        part.supers,
    )
    induce_slice(draw.arrays, part)


def _padding(num_targets: int, num_sampled: int, num_super: int) -> _Rows:
    clusters = num_sampled + num_super if num_super else 0

    def ids(width: int, dtype: type[Any]) -> NDArray[Any]:
        return np.full((num_targets, width), -1, dtype=dtype)

    return _Rows(
        nodes=ids(num_sampled, np.int32),
        arms=ids(num_sampled, np.int8),
        supers=ids(num_super, np.int32),
        node_bits=np.zeros((num_targets, num_sampled, -(-num_sampled // 8)), dtype=np.uint8),
        node_scale=np.zeros((num_targets, num_sampled), dtype=np.float32),
        coarse_bits=np.zeros((num_targets, clusters, -(-clusters // 8)), dtype=np.uint8),
        coarse_scale=np.zeros((num_targets, clusters), dtype=np.float32),
        coarse_index=np.zeros((num_targets, clusters), dtype=np.int16),
    )


def pack(sequences: Sequences) -> NDArray[np.uint8]:
    """The content of all arrays, one after another, as bytes."""
    arrays = [getattr(sequences, field.name) for field in fields(Sequences)]
    return np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays])


def unpack(parts: NDArray[np.uint8], num_targets: int, num_sampled: int, num_super: int) -> Sequences:
    """The first ``num_targets`` sequences of packed parts [P, n], all of as many sequences, joined in their order."""
    share = -(-num_targets // len(parts))
    joined, start = [], 0
    for like in _padding(1, num_sampled, num_super):
        size = share * like.nbytes
        arrays = [part[start : start + size].copy().view(like.dtype).reshape(share, *like.shape[1:]) for part in parts]
        joined.append(np.concatenate(arrays)[:num_targets])
        start += size
    assert start == parts.shape[1]
    return Sequences(*joined)
