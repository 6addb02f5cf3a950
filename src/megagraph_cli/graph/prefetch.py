"""The processor's prefetch instruction for compiled kernels: a read that nothing waits for."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_READ, _DATA = 0, 1  # LLVM's rw and cache type
_ONCE, _KEEP = 0, 3  # LLVM's locality


def _fetching(locality: int) -> Any:
    def fetch(_context: Any, array: Any, place: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, values[0]).data
            index = context.cast(builder, values[1], signature.args[1], types.intp)
            byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
            call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")  # type: ignore[no-untyped-call]
            address = builder.bitcast(builder.gep(data, [index]), byte)
            builder.call(call, [address, word(_READ), word(locality), word(_DATA)])
            return context.get_dummy_value()

        return types.void(array, place), generate

    return intrinsic(fetch)


prefetch: Any = _fetching(_KEEP)
"""prefetch(array, place) brings ``array[place]`` of a contiguous array nearer; the place must lie within the array.

Nothing happens on machines that have no such instruction.
"""
prefetch_once: Any = _fetching(_ONCE)
"""The same for what is read once: it drives out less of what the step that is computing beside has in its caches."""
