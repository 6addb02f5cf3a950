"""Dropout whose masks no plan changes: each draw is a hash of what it is for, not of where or when it is computed.

A key stands for (rng_seed, step, layer, place); the draw of one element is a hash of (key, sequence's place in the
global batch, head, global row, global column), the same in the compiled kernels and in torch. Nothing is stored: the
backward draws again. Words are 32 bits, kept in int64 tensors.

Legend: B sequences, R rows, C columns, H heads.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

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
_DRAWS_AT_ONCE = 1 << 22
"""Draws that are words of 8 bytes at the same time; 32 MiB stay in a large device's cache."""

Words = TypeVar("Words", NDArray[np.int64], Tensor)


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


def sequence_keys(drop: Drop, places: Words) -> Words:
    """64-bit keys of the sequences at ``places`` int64 [B] here, on whichever device those are; int64 wraps around."""
    value = (places + (drop.first_sequence + 1)) * _signed(_GOLDEN) + _signed(drop.key)
    value = (value ^ _shifted(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shifted(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shifted(value, 31)


def _signed(word: int) -> int:
    """The int64 of the same 64 bits."""
    return word - 2**64 if word >= 2**63 else word


def _shifted(value: Words, bits: int) -> Words:
    """A right shift that brings in zeros, not copies of the sign."""
    return (value >> bits) & (_LONG >> bits)


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
    # Made on the device: a copy from the host would wait for the device at every place of every layer.
    keys = sequence_keys(drop, torch.arange(batch, device=like.device)).unsqueeze(-1)

    def steps(first: int, count: int, step: int) -> Tensor:
        return (torch.arange(first, first + count, device=like.device) * step).bitwise_and_(_WORD)

    by_row = (keys & _WORD) ^ _mix_whole((_shifted(keys, 32) + steps(first_row, rows, ROW_STEP)) & _WORD)
    words = _mix_whole((by_row + steps(0, heads, HEAD_STEP).view(-1, 1, 1)) & _WORD)
    by_column = steps(first_column, columns, COLUMN_STEP)
    mask = like.new_empty(shape)
    rows_at_once = max(1, _DRAWS_AT_ONCE // (heads * batch * columns))
    cuts = list(range(rows_at_once, rows, rows_at_once))
    for words_part, mask_part in zip(words.tensor_split(cuts, 2), mask.tensor_split(cuts, 2), strict=True):
        draws = _mix((words_part.unsqueeze(-1) + by_column) & _WORD)
        # The draw counts as a signed number, as in the compiled kernels: words from 2^31 on come first.
        mask_part.copy_((draws ^ 2**31) >= drop.dropped)
    return mask.mul_(drop.kept)
