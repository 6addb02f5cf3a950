"""Vectors of eight lanes inside compiled kernels: types and operations that numba turns into SIMD instructions.

A lane is an attention head, or a hidden channel. ``Lanes(dtype)`` is eight numbers of one dtype in a register;
functions that end in 8 work on tuples of eight of them. Addresses and strides are in bytes; ``zero`` is a scalar of
the dtype to load. LLVM maps the vectors to whatever the processor has (AVX2: one register in float32, two in float64).
Nothing checks bounds here: only ``model.kernels`` calls these, with addresses of tensors that its caller keeps alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.core.datamodel.registry import register_default
from numba.extending import intrinsic as _numba_intrinsic

WIDTH = 8
intrinsic: Any = _numba_intrinsic
_INT = ir.IntType(64)


class Lanes(types.Type):
    """Eight numbers of ``dtype`` side by side."""

    def __init__(self, dtype: Any) -> None:
        super().__init__(name=f"Lanes({dtype})")
        self.dtype = dtype


def _element(dtype: Any) -> ir.Type:
    return {types.float32: ir.FloatType(), types.float64: ir.DoubleType(), types.uint32: ir.IntType(32)}[dtype]


def vector_type(dtype: Any) -> ir.VectorType:
    return ir.VectorType(_element(dtype), WIDTH)


@register_default(Lanes)
class _LanesModel(PrimitiveModel):
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        super().__init__(manager, lanes, vector_type(lanes.dtype))


def _group(lanes: Lanes, count: int = WIDTH) -> Any:
    return types.UniTuple(lanes, count)


def _at(builder: Any, address: Any, kind: ir.Type) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _offset(builder: Any, address: Any, stride: Any, times: int) -> Any:
    return builder.add(address, builder.mul(stride, ir.Constant(_INT, times))) if times else address


def _read(builder: Any, address: Any, dtype: Any) -> Any:
    """A vector load that may lie at any multiple of the element's size."""
    loaded = builder.load(_at(builder, address, vector_type(dtype)))
    loaded.align = dtype.bitwidth // 8
    return loaded


def _write(builder: Any, value: Any, address: Any, dtype: Any) -> None:
    builder.store(value, _at(builder, address, vector_type(dtype)), align=dtype.bitwidth // 8)


def spread_lanes(builder: Any, scalar: Any) -> Any:
    """The scalar in every lane."""
    kind = ir.VectorType(scalar.type, WIDTH)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), _ZERO_LANES)


_ZERO_LANES = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH)


def muladd_lanes(builder: Any, a: Any, b: Any, c: Any, dtype: Any) -> Any:
    kind = vector_type(dtype)
    name = f"llvm.fmuladd.v{WIDTH}f{dtype.bitwidth}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    return builder.call(function, [a, b, c])


def _unpack(builder: Any, group: Any) -> list[Any]:
    return [builder.extract_value(group, i) for i in range(group.type.count)]


