"""The parts of a kernel's call on several threads: those of torch where it has OpenMP, else a pool of our own.

After an operation torch's threads spin on their cores for a while, waiting for the next one. Threads of another pool
would have to share these cores with them; OpenMP's own begin at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megagraph_cli.model.entries import DONE, HEADER, OWN, SHARED, entry

_SCALARS = {torch.float32: np.float32, torch.float64: np.float64}


def run(
    name: str, dtype: torch.dtype, kept: float, shared: Sequence[int], parts: Sequence[Sequence[int]], threads: int
) -> None:
    """Run a kernel (entries.py) on ``parts``, side by side on up to ``threads`` threads; returns when all are done.

    The numbers are addresses, strides and ranges; what they point to must stay alive until then. Raises MemoryError
    where a part could not be done.
    """
    assert len(shared) == SHARED[name]
    assert all(len(part) == OWN[name] for part in parts)
    call = np.zeros(HEADER + len(shared) + len(parts) * OWN[name], dtype=np.int64)
    call[1] = len(parts)
    call[2:3].view(_SCALARS[dtype])[0] = kept
    call[HEADER : HEADER + len(shared)] = shared
    call[HEADER + len(shared) :] = [number for part in parts for number in part]
    function, address = entry(name, dtype), call.ctypes.data
    threads = min(threads, len(parts))
    parallel = _openmp()
    if threads == 1:
        function.ctypes(address)
    elif parallel is not None:
        parallel(function.address, address, threads, 0)
    else:
        others = [_pool(threads - 1).submit(function.ctypes, address) for _ in range(threads - 1)]
        try:
            function.ctypes(address)
        finally:  # whatever comes here, none of them may go on after the call's memory is given up
            wait(others)
    if call[DONE] != len(parts):
        raise MemoryError(f"{name} did {call[DONE]} of {len(parts)} parts; its log says why")


@cache
def _openmp() -> Any | None:
    """GNU OpenMP's ``GOMP_parallel(function, data, threads, flags)`` of the library that torch runs on, or None."""
    try:
        mapped = Path("/proc/self/maps").read_text(encoding="utf-8").split()
    except OSError:  # not on Linux
        return None
    path = next((word for word in mapped if word.startswith("/") and "libgomp" in Path(word).name), None)
    if path is None:
        return None
    parallel = ctypes.CDLL(path).GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="attention")
