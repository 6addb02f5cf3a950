"""Functions of whole vectors: powers of two, and the hash that dropout draws with. See simd.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from megagraph_cli.model.simd import WIDTH, Lanes, intrinsic, muladd_lanes, spread_lanes, vector_type

_WORDS = ir.VectorType(ir.IntType(32), WIDTH)


def _words(value: int) -> ir.Constant:
    return ir.Constant(_WORDS, [value] * WIDTH)


def _mixed(builder: Any, x: Any, constant: Callable[[int], Any], *, whole: bool) -> Any:
    """lowbias32 (Wellons 2018); not ``whole``: without its last step, which leaves the upper bits as they are."""
    x = builder.xor(x, builder.lshr(x, constant(16)))
    x = builder.mul(x, constant(0x7FEB352D))
    x = builder.xor(x, builder.lshr(x, constant(15)))
    x = builder.mul(x, constant(0x846CA68B))
    return builder.xor(x, builder.lshr(x, constant(16))) if whole else x


@intrinsic
def mix(typingctx: Any, x: Any) -> Any:
    """A hash of a 32-bit word, or of the word in each lane."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        make = _words if isinstance(x, Lanes) else lambda value: ir.Constant(ir.IntType(32), value)
        return _mixed(builder, args[0], make, whole=True)

    return x(x), emit


@intrinsic
def stairs(typingctx: Any, start: Any, step: Any) -> Any:
    """The words start, start + step, start + 2 step, ... (modulo 2^32)."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ramp = builder.mul(spread_lanes(builder, args[1]), ir.Constant(_WORDS, list(range(WIDTH))))
        return builder.add(ramp, spread_lanes(builder, args[0]))

    return Lanes(types.uint32)(types.uint32, types.uint32), emit


@intrinsic
def keep(typingctx: Any, factor: Any, words: Any, column: Any, least: Any) -> Any:
    """``factor`` where the hash of word + column, as a signed number, is at least ``least``; 0 elsewhere."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        draw = _mixed(builder, builder.add(args[1], spread_lanes(builder, args[2])), _words, whole=False)
        bound = spread_lanes(builder, builder.trunc(args[3], ir.IntType(32)))
        kept = builder.icmp_signed(">=", draw, bound)
        return builder.select(kept, args[0], ir.Constant(vector_type(factor.dtype), None))

    return factor(factor, words, types.uint32, types.int64), emit


def _exp2_coefficients(degree: int) -> list[float]:
    """2^f on [-1/2, 1/2] by powers of f: a polynomial through the Chebyshev nodes, near-minimax."""
    nodes = 0.5 * np.cos(np.pi * (np.arange(degree + 1) + 0.5) / (degree + 1))
    fit = np.polynomial.Polynomial.fit(nodes, np.exp2(nodes), degree, domain=[-0.5, 0.5], window=[-1, 1])
    return [float(c) for c in fit.convert().coef]


_EXP2 = {
    # dtype: (polynomial, 1.5 times 2^mantissa bits, mantissa bits, least exponent)
    types.float32: (_exp2_coefficients(6), 1.5 * 2.0**23, 23, -125.0),
    types.float64: ([math.log(2.0) ** k / math.factorial(k) for k in range(14)], 1.5 * 2.0**52, 52, -1021.0),
}


@intrinsic
def exp2(typingctx: Any, x: Any) -> Any:
    """2^x for x at most a few, to a rounding or two; 0 below the smallest normal number.

    With n = round(x): 2^x = 2^(x - n) by a polynomial, times 2^n by adding n to the exponent's bits. Adding
    1.5 times 2^23 rounds, and leaves n in the low bits of the sum.
    """
    coefficients, magic, shift, least = _EXP2[x.dtype]
    kind, bits = vector_type(x.dtype), ir.VectorType(ir.IntType(x.dtype.bitwidth), WIDTH)

    def constant(value: float) -> ir.Constant:
        return ir.Constant(kind, [value] * WIDTH)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        raised = builder.fadd(args[0], constant(magic))
        fraction = builder.fsub(args[0], builder.fsub(raised, constant(magic)))
        value = constant(coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            value = muladd_lanes(builder, value, fraction, constant(coefficient), x.dtype)
        exponent = builder.shl(builder.bitcast(raised, bits), ir.Constant(bits, [shift] * WIDTH))
        power = builder.bitcast(builder.add(builder.bitcast(value, bits), exponent), kind)
        return builder.select(builder.fcmp_ordered(">=", args[0], constant(least)), power, constant(0.0))

    return x(x), emit
