"""Steps of the compiled attention on one row and one tile of columns: each a short loop over vectors of eight heads.

Kept apart, and called with few arguments, so that each loop has the processor's registers to itself.

Legend: a *line* is E vectors in a row, a *tile* one vector for each of ``n`` columns, a *sheet* one line for each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from megagraph_cli.model import simd
from megagraph_cli.model import simd_functions as functions
from megagraph_cli.model.drop import COLUMN_STEP, HEAD_STEP, ROW_STEP

LOG2E = 1.4426950408889634
_LONG = np.int64(0)
_ROW_STEP, _HEAD_STEP, _COLUMN_STEP = np.uint32(ROW_STEP), np.uint32(HEAD_STEP), np.uint32(COLUMN_STEP)


@njit(nogil=True)
def scale_line(zero, source, stride, factor, target, step, size):
    """A line with one stride -> the same with another, times the vector ``factor``."""
    for e in range(size):
        simd.store(target + e * step, simd.mul(simd.load(zero, source + e * stride), factor))


@njit(nogil=True)
def clear(zero, tile, n):
    for j in range(n):
        simd.store(tile + j * simd.size(zero), simd.splat(zero))


@njit(nogil=True)
def set_bias(zero, features, stride, index, n, weights, channels, tile):
    """tile[j] = sum over m of channel m of column index[j] times ``weights`` [M, 8]; channels lie side by side."""
    vec, item = simd.size(zero), simd.size(zero) // 8
    whole = channels - channels % 6
    if whole > 0:
        w6 = simd.load6(zero, weights, vec)
        for j in range(n):
            at = features + simd.read(_LONG, index + 8 * j) * stride
            simd.store(tile + j * vec, simd.dot_spread6(simd.splat(zero), w6, at, item))
    else:
        for j in range(n):
            simd.store(tile + j * vec, simd.splat(zero))
    for m in range(6, whole, 6):
        w6 = simd.load6(zero, weights + m * vec, vec)
        for j in range(n):
            at = features + simd.read(_LONG, index + 8 * j) * stride + m * item
            simd.store(tile + j * vec, simd.dot_spread6(simd.load(zero, tile + j * vec), w6, at, item))
    for m in range(whole, channels):
        weight = simd.load(zero, weights + m * vec)
        for j in range(n):
            feature = simd.read(zero, features + simd.read(_LONG, index + 8 * j) * stride + m * item)
            simd.store(tile + j * vec, simd.muladd(simd.splat(feature), weight, simd.load(zero, tile + j * vec)))


@njit(nogil=True)
def add_products(zero, line, sheet, n, size, tile):
    """tile[j] += line . sheet[j]."""
    vec = simd.size(zero)
    step = size * vec
    whole = size - size % 8
    for e in range(0, whole, 8):
        line8 = simd.load8(zero, line + e * vec, vec)
        for j in range(n):
            at = tile + j * vec
            simd.store(at, simd.dot8(simd.load(zero, at), line8, sheet + j * step + e * vec, vec))
    for e in range(whole, size):
        one = simd.load(zero, line + e * vec)
        for j in range(n):
            at = tile + j * vec
            simd.store(at, simd.muladd(one, simd.load(zero, sheet + j * step + e * vec), simd.load(zero, at)))


@njit(nogil=True)
def add_lines(zero, tile, sheet, n, size, target, stride, first, decay):
    """target = (0 if ``first``, else target times the vector at ``decay``) + sum over j of tile[j] times sheet[j]."""
    vec = simd.size(zero)
    step = size * vec
    whole = size - size % 8
    for e in range(0, whole, 8):
        sums = simd.zeros8(zero)
        if not first:
            sums = simd.scale8(simd.load8(zero, target + e * stride, stride), simd.load(zero, decay))
        for j in range(n):
            sums = simd.axpy8(sums, simd.load(zero, tile + j * vec), sheet + j * step + e * vec, vec)
        simd.store8(target + e * stride, stride, sums)
    for e in range(whole, size):
        one = simd.splat(zero)
        if not first:
            one = simd.mul(simd.load(zero, target + e * stride), simd.load(zero, decay))
        for j in range(n):
            one = simd.muladd(simd.load(zero, tile + j * vec), simd.load(zero, sheet + j * step + e * vec), one)
        simd.store(target + e * stride, one)


@njit(nogil=True)
def add_outer(zero, tile, line, n, size, sheet):
    """sheet[j] += tile[j] times line."""
    vec = simd.size(zero)
    step = size * vec
    whole = size - size % 8
    for e in range(0, whole, 8):
        line8 = simd.load8(zero, line + e * vec, vec)
        for j in range(n):
            simd.add_outer8(sheet + j * step + e * vec, vec, simd.load(zero, tile + j * vec), line8)
    for e in range(whole, size):
        one = simd.load(zero, line + e * vec)
        for j in range(n):
            at = sheet + j * step + e * vec
            simd.store(at, simd.muladd(simd.load(zero, tile + j * vec), one, simd.load(zero, at)))


@njit(nogil=True)
def exponentiate(zero, tile, n, place, sums, first, decay):
    """One more tile of an online softmax: tile[j] = 2^(tile[j] - maximum so far).

    The vectors at ``place`` and ``sums`` are the running maximum and sum; that at ``decay`` becomes the factor by
    which what was summed before shrinks.
    """
    vec = simd.size(zero)
    top = simd.load(zero, tile)
    for j in range(1, n):
        top = simd.maximum(top, simd.load(zero, tile + j * vec))
    total = simd.splat(zero)
    if not first:
        old = simd.load(zero, place)
        top = simd.maximum(top, old)
        shrink = functions.exp2(simd.sub(old, top))
        simd.store(decay, shrink)
        total = simd.mul(simd.load(zero, sums), shrink)
    for j in range(n):
        p = functions.exp2(simd.sub(simd.load(zero, tile + j * vec), top))
        total = simd.add(total, p)
        simd.store(tile + j * vec, p)
    simd.store(place, top)
    simd.store(sums, total)


@njit(nogil=True, forceinline=True)
def _row_base(key: Any, row: int) -> Any:
    """The part of a word that depends on the sequence and the row."""
    by_row = np.uint32(row) * _ROW_STEP
    mixed = functions.mix(np.uint32(np.uint32(key >> np.uint64(32)) + by_row))
    return np.uint32(np.uint32(key) ^ mixed)


@njit(nogil=True, forceinline=True)
def column_step(column: int) -> Any:
    """What column ``column`` adds to a row's word."""
    return np.uint32(np.uint32(column) * _COLUMN_STEP)


