"""Products of rows of bytes for compiled kernels, sixteen bytes at a time.

A plain loop is compiled into 64-bit products, four at a time: numba's integers are that wide before LLVM sees them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from megagraph_cli.graph.feature_tables import CODE_TAIL

_LANES = 16
_BYTES, _WORDS = (ir.VectorType(ir.IntType(bits), _LANES) for bits in (8, 32))


def _byte_dot(_context: Any, array: Any, a: Any, b: Any, width: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        starts = [context.cast(builder, values[i], signature.args[i], types.intp) for i in (1, 2)]
        count = context.cast(builder, values[3], signature.args[3], types.intp)
        lanes = ir.Constant(count.type, _LANES)
        total = cgutils.alloca_once(builder, _WORDS)  # type: ignore[no-untyped-call]
        builder.store(ir.Constant(_WORDS, None), total)

        def add(place: Any, mask: ir.Constant | None) -> None:
            rows = []
            for start in starts:
                address = builder.bitcast(builder.gep(data, [builder.add(start, place)]), _BYTES.as_pointer())
                row = builder.load(address, align=1)
                rows.append(builder.sext(builder.and_(row, mask) if mask else row, _WORDS))
            builder.store(builder.add(builder.load(total), builder.mul(*rows)), total)

        whole = builder.sub(builder.udiv(count, lanes), ir.Constant(count.type, 1))
        with cgutils.for_range(builder, whole) as loop:
            add(builder.mul(loop.index, lanes), None)
        add(builder.mul(whole, lanes), ir.Constant(_BYTES, [-1] * (_LANES - CODE_TAIL) + [0] * CODE_TAIL))
        kind = ir.FunctionType(ir.IntType(32), [_WORDS])
        reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.add.v16i32")  # type: ignore[no-untyped-call]
        return builder.call(reduce, [builder.load(total)])

    return types.int32(array, a, b, width), generate


byte_dot: Any = intrinsic(_byte_dot)
"""byte_dot(array, a, b, width): the int32 sum of products of two rows of a contiguous int8 array.

The rows begin at ``a`` and ``b`` and have ``width`` bytes, a multiple of 16, the last CODE_TAIL of which do not count.
"""
