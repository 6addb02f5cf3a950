"""Rows of features in two planes of half bytes, and their products with whole rows, for compiled kernels.

Most of what a draw by similarity does is to look at nodes that it does not take, and most of the time of a look is the
wait for memory. A feature is coded in eight bits, of which the upper four tell nearly always; so those of all features
lie together, first, and the lower four after them, in memory that is seldom read.

A code is q = 16 h + l with h and l from -8 to 7; q + 136 is a byte whose halves are h + 8 and l + 8. A byte of a plane
holds two such halves: in its own lower half that of a feature from the first half of the features, in its upper half
that of one from the second.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

SCALE, UPPER_ERROR, ERROR = -3, -2, -1
"""Where in float32 before the end of the upper plane a row's scale is, and how far the row may be from what the upper
plane tells, and from what both do."""
_TAIL = 12  # bytes of these
LARGEST_CODE = 119
"""The largest code whose upper digit is at most 7."""
OFFSET = 8
"""What is added to a digit."""
_CODE_OFFSET = np.int64(17 * OFFSET)
_LOW, _HIGH = np.int64(15), np.int64(240)

_LANES = 16
_BYTES, _PAIRS, _WORDS = (ir.VectorType(ir.IntType(bits), _LANES) for bits in (8, 16, 32))


@njit(nogil=True, cache=True)
def plane_bytes(columns: int) -> int:
    """Bytes of a plane of a row of so many features: with room for the tail, a multiple of 16."""
    return ((columns + 1) // 2 + _TAIL + _LANES - 1) // _LANES * _LANES


@njit(nogil=True, cache=True)
def write_digits(codes: NDArray[np.int64], row: NDArray[np.uint8]) -> None:
    """Fill the planes of a row from the codes of its features; its tail and what no feature has are left alone."""
    columns = codes.shape[0]
    half, lower = (columns + 1) // 2, plane_bytes(columns)
    for i in range(half):
        first, second = codes[i] + _CODE_OFFSET, _CODE_OFFSET
        if half + i < columns:
            second += codes[half + i]
        row[i] = first >> 4 | (second & _HIGH)
        row[lower + i] = (first & _LOW) | (second & _LOW) << 4


@njit(nogil=True, cache=True)
def read_codes(planes: NDArray[np.uint8], place: int, columns: int, codes: NDArray[np.int16], start: int) -> np.int64:
    """Write the codes of the row at ``place`` into ``codes`` from ``start`` on, those of the second half of its
    features ``plane_bytes`` further on; the sum of them all."""
    half, plane = np.uint64((columns + 1) // 2), np.uint64(plane_bytes(columns))
    # Unsigned places: see slots.find_slot.
    here, own, total = np.uint64(place), np.uint64(start), np.int64(0)
    for i in range(half):
        high, low = np.int64(planes[here + i]), np.int64(planes[here + plane + i])
        first = ((high & _LOW) << 4 | (low & _LOW)) - _CODE_OFFSET
        second = (high & _HIGH | low >> 4) - _CODE_OFFSET
        codes[own + i], codes[own + plane + i] = first, second
        total += first + second
    return total


def _digits_dot(_context: Any, planes: Any, place: Any, codes: Any, start: Any, plane: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        bytes_at, codes_at = (context.make_array(signature.args[i])(context, builder, values[i]).data for i in (0, 2))
        here, own, size = (context.cast(builder, values[i], signature.args[i], types.intp) for i in (1, 3, 4))
        sums = [cgutils.alloca_once(builder, _WORDS) for _ in range(2)]  # type: ignore[no-untyped-call]
        for each in sums:
            builder.store(ir.Constant(_WORDS, None), each)

        def load(array: Any, at: Any, kind: ir.VectorType) -> Any:
            return builder.load(builder.bitcast(builder.gep(array, [at]), kind.as_pointer()), align=1)

        def product(digits: Any, at: Any) -> Any:
            row = builder.sext(load(codes_at, at, _PAIRS), _WORDS)
            return builder.mul(builder.zext(digits, _WORDS), row)

        with cgutils.for_range(builder, builder.udiv(size, ir.Constant(size.type, _LANES))) as loop:
            at = builder.mul(loop.index, ir.Constant(size.type, _LANES))
            both = load(bytes_at, builder.add(here, at), _BYTES)
            first = product(builder.and_(both, ir.Constant(_BYTES, [15] * _LANES)), builder.add(own, at))
            then = builder.add(builder.add(own, size), at)
            last = product(builder.lshr(both, ir.Constant(_BYTES, [4] * _LANES)), then)
            for each, found in zip(sums, (first, last), strict=True):  # two, for one would wait for itself
                builder.store(builder.add(builder.load(each), found), each)
        kind = ir.FunctionType(ir.IntType(32), [_WORDS])
        reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.add.v16i32")  # type: ignore[no-untyped-call]
        return builder.call(reduce, [builder.add(*map(builder.load, sums))])

    return types.int32(planes, place, codes, start, plane), generate


digits_dot: Any = intrinsic(_digits_dot)
"""digits_dot(planes, place, codes, start, plane): the int32 sum of the products of a plane's digits, each plus 8, and a
row's codes.

The plane's ``plane`` bytes, a multiple of 16, begin at ``place`` of a contiguous uint8 array; the codes, as
``read_codes`` leaves them, at ``start`` of a contiguous int16 array. A plain loop is compiled into 64-bit products,
four at a time: numba's integers are that wide before LLVM sees them.
"""