@njit(nogil=True, forceinline=True)
def column_words(key: Any, row: int) -> Any:
    """The words of one row of head 0 for eight columns in a row."""
    return functions.stairs(functions.mix(_row_base(key, row)), _COLUMN_STEP)


@njit(nogil=True, forceinline=True)
def _row_words(key: Any, row: int, lane: int) -> Any:
    """The words of one row for eight heads from ``lane``: hashes of (sequence's key, row, head)."""
    base = _row_base(key, row)
    return functions.mix(functions.stairs(np.uint32(base + np.uint32(lane) * _HEAD_STEP), _HEAD_STEP))


@njit(nogil=True)
def drop_tile(zero, tile, n, index, first_column, key, row, lane, least):
    """Zero the dropped columns of one row; what is kept is not scaled here."""
    vec = simd.size(zero)
    words, one = _row_words(key, row, lane), simd.spread(zero, 1.0)
    for j in range(n):
        column = column_step(first_column + simd.read(_LONG, index + 8 * j))
        # A product, not a choice: LLVM would turn that into a masked store, which some processors crawl through.
        factor = functions.keep(one, words, column, least)
        simd.store(tile + j * vec, simd.mul(simd.load(zero, tile + j * vec), factor))


@njit(nogil=True)
def grad_scores(zero, p, ds, n, lse, delta):
    """Scores in p -> probabilities there; ds = p (ds - delta). ``lse`` (natural) and ``delta`` are addresses."""
    vec = simd.size(zero)
    shift = simd.mul(simd.load(zero, lse), simd.spread(zero, LOG2E))
    mean = simd.load(zero, delta)
    for j in range(n):
        prob = functions.exp2(simd.sub(simd.load(zero, p + j * vec), shift))
        simd.store(p + j * vec, prob)
        simd.store(ds + j * vec, simd.mul(prob, simd.sub(simd.load(zero, ds + j * vec), mean)))


