"""Numbers of 16 bits as compiled kernels read them: numba knows no float16 on a CPU."""

from __future__ import annotations

import numpy as np
from numba import njit

_SCALES = np.array([2.0 ** (max(exponent, 1) - 25) for exponent in range(32)])
_ONE = 1024  # the leading bit, left out where the exponent is not 0
_SIGN = 32768


@njit(nogil=True, cache=True)
def half_value(pattern: np.uint16) -> float:
    """The finite float16 of this bit pattern, exactly, as float64."""
    exponent = (pattern >> 10) & 31
    value = ((pattern & (_ONE - 1)) + (_ONE if exponent > 0 else 0)) * _SCALES[exponent]
    return float(-value if pattern & _SIGN else value)
