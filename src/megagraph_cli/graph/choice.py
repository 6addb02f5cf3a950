"""A choice between two numbers without a branch, for compiled kernels.

A branch that goes either way is guessed wrongly half the time, and what was begun meanwhile is thrown away: in the
searches and lists of a sampler that is most of what a processor does. LLVM turns selections of loaded numbers into
branches unless it is told that they cannot be foreseen.
"""

from __future__ import annotations

from typing import Any

from numba.core import types
from numba.extending import intrinsic


def _either(_context: Any, condition: Any, yes: Any, no: Any) -> Any:
    if condition != types.boolean or yes != no or not isinstance(yes, types.Number):
        return None  # numba says that there is no such function

    def generate(_target: Any, builder: Any, _signature: Any, values: Any) -> Any:
        chosen = builder.select(*values)
        chosen.set_metadata("unpredictable", builder.module.add_metadata([]))
        return chosen

    return yes(condition, yes, no), generate


either: Any = intrinsic(_either)
"""either(condition, yes, no) of a bool and two numbers of one type, both of which are computed."""