@intrinsic
def load(typingctx: Any, zero: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _read(builder, args[1], zero)

    return Lanes(zero)(zero, types.int64), emit


@intrinsic
def store(typingctx: Any, address: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _write(builder, args[1], args[0], value.dtype)
        return context.get_dummy_value()

    return types.void(types.int64, value), emit


@intrinsic
def size(typingctx: Any, zero: Any) -> Any:
    """Bytes of a vector."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(_INT, WIDTH * zero.bitwidth // 8)

    return types.int64(zero), emit


@intrinsic
def read(typingctx: Any, zero: Any, address: Any) -> Any:
    """One scalar of ``zero``'s type."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_at(builder, args[1], context.get_value_type(zero)))

    return zero(zero, types.int64), emit


@intrinsic
def splat(typingctx: Any, scalar: Any) -> Any:
    """A scalar in every lane."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return spread_lanes(builder, args[0])

    return Lanes(scalar)(scalar), emit


@intrinsic
def spread(typingctx: Any, zero: Any, value: Any) -> Any:
    """A number, turned into ``zero``'s type, in every lane."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return spread_lanes(builder, context.cast(builder, args[1], value, zero))

    return Lanes(zero)(zero, value), emit


def _binary(emit_one: Callable[[Any, Any, Any], Any]) -> Any:
    @intrinsic
    def operation(typingctx: Any, a: Any, b: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit_one(builder, *args)

        return a(a, b), emit

    return operation


add = _binary(lambda builder, a, b: builder.fadd(a, b))
sub = _binary(lambda builder, a, b: builder.fsub(a, b))
mul = _binary(lambda builder, a, b: builder.fmul(a, b))
div = _binary(lambda builder, a, b: builder.fdiv(a, b))
maximum = _binary(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@intrinsic
def muladd(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, fused where the processor can."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return muladd_lanes(builder, args[0], args[1], args[2], a.dtype)

    return a(a, b, c), emit


@intrinsic
def zeros8(typingctx: Any, zero: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(context.get_value_type(signature.return_type), None)

    return _group(Lanes(zero))(zero), emit


def _load_many(count: int) -> Any:
    """(zero, address, stride) -> the vectors at address, address + stride, ..."""

    @intrinsic
    def operation(typingctx: Any, zero: Any, address: Any, stride: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            found = [_read(builder, _offset(builder, args[1], args[2], i), zero) for i in range(count)]
            return cgutils.pack_array(builder, found)

        return _group(Lanes(zero), count)(zero, types.int64, types.int64), emit

    return operation


def _store_many() -> Any:
    @intrinsic
    def operation(typingctx: Any, address: Any, stride: Any, group: Any) -> Any:
        """Write vectors to address, address + stride, ..."""

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            for i, each in enumerate(_unpack(builder, args[2])):
                _write(builder, each, _offset(builder, args[0], args[1], i), group.dtype.dtype)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, group), emit

    return operation


load6, load8 = _load_many(6), _load_many(8)
store6, store8 = _store_many(), _store_many()


@intrinsic
def scale8(typingctx: Any, group: Any, factor: Any) -> Any:
    """Every vector times ``factor``."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return cgutils.pack_array(builder, [builder.fmul(each, args[1]) for each in _unpack(builder, args[0])])

    return group(group, factor), emit


@intrinsic
def muladd8(typingctx: Any, group: Any, factor: Any, more: Any) -> Any:
    """group factor + more, vector by vector."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pairs = zip(_unpack(builder, args[0]), _unpack(builder, args[2]), strict=True)
        return cgutils.pack_array(builder, [muladd_lanes(builder, a, args[1], b, factor.dtype) for a, b in pairs])

    return group(group, factor, more), emit


@intrinsic
def dot8(typingctx: Any, start: Any, group: Any, address: Any, stride: Any) -> Any:
    """start + sum over i of group[i] times the vector at address + i stride, lane by lane."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total = args[0]
        for i, each in enumerate(_unpack(builder, args[1])):
            other = _read(builder, _offset(builder, args[2], args[3], i), start.dtype)
            total = muladd_lanes(builder, each, other, total, start.dtype)
        return total

    return start(start, group, types.int64, types.int64), emit


@intrinsic
def axpy8(typingctx: Any, group: Any, x: Any, address: Any, stride: Any) -> Any:
    """group[i] + x times the vector at address + i stride."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = []
        for i, each in enumerate(_unpack(builder, args[0])):
            other = _read(builder, _offset(builder, args[2], args[3], i), x.dtype)
            found.append(muladd_lanes(builder, args[1], other, each, x.dtype))
        return cgutils.pack_array(builder, found)

    return group(group, x, types.int64, types.int64), emit


@intrinsic
def add_outer8(typingctx: Any, address: Any, stride: Any, x: Any, group: Any) -> Any:
    """Add x group[i] to the vector at address + i stride."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for i, each in enumerate(_unpack(builder, args[3])):
            where = _offset(builder, args[0], args[1], i)
            _write(
                builder, muladd_lanes(builder, args[2], each, _read(builder, where, x.dtype), x.dtype), where, x.dtype
            )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, x, group), emit


@intrinsic
def dot_spread6(typingctx: Any, start: Any, group: Any, address: Any, stride: Any) -> Any:
    """start + sum over i < 6 of group[i] times the scalar at address + i stride."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total = args[0]
        for i, each in enumerate(_unpack(builder, args[1])):
            total = muladd_lanes(
                builder, each, _read_spread(builder, args[2], args[3], i, start.dtype), total, start.dtype
            )
        return total

    return start(start, group, types.int64, types.int64), emit


@intrinsic
def axpy_spread6(typingctx: Any, group: Any, x: Any, address: Any, stride: Any) -> Any:
    """group[i] + x times the scalar at address + i stride."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = []
        for i, each in enumerate(_unpack(builder, args[0])):
            other = _read_spread(builder, args[2], args[3], i, x.dtype)
            found.append(muladd_lanes(builder, args[1], other, each, x.dtype))
        return cgutils.pack_array(builder, found)

    return group(group, x, types.int64, types.int64), emit


def _read_spread(builder: Any, address: Any, stride: Any, times: int, dtype: Any) -> Any:
    where = _offset(builder, address, stride, times)
    return spread_lanes(builder, builder.load(_at(builder, where, _element(dtype))))


@intrinsic
def log2(typingctx: Any, x: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = vector_type(x.dtype)
        name = f"llvm.log2.v{WIDTH}f{x.dtype.bitwidth}"
        return builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind]), name), args)

    return x(x), emit
