"""About how long parts of the profile take: good enough to share a budget out, and mended by ``pace.py`` on the way."""

from __future__ import annotations

from collections.abc import Sequence

from megagraph_cli.artifacts.profile import Link
from megagraph_cli.runtime.grid import LARGER_MESSAGES, LARGER_S, PLAIN, Sizes, Way

_SAMPLE_S = 0.05
"""Building a small micro-batch and gathering what every rank measured."""
_PROBE_S = 0.05
"""Building a stage, its gradients and its optimizer."""
_METERED = 2.0
"""By how much a pass takes longer when its memory is metered."""
_AGAIN = 1.3
"""A layer that runs again in the backward against one that does not."""
_MESSAGE_S: dict[Link, float] = {"host": 0.02, "network": 0.5}
_TARGET_S = 1e-4
_LARGER_TIMES = 16
"""How often a message that does not take long is sent."""
_BYTES_PER_S = 1e9
_PIECE_S, _NUMBER_S = 1e-3, 5e-8
"""A piece of touched rows, and a number in them."""


def modules_s(sizes: Sizes, way: Way, cp: int, link: Link, sequence_s: float) -> float:
    """What ``measure_modules`` takes; ``sequence_s`` is one sequence forward and backward in one whole layer."""
    kinds = [*sizes.layers, *sizes.deep]
    samples = [(layers, size) for layers in kinds for size in sizes.microbatches_of(layers)]
    others = (way.context == "ring") + 2 * (way == PLAIN and link == "host")
    # Input, head and last layer do about half a layer's work or less.
    sequences = sum(layers * size for layers, size in samples) + others * sum(sizes.microbatches) / 2
    passes = sizes.runs + 1 + _METERED * (3 if way.context == "allgather" else 1)
    each_s = sequence_s / cp * (_AGAIN if way.recompute == "full" else 1.0)
    fixed_s = _SAMPLE_S * (len(samples) + others * len(sizes.microbatches)) + _PROBE_S * (len(kinds) + others)
    # A fast device runs so many sequences at once that the host's share counts.
    built_s = _TARGET_S * (sum(size for _, size in samples) + others * sum(sizes.microbatches))
    return passes * each_s * sequences + built_s + fixed_s


def optimizer_s(num_layers: int) -> float:
    """What ``measure_optimizer`` takes."""
    return _PROBE_S + 0.01 * num_layers


def touched_s(sizes: Sequence[tuple[int, int]], dim: int, runs: int) -> float:
    """What ``measure_touched`` takes."""
    return _PROBE_S + (runs + 1) * sum(_PIECE_S * pieces + _NUMBER_S * rows * dim for rows, pieces in sizes)


def host_s(targets: int, runs: int) -> float:
    """What ``measure_host`` takes."""
    return _SAMPLE_S + _TARGET_S * targets * (runs + 1)


def messages_s(count: int, link: Link) -> float:
    """What measuring ``count`` message sizes of one kind takes."""
    return count * _MESSAGE_S[link]


def larger_s(most_bytes: int) -> float:
    """What measuring the larger messages up to ``most_bytes`` takes."""
    sizes = [min(size, most_bytes) for size in LARGER_MESSAGES if size // 8 < most_bytes]
    return sum(min(_LARGER_TIMES * size / _BYTES_PER_S, 4 * LARGER_S) for size in sizes)
