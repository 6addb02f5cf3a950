"""Streams of random bits for compiled kernels: SplitMix64 (Steele, Lea, Flood 2014).

A stream starts at a hash of what it is for, so what is drawn from it is a pure function of that. ``state`` uint64
holds one stream a place.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
UNIT = 2.0**-53

Place = int | np.uint64
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
UNIFORM_SHIFT = np.uint64(11)


@njit(nogil=True, cache=True)
def mix(value: np.uint64) -> np.uint64:
    """The bits of a counter, mixed: the next word of a stream whose state it is."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


@njit(nogil=True, cache=True)
def sequence_key(key: NDArray[np.int64], target: np.int64, purpose: int) -> np.uint64:
    """Hash of (rng_seed, epoch, view), the target and what is drawn for it."""
    value = GOLDEN
    for part in key:
        value = mix((value ^ np.uint64(part)) + GOLDEN)
    value = mix((value ^ np.uint64(target)) + GOLDEN)
    return mix((value ^ np.uint64(purpose)) + GOLDEN)


@njit(nogil=True, cache=True)
def start_stream(state: NDArray[np.uint64], place: int, key: np.uint64, number: int) -> None:
    """Put the stream of try ``number`` for ``key`` at ``place``."""
    state[place] = mix((key ^ np.uint64(number)) + GOLDEN)


@njit(nogil=True, cache=True)
def bits(state: NDArray[np.uint64], place: Place) -> np.uint64:
    """64 random bits."""
    state[place] += GOLDEN
    return mix(state[place])


@njit(nogil=True, cache=True)
def uniform(state: NDArray[np.uint64], place: Place) -> float:
    """Uniform in [0, 1), a multiple of 2^-53."""
    return np.float64(bits(state, place) >> UNIFORM_SHIFT) * UNIT


@njit(nogil=True, cache=True)
def below(word: np.uint64, count: np.uint64) -> np.int64:
    """The upper half of a word scaled to [0, count), for counts below 2^32."""
    return np.int64(((word >> HALF) * count) >> HALF)
