"""Rows of features in two planes of half bytes, and their products with whole rows, for compiled kernels.

Most of what a draw by similarity does is to look at nodes that it does not take, and most of the time of a look is the
wait for memory. A feature is coded in eight bits, of which the upper four tell nearly always; so those of all features
lie together, first, and the lower four after them, in memory that is seldom read.

A code is q = 16 h + l with h and l from -8 to 7; q + 136 is a byte whose halves are h + 8 and l + 8. A byte of a plane
holds two such halves: in its own lower half that of a feature from the first half of the features, in its upper half
that of one from the second.
"""

from __future__ import annotations

from collections.abc import Callable
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
_CODE_OFFSET = 17 * OFFSET
_LOW_BITS, _HIGH_BITS = 15, 240
_WIDE, _NARROW = 64, 16
"""Bytes of a plane that are taken together, and of what is left after these."""
_BYTE, _INT, _LONG = (ir.IntType(bits) for bits in (8, 32, 64))


@njit(nogil=True, cache=True)
def plane_bytes(columns: int) -> int:
    """Bytes of a plane of a row of so many features: with room for the tail, a multiple of 16."""
    return ((columns + 1) // 2 + _TAIL + _NARROW - 1) // _NARROW * _NARROW


@njit(nogil=True, cache=True)
def write_digits(codes: NDArray[np.int64], row: NDArray[np.uint8]) -> None:
    """Fill the planes of a row from the codes of its features; its tail and what no feature has are left alone."""
    columns = codes.shape[0]
    half, lower = (columns + 1) // 2, plane_bytes(columns)
    for i in range(half):
        first, second = codes[i] + _CODE_OFFSET, _CODE_OFFSET
        if half + i < columns:
            second += codes[half + i]
        row[i] = first >> 4 | (second & _HIGH_BITS)
        row[lower + i] = (first & _LOW_BITS) | (second & _LOW_BITS) << 4


def _vector(kind: ir.Type, value: int, lanes: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)


def _load(builder: Any, array: Any, at: Any, lanes: int) -> Any:
    address = builder.bitcast(builder.gep(array, [at]), ir.VectorType(_BYTE, lanes).as_pointer())
    return builder.load(address, align=1)


def _sum_of(builder: Any, numbers: Any) -> Any:
    name = f"llvm.vector.reduce.add.v{numbers.type.count}i32"
    kind = ir.FunctionType(_INT, [numbers.type])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [numbers])  # type: ignore[no-untyped-call]


def _sum_of_blocks(builder: Any, size: Any, block: Callable[[Any, int], Any]) -> Any:
    """The sum of block(first byte, number of bytes) over the blocks of a plane of ``size`` bytes."""
    total = cgutils.alloca_once(builder, _INT)  # type: ignore[no-untyped-call]
    builder.store(_INT(0), total)
    done = _LONG(0)
    for lanes in (_WIDE, _NARROW):
        whole = builder.udiv(builder.sub(size, done), _LONG(lanes))
        with cgutils.for_range(builder, whole) as loop:
            found = block(builder.add(done, builder.mul(loop.index, _LONG(lanes))), lanes)
            builder.store(builder.add(builder.load(total), found), total)
        done = builder.add(done, builder.mul(whole, _LONG(lanes)))
    return builder.load(total)


def _arguments(context: Any, builder: Any, signature: Any, values: Any) -> list[Any]:
    """The data of arrays, and numbers as 64 bits."""

    def argument(kind: Any, value: Any) -> Any:
        if isinstance(kind, types.Array):
            return context.make_array(kind)(context, builder, value).data
        return context.cast(builder, value, kind, types.int64)

    return [argument(*each) for each in zip(signature.args, values, strict=True)]


def _read_codes(_context: Any, planes: Any, place: Any, codes: Any, start: Any, columns: Any, plane: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        planes_at, here, codes_at, own, count, size = _arguments(context, builder, signature, values)
        half = builder.lshr(builder.add(count, _LONG(1)), _LONG(1))

        def block(at: Any, lanes: int) -> Any:
            upper = _load(builder, planes_at, builder.add(here, at), lanes)
            lower = _load(builder, planes_at, builder.add(builder.add(here, size), at), lanes)
            left = builder.insert_element(_vector(_LONG, 0, lanes), builder.sub(half, at), _INT(0))
            left = builder.shuffle_vector(left, left, _vector(_INT, 0, lanes))
            feature = builder.icmp_signed("<", ir.Constant(left.type, list(range(lanes))), left)
            first = builder.or_(
                builder.shl(upper, _vector(_BYTE, 4, lanes)), builder.and_(lower, _vector(_BYTE, _LOW_BITS, lanes))
            )
            second = builder.or_(
                builder.and_(upper, _vector(_BYTE, _HIGH_BITS, lanes)), builder.lshr(lower, _vector(_BYTE, 4, lanes))
            )
            to, total = builder.add(own, builder.add(at, at)), _INT(0)
            for each in (first, second):
                code = builder.sub(each, _vector(_BYTE, _CODE_OFFSET, lanes))  # bytes wrap around
                code = builder.select(feature, code, _vector(_BYTE, 0, lanes))
                builder.store(code, builder.bitcast(builder.gep(codes_at, [to]), code.type.as_pointer()), align=1)
                total = builder.add(total, _sum_of(builder, builder.sext(code, ir.VectorType(_INT, lanes))))
                to = builder.add(to, _LONG(lanes))
            return total

        return _sum_of_blocks(builder, size, block)

    return types.int32(planes, place, codes, start, columns, plane), generate


read_codes: Any = intrinsic(_read_codes)
"""read_codes(planes, place, codes, start, columns, plane) writes a row's codes for ``digits_dot`` and gives their sum.

The row is of ``columns`` features; its two planes of ``plane`` bytes begin at ``place`` of a contiguous uint8 array.
The codes, 0 for bytes that are no feature's, take twice ``plane`` places of a contiguous int8 array from ``start`` on.
The sum is an int32.
"""


def _digits_dot(_context: Any, planes: Any, place: Any, codes: Any, start: Any, plane: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        planes_at, here, codes_at, own, size = _arguments(context, builder, signature, values)

        def block(at: Any, lanes: int) -> Any:
            both = _load(builder, planes_at, builder.add(here, at), lanes)
            first = builder.and_(both, _vector(_BYTE, _LOW_BITS, lanes))
            second = builder.lshr(both, _vector(_BYTE, 4, lanes))
            order = ir.Constant(ir.VectorType(_INT, 2 * lanes), list(range(2 * lanes)))
            digits = builder.shuffle_vector(first, second, order)
            row = _load(builder, codes_at, builder.add(own, builder.add(at, at)), 2 * lanes)
            words = ir.VectorType(_INT, 2 * lanes)
            return _sum_of(builder, builder.mul(builder.zext(digits, words), builder.sext(row, words)))

        return _sum_of_blocks(builder, size, block)

    return types.int32(planes, place, codes, start, plane), generate


digits_dot: Any = intrinsic(_digits_dot)
"""digits_dot(planes, place, codes, start, plane): the int32 sum of the products of a plane's digits, each plus 8, and a
row's codes.

The plane's ``plane`` bytes, a multiple of 16, begin at ``place`` of a contiguous uint8 array; the codes, as
``read_codes`` leaves them, at ``start`` of a contiguous int8 array. LLVM makes the sum of products of unsigned and
signed bytes one instruction for 64 of them where the processor has it (AVX-512 VNNI), elsewhere a few of 16 bits. A
plain loop is compiled into 64-bit products, four at a time: numba's integers are that wide before LLVM sees them.
"""
