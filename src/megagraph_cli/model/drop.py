"""Dropout whose masks no plan changes: each draw is a hash of what it is for, not of where or when it is computed.

A key stands for (rng_seed, step, layer, place); the draw of one element is a hash of (key, sequence's place in the
global batch, head, global row, global column), the same in the compiled kernels and in torch. Nothing is stored: the
backward draws again. Words are 32 bits, kept in int64 tensors.

Legend: B sequences, R rows, C columns, H heads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ATTENTION, RESIDUAL_1, RESIDUAL_2, INPUT = range(4)
"""Places of a layer, or of the model, that drop."""

ROW_STEP, HEAD_STEP, COLUMN_STEP = 0x85EBCA6B, 0xC2B2AE35, 0x9E3779B9
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 0xFFFFFFFF
_LONG = 0xFFFFFFFFFFFFFFFF


class Drop(NamedTuple):
    """Dropout of one place: probability, key, and where the first sequence and row here stand in the global batch."""

    probability: float
    key: int
    first_sequence: int = 0
    first_row: int = 0

    @property
    def dropped(self) -> int:
        """How many of the 2^32 words are dropped."""
        return round(self.probability * 2**32)

    @property
    def kept(self) -> float:
        """What survives is multiplied by this."""
        return 2**32 / (2**32 - self.dropped)


def place_key(seed: int, layer: int, place: int) -> int:
    """The 64-bit key of one place of a layer; ``seed`` stands for (rng_seed, step)."""
    return _mix_long(_mix_long(seed + _GOLDEN * (layer + 1)) + _GOLDEN * (place + 1))


def _mix_long(value: int) -> int:
    """SplitMix64 (Steele, Lea, Flood 2014)."""
    value &= _LONG
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _LONG
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _LONG
    return value ^ (value >> 31)


def sequence_keys(drop: Drop, batch: int) -> NDArray[np.uint64]:
    """Keys uint64 [B] of the sequences here."""
    with np.errstate(over="ignore"):
        value = np.uint64(drop.key) + np.uint64(_GOLDEN) * np.arange(
            drop.first_sequence + 1, drop.first_sequence + 1 + batch, dtype=np.uint64
        )
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = value ^ (value >> np.uint64(31))
    return mixed


def _mix(x: Tensor) -> Tensor:
    """lowbias32 (Wellons 2018) without its last step, which leaves the upper bits as they are. Works in place."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x &= _WORD
    x ^= x >> 15
    # 32 by 32 bits may pass 2^63, but wraps around without touching the low half.
    x *= 0x846CA68B
    return x.bitwise_and_(_WORD)


def _mix_whole(x: Tensor) -> Tensor:
    x = _mix(x)
    return x ^ (x >> 16)


def keep_mask(
    drop: Drop, shape: tuple[int, int, int, int], *, first_row: int, first_column: int, like: Tensor
) -> Tensor:
    """Factors 0 or 1 / (1 - p) [H, B, R, C] in the dtype and on the device of ``like``."""
    heads, batch, rows, columns = shape
    keys = sequence_keys(drop, batch)
    halves = np.stack((keys & np.uint64(_WORD), keys >> np.uint64(32))).astype(np.int64)
    low, high = torch.from_numpy(halves).to(like.device, non_blocking=True).view(2, batch, 1)

    def steps(first: int, count: int, step: int) -> Tensor:
        return (torch.arange(first, first + count, device=like.device) * step).bitwise_and_(_WORD)

    by_row = low ^ _mix_whole((high + steps(first_row, rows, ROW_STEP)) & _WORD)
    words = _mix_whole((by_row + steps(0, heads, HEAD_STEP).view(-1, 1, 1)) & _WORD)
    draws = _mix((words.unsqueeze(-1) + steps(first_column, columns, COLUMN_STEP)) & _WORD)
    # The draw counts as a signed number, as in the compiled kernels: words from 2^31 on come first.
    return ((draws ^ 2**31) >= drop.dropped).to(like.dtype).mul_(drop.kept)
