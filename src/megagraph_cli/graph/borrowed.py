"""Arrays lent to a compiled kernel, which then counts no references to them.

Numba counts a reference for every view, every field of a tuple and every array that a call hands over: an atomic
instruction each, a third of the time of kernels that take views of small rows all the time.
"""

from __future__ import annotations

from typing import Any

from numba.core import cgutils, types
from numba.extending import intrinsic


def _borrowed(_context: Any, value: Any) -> Any:
    if not _can_be_lent(value):
        return None  # numba says that there is no such function

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _without_owner(context, builder, signature.args[0], values[0])

    return value(value), generate


def _can_be_lent(kind: Any) -> bool:
    """Whether it is an array, a number, or made of these: what else numba counts would be given back too often."""
    if _is_tuple(kind):
        return all(map(_can_be_lent, kind))
    return isinstance(kind, types.Array | types.Number | types.Boolean)


def _is_tuple(kind: Any) -> bool:
    return isinstance(kind, types.BaseTuple)


def _without_owner(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    if _is_tuple(kind):
        members = cgutils.unpack_tuple(builder, value, kind.count)  # type: ignore[no-untyped-call]
        lent = [_without_owner(context, builder, *each) for each in zip(kind.types, members, strict=True)]
        return context.make_tuple(builder, kind, lent)
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)  # type: ignore[no-untyped-call]
        return array._getvalue()
    return value


def _keep(_context: Any, value: Any) -> Any:
    return types.void(value), lambda context, *_: context.get_dummy_value()


borrowed: Any = intrinsic(_borrowed)
"""borrowed(arrays) is the same array, or tuple of arrays, in numba's eyes owned by nobody.

Whoever owns them must outlive it: a kernel's arguments do, what a kernel makes itself only up to a ``keep``.
"""
keep: Any = intrinsic(_keep)
"""keep(arrays) uses them: numba gives what it owns back after the last use."""
