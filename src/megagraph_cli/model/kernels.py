"""Compiled attention with a learned bias: one block of rows against one owner's keys, forward and backward.

Eight heads are the eight lanes of a vector, so a score needs no sum across lanes, a channel is one broadcast, and no
number of rows leaves lanes idle. Keys and values come in tiles, packed where they stay in the cache; scores,
probabilities and per-head bias exist for one row of one tile alone. Padded columns are left out, not masked. Scores
are kept in base 2. The bias's offset is left out: softmax does not feel a constant, and its gradient is zero.

Legend: B sequences, R rows, C columns, H heads, E head dim, M channels, G tokens; lines, tiles and sheets as in
tiles.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from megagraph_cli.model import simd, tiles
from megagraph_cli.model import simd_functions as functions

COLUMNS = 32
"""Columns of a tile: sheets of k, v, grad_k and grad_v with E = 8 are 32 KiB in float32."""
MASKED = -1e30
"""Log-sum-exp of a row without columns: finite, so that it weighs nothing and yields no NaN."""
_LN2 = 0.6931471805599453
_FLAG = np.uint8(0)
_KEY = np.uint64(0)


class Frame(NamedTuple):
    """Addresses and strides (bytes) of one block; heads are the contiguous lanes, padded to groups of eight.

    A tensor x lies at ``x``; ``x_b``, ``x_r`` and ``x_e`` are its strides over sequences, rows (or columns) and E.
    ``features`` [B, R, C, M] has its channels side by side. ``channel`` [H/8, M, 8] and ``token`` [H/8, G, 8] are in
    base 2. ``out``, ``grad_q`` [B, R, E, H], ``lse``, ``delta`` [B, R, H], ``padded`` bool [B, C] lie contiguous.
    ``grad`` is the gradient of out. Tokens lie in rows [row_start, row_stop), the first of them token ``row_first``;
    columns alike. ``keys`` uint64 [B] are the sequences' dropout keys (no dropout: address 0), ``least`` the smallest
    draw that is kept; rows and columns of the block start at ``first_row`` and ``first_column`` of the sequence.
    """

    batch: int
    rows: int
    columns: int
    heads: int
    head_dim: int
    channels: int
    tokens: int
    q: int
    q_b: int
    q_r: int
    q_e: int
    k: int
    k_b: int
    k_r: int
    k_e: int
    v: int
    v_b: int
    v_r: int
    v_e: int
    grad: int
    grad_b: int
    grad_r: int
    grad_e: int
    features: int
    features_b: int
    features_r: int
    features_c: int
    padded: int
    out: int
    lse: int
    delta: int
    grad_q: int
    channel: int
    token: int
    row_start: int
    row_stop: int
    row_first: int
    column_start: int
    column_stop: int
    column_first: int
    keys: int
    least: int
    first_row: int
    first_column: int


@njit(nogil=True)
def _hold(memory):
    """Mention an array once more: numba frees it after its last mention, and its address does not count as one."""
    memory[0] = 0.0


@njit(nogil=True)
def _real_columns(padded: int, index: Any) -> int:
    """Write the columns that are not padded; their number."""
    count = 0
    for c in range(index.size):
        if simd.read(_FLAG, padded + c) == 0:
            index[count] = c
            count += 1
    return count


@njit(nogil=True)
def _pack(zero, index, start, n, source, stride_c, stride_e, size, sheet):
    """Copy the lines of n columns side by side."""
    vec = simd.size(zero)
    for j in range(n):
        at = source + index[start + j] * stride_c
        for e in range(size):
            simd.store(sheet + (j * size + e) * vec, simd.load(zero, at + e * stride_e))


@njit(nogil=True)
def _unpack(zero, index, start, n, sheet, factor, size, target, stride_c, stride_e):
    """Write the lines of n columns, times ``factor``, to where they belong."""
    vec = simd.size(zero)
    by = simd.spread(zero, factor)
    for j in range(n):
        to = target + index[start + j] * stride_c
        for e in range(size):
            simd.store(to + e * stride_e, simd.mul(simd.load(zero, sheet + (j * size + e) * vec), by))


@njit(nogil=True)
def _token_columns(index, count, start, n, f):
    """Which places of a tile hold global tokens: (first, stop, token of the first)."""
    if f.column_stop == f.column_start:
        return 0, 0, 0
    before = 0
    while before < count and index[before] < f.column_start:
        before += 1
    first = min(max(before - start, 0), n)
    stop = max(first, min(before - start + f.column_stop - f.column_start, n))
    return first, stop, f.column_first + first - (before - start)


@njit(nogil=True)
def _scores(zero, f, b, g, r, here, n, token_columns, line, sheet, tile):
    """Scores of one row against one tile in base 2; the row's q times log2(e) / sqrt(E) is left in ``line``."""
    vec = simd.size(zero)
    lane = g * vec
    factor = simd.spread(zero, tiles.LOG2E * f.head_dim**-0.5)
    tiles.scale_line(zero, f.q + b * f.q_b + r * f.q_r + lane, f.q_e, factor, line, vec, f.head_dim)
    features = f.features + b * f.features_b + r * f.features_r
    tiles.set_bias(zero, features, f.features_c, here, n, f.channel + lane * f.channels, f.channels, tile)
    tiles.add_products(zero, line, sheet, n, f.head_dim, tile)
    first, stop, token = token_columns
    row = f.row_first + r - f.row_start if f.row_start <= r < f.row_stop else -1
    if row >= 0 or stop > first:
        tiles.add_tokens(zero, f.token + lane * f.tokens, first, stop, token, row, n, tile)
    return row


