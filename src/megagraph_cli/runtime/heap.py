"""What a worker's allocator on the host does with memory that is let go of: it keeps it for the next step."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
_NEVER = -1
_LARGEST_KEPT_BYTES = 32 * 1024**2
"""The most that glibc takes for its M_MMAP_THRESHOLD: larger blocks are always given back."""
_CHOSEN_BY_USER = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)


def keep_freed_memory(environment: Mapping[str, str]) -> bool:
    """Have this process keep what it frees, in blocks of up to 32 MiB, instead of giving it back to the system.

    A step ends with all its activations freed. Given back, they come as zeroed pages again in the next step, a fault
    for each; whether glibc gives them back depends on what happens to lie behind them, so that the same plan took more
    or less time from run to run. The process holds its largest step's memory from then on, as it does at every step's
    peak anyway. Returns whether that was done: only with glibc, and not where the user has chosen an allocator or its
    settings in the ``environment``.
    """
    if any(name in environment for name in _CHOSEN_BY_USER):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False  # another C library
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES))