@njit(nogil=True)
def grad_scores_dropped(zero, p, ds, n, lse, delta, index, first_column, key, row, lane, least):
    """As ``grad_scores``, with dropped probabilities left in p and dropped gradients read from ds."""
    vec = simd.size(zero)
    shift = simd.mul(simd.load(zero, lse), simd.spread(zero, LOG2E))
    mean = simd.load(zero, delta)
    words, one = _row_words(key, row, lane), simd.spread(zero, 1.0)
    for j in range(n):
        factor = functions.keep(one, words, column_step(first_column + simd.read(_LONG, index + 8 * j)), least)
        prob = functions.exp2(simd.sub(simd.load(zero, p + j * vec), shift))
        simd.store(p + j * vec, simd.mul(prob, factor))
        kept = simd.mul(simd.load(zero, ds + j * vec), factor)
        simd.store(ds + j * vec, simd.mul(prob, simd.sub(kept, mean)))


@njit(nogil=True)
def grad_channels(zero, ds, features, stride, index, n, channels, grads):
    """grads [M, 8] += sum over j of channel m of column index[j] times ds[j]."""
    vec, item = simd.size(zero), simd.size(zero) // 8
    whole = channels - channels % 6
    for m in range(0, whole, 6):
        sums = simd.load6(zero, grads + m * vec, vec)
        for j in range(n):
            at = features + simd.read(_LONG, index + 8 * j) * stride + m * item
            sums = simd.axpy_spread6(sums, simd.load(zero, ds + j * vec), at, item)
        simd.store6(grads + m * vec, vec, sums)
    for m in range(whole, channels):
        one = simd.load(zero, grads + m * vec)
        for j in range(n):
            feature = simd.read(zero, features + simd.read(_LONG, index + 8 * j) * stride + m * item)
            one = simd.muladd(simd.load(zero, ds + j * vec), simd.splat(feature), one)
        simd.store(grads + m * vec, one)


@njit(nogil=True)
def add_tokens(zero, vectors, first, stop, token, row, n, tile):
    """Add the vectors of global tokens to one row's scores.

    Columns [first, stop) of the tile hold the tokens ``token``, token + 1, ...; ``row`` is the row's own token or
    -1. A pair of two tokens has the mean of both vectors.
    """
    vec = simd.size(zero)
    share = simd.spread(zero, 1.0 if row < 0 else 0.5)
    for j in range(first, stop):
        vector = simd.load(zero, vectors + (token + j - first) * vec)
        simd.store(tile + j * vec, simd.muladd(vector, share, simd.load(zero, tile + j * vec)))
    if row >= 0:
        vector = simd.load(zero, vectors + row * vec)
        for j in range(n):
            part = simd.spread(zero, 0.5 if first <= j < stop else 1.0)
            simd.store(tile + j * vec, simd.muladd(vector, part, simd.load(zero, tile + j * vec)))


@njit(nogil=True)
def grad_tokens(zero, ds, first, stop, token, row, n, grads):
    """Add one row's share of the gradients of the tokens' vectors: the mirror of ``add_tokens``."""
    vec = simd.size(zero)
    share = simd.spread(zero, 1.0 if row < 0 else 0.5)
    for j in range(first, stop):
        to = grads + (token + j - first) * vec
        simd.store(to, simd.muladd(simd.load(zero, ds + j * vec), share, simd.load(zero, to)))
    if row >= 0:
        total = simd.load(zero, grads + row * vec)
        for j in range(n):
            part = simd.spread(zero, 0.5 if first <= j < stop else 1.0)
            total = simd.muladd(simd.load(zero, ds + j * vec), part, total)
        simd.store(grads + row * vec, total)