@njit(nogil=True)
def _finish(zero, f, b, g, r, kept, empty):
    """Normalise one row's output; its log-sum-exp in natural units. A row without columns weighs nothing."""
    vec = simd.size(zero)
    heads = f.heads // 8 * vec
    place = (b * f.rows + r) * heads + g * vec
    out = f.out + (b * f.rows + r) * f.head_dim * heads + g * vec
    if empty:
        simd.store(f.lse + place, simd.spread(zero, MASKED))
        for e in range(f.head_dim):
            simd.store(out + e * heads, simd.splat(zero))
        return
    total = simd.load(zero, f.delta + place)
    tiles.scale_line(zero, out, heads, simd.div(simd.splat(kept), total), out, heads, f.head_dim)
    lse = simd.add(simd.load(zero, f.lse + place), simd.log2(total))
    simd.store(f.lse + place, simd.mul(lse, simd.spread(zero, _LN2)))


@njit(nogil=True, inline="always")
def forward(zero, f, kept, first, last, row_first, row_last):
    """Outputs and log-sum-exp (natural) of rows [row_first, row_last) of sequences [first, last).

    ``zero`` is a scalar of the dtype, ``kept`` 1 / (1 - p) in the same dtype. ``f.delta`` holds the running sums.
    """
    vec, size = simd.size(zero), f.head_dim
    heads = f.heads // 8 * vec
    index = np.empty(f.columns, np.int64)
    memory = np.empty((vec * (size + 1 + COLUMNS + 2 * size * COLUMNS) + 64) // 8, np.float64)
    line = (memory.ctypes.data + 63) // 64 * 64
    decay, tile = line + vec * size, line + vec * (size + 1)
    k, v = tile + vec * COLUMNS, tile + vec * COLUMNS * (size + 1)
    for b in range(first, last):
        count = _real_columns(f.padded + b * f.columns, index)
        for g in range(f.heads // 8):
            lane = g * vec
            for start in range(0, count, COLUMNS):
                n, here = min(COLUMNS, count - start), index.ctypes.data + 8 * start
                _pack(zero, index, start, n, f.k + b * f.k_b + lane, f.k_r, f.k_e, size, k)
                _pack(zero, index, start, n, f.v + b * f.v_b + lane, f.v_r, f.v_e, size, v)
                token_columns = _token_columns(index, count, start, n, f)
                for r in range(row_first, row_last):
                    _scores(zero, f, b, g, r, here, n, token_columns, line, k, tile)
                    place = (b * f.rows + r) * heads + lane
                    tiles.exponentiate(zero, tile, n, f.lse + place, f.delta + place, start == 0, decay)
                    if f.keys != 0:
                        key = simd.read(_KEY, f.keys + 8 * b)
                        tiles.drop_tile(zero, tile, n, here, f.first_column, key, f.first_row + r, 8 * g, f.least)
                    out = f.out + (b * f.rows + r) * size * heads + lane
                    tiles.add_lines(zero, tile, v, n, size, out, heads, start == 0, decay)
            for r in range(row_first, row_last):
                _finish(zero, f, b, g, r, kept, count == 0)
    _hold(memory)


@njit(nogil=True, inline="always")
def backward(zero, f, kept, first, last, row_first, row_last, grad_k, grad_v, grad_channel, grad_token):
    """Gradients of rows [row_first, row_last) of sequences [first, last), from final lse and delta.

    With P = exp(scores - lse) over the whole row and delta = rowsum(grad_out * out): dV = P^T dO,
    dS = P (dO V^T - delta), dQ = dS K, dK = dS^T Q (FlashAttention, with the bias inside S). Writes the real columns
    of grad_k, grad_v [B, C, E, H]; adds to ``grad_channel`` [H/8, M, 8] and ``grad_token`` [H/8, G, 8], which no
    other thread may touch meanwhile.
    """
    vec, size = simd.size(zero), f.head_dim
    heads = f.heads // 8 * vec
    sheet = vec * size * COLUMNS
    index = np.empty(f.columns, np.int64)
    memory = np.empty((vec * (2 * size + 1 + 2 * COLUMNS) + 4 * sheet + 64) // 8, np.float64)
    line = (memory.ctypes.data + 63) // 64 * 64
    grad, unit = line + vec * size, line + 2 * vec * size
    p, ds, k = unit + vec, unit + vec * (1 + COLUMNS), unit + vec * (1 + 2 * COLUMNS)
    v, to_k, to_v = k + sheet, k + 2 * sheet, k + 3 * sheet
    simd.store(unit, simd.spread(zero, 1.0))
    for b in range(first, last):
        count = _real_columns(f.padded + b * f.columns, index)
        key = simd.read(_KEY, f.keys + 8 * b) if f.keys != 0 else _KEY
        for g in range(f.heads // 8):
            lane = g * vec
            for start in range(0, count, COLUMNS):
                n, here = min(COLUMNS, count - start), index.ctypes.data + 8 * start
                _pack(zero, index, start, n, f.k + b * f.k_b + lane, f.k_r, f.k_e, size, k)
                _pack(zero, index, start, n, f.v + b * f.v_b + lane, f.v_r, f.v_e, size, v)
                tiles.clear(zero, to_k, n * size)
                tiles.clear(zero, to_v, n * size)
                token_columns = _token_columns(index, count, start, n, f)
                for r in range(row_first, row_last):
                    place = (b * f.rows + r) * heads + lane
                    row = _scores(zero, f, b, g, r, here, n, token_columns, line, k, p)
                    tiles.scale_line(
                        zero, f.grad + b * f.grad_b + r * f.grad_r + lane, f.grad_e, simd.splat(kept), grad, vec, size
                    )
                    tiles.clear(zero, ds, n)
                    tiles.add_products(zero, grad, v, n, size, ds)
                    at, to = f.lse + place, f.delta + place
                    if f.keys == 0:
                        tiles.grad_scores(zero, p, ds, n, at, to)
                    else:
                        which = (here, f.first_column, key, f.first_row + r, 8 * g, f.least)
                        tiles.grad_scores_dropped(zero, p, ds, n, at, to, *which)
                    tiles.add_outer(zero, p, grad, n, size, to_v)
                    tiles.add_outer(zero, ds, line, n, size, to_k)
                    grad_q = f.grad_q + (b * f.rows + r) * size * heads + lane
                    tiles.add_lines(zero, ds, k, n, size, grad_q, heads, start == 0, unit)
                    features = f.features + b * f.features_b + r * f.features_r
                    mine = grad_channel + lane * f.channels
                    tiles.grad_channels(zero, ds, features, f.features_c, here, n, f.channels, mine)
                    first_token, stop_token, token = token_columns
                    if row >= 0 or stop_token > first_token:
                        mine = grad_token + lane * f.tokens
                        tiles.grad_tokens(zero, ds, first_token, stop_token, token, row, n, mine)
                base = b * f.columns * size * heads + lane
                _unpack(zero, index, start, n, to_k, _LN2, size, grad_k + base, size * heads, heads)
                _unpack(zero, index, start, n, to_v, 1.0, size, grad_v + base, size * heads, heads)
            for r in range(row_first, row_last):
                at = f.grad_q + (b * f.rows + r) * size * heads + lane
                if count > 0:
                    tiles.scale_line(zero, at, heads, simd.spread(zero, size**-0.5), at, heads, size)
                else:
                    for e in range(size):
                        simd.store(at + e * heads, simd.splat(zero))
    _hold(memory)


@njit(nogil=True, inline="always")
def drop_rows(zero, x, residual, out, keys, first, last, rows, size, first_row, least, kept):
    """out = residual + x where kept times ``kept``, over [B, R, D] contiguous, for sequences [first, last).

    ``residual`` is an address or 0 for none; ``size`` = D is a multiple of eight.
    """
    vec = simd.size(zero)
    factor = simd.splat(kept)
    for b in range(first, last):
        key = simd.read(_KEY, keys + 8 * b)
        for r in range(rows):
            words = tiles.column_words(key, first_row + r)
            for d in range(0, size, 8):
                at = ((b * rows + r) * size + d) // 8 * vec
                value, scale = simd.load(zero, x + at), functions.keep(factor, words, tiles.column_step(d), least)
                if residual != 0:
                    simd.store(out + at, simd.muladd(value, scale, simd.load(zero, residual + at)))
                else:
                    simd.store(out + at, simd.mul(value, scale))
