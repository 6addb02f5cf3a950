"""C entry points of the compiled kernels: what a call is, is told by int64 in memory, so any thread can run a part.

A call lies at an address as [ticket, number of parts, kept, parts done], what all parts have in common, and then each
part's own numbers. ``kept`` is 1 / (1 - p) in the kernel's dtype. Threads draw tickets until no part is left. A part
that failed (for want of memory) is missing among those done: there is nobody here to raise to.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import cfunc, config, njit, types

from megagraph_cli.model import kernels, simd
from megagraph_cli.model.simd import intrinsic

HEADER, DONE = 4, 3
FRAME = len(kernels.Frame._fields)
SHARED = {"forward": FRAME, "backward": FRAME, "drop_rows": 8}
"""Numbers that all parts of a call have in common."""
OWN = {"forward": 4, "backward": 8, "drop_rows": 2}
"""Numbers of each part."""
_LONG = np.int64(0)
_BYTES = 8
_PATIENCE_S = 180.0


@intrinsic
def _ticket(typingctx: Any, address: Any) -> Any:
    """The next number at the address: each thread gets another."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(64)
        return builder.atomic_rmw("add", builder.inttoptr(args[0], word.as_pointer()), ir.Constant(word, 1), "seq_cst")

    return types.int64(types.int64), emit


@intrinsic
def _frame(typingctx: Any, address: Any) -> Any:
    """The Frame that lies there."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = context.get_value_type(signature.return_type)
        return builder.load(builder.inttoptr(args[0], kind.as_pointer()))

    return types.NamedUniTuple(types.int64, FRAME, kernels.Frame)(types.int64), emit


@njit(nogil=True)
def _int(base, index):
    return simd.read(_LONG, base + _BYTES * index)


@njit(nogil=True)
def _forward(zero, call):
    frame, kept = _frame(call + _BYTES * HEADER), simd.read(zero, call + 2 * _BYTES)
    for _ in range(_int(call, 1)):
        part = _ticket(call)
        if part >= _int(call, 1):
            return
        own = call + _BYTES * (HEADER + FRAME + 4 * part)
        kernels.forward(zero, frame, kept, _int(own, 0), _int(own, 1), _int(own, 2), _int(own, 3))
        _ticket(call + _BYTES * DONE)


@njit(nogil=True)
def _backward(zero, call):
    frame, kept = _frame(call + _BYTES * HEADER), simd.read(zero, call + 2 * _BYTES)
    for _ in range(_int(call, 1)):
        part = _ticket(call)
        if part >= _int(call, 1):
            return
        own = call + _BYTES * (HEADER + FRAME + 8 * part)
        to_k, to_v, channel, token = _int(own, 4), _int(own, 5), _int(own, 6), _int(own, 7)
        first, last, row_first, row_last = _int(own, 0), _int(own, 1), _int(own, 2), _int(own, 3)
        kernels.backward(zero, frame, kept, first, last, row_first, row_last, to_k, to_v, channel, token)
        _ticket(call + _BYTES * DONE)


@njit(nogil=True)
def _drop_rows(zero, call):
    kept, base = simd.read(zero, call + 2 * _BYTES), call + _BYTES * HEADER
    x, residual, out, keys = _int(base, 0), _int(base, 1), _int(base, 2), _int(base, 3)
    rows, size, first_row, least = _int(base, 4), _int(base, 5), _int(base, 6), _int(base, 7)
    for _ in range(_int(call, 1)):
        part = _ticket(call)
        if part >= _int(call, 1):
            return
        own = call + _BYTES * (HEADER + 8 + 2 * part)
        first, last = _int(own, 0), _int(own, 1)
        kernels.drop_rows(zero, x, residual, out, keys, first, last, rows, size, first_row, least, kept)
        _ticket(call + _BYTES * DONE)


def _forward_float32(call):
    _forward(np.float32(0), call)


def _forward_float64(call):
    _forward(np.float64(0), call)


def _backward_float32(call):
    _backward(np.float32(0), call)


def _backward_float64(call):
    _backward(np.float64(0), call)


def _drop_rows_float32(call):
    _drop_rows(np.float32(0), call)


def _drop_rows_float64(call):
    _drop_rows(np.float64(0), call)


_FUNCTIONS = {
    ("forward", torch.float32): _forward_float32,
    ("forward", torch.float64): _forward_float64,
    ("backward", torch.float32): _backward_float32,
    ("backward", torch.float64): _backward_float64,
    ("drop_rows", torch.float32): _drop_rows_float32,
    ("drop_rows", torch.float64): _drop_rows_float64,
}


@cache
def entry(name: str, dtype: torch.dtype) -> Any:
    """The entry point of a kernel, a numba ``CFunc``: compiled by one process of a host, loaded by the others."""
    lock = _lock()
    try:
        return cfunc(types.void(types.int64), cache=True)(_FUNCTIONS[name, dtype])
    finally:
        if lock is not None:
            os.close(lock)


def _lock() -> int | None:
    """A file that one process of this user holds at a time, until it is closed.

    None where it cannot be had, or not in time: several processes then compile the same, which costs time alone.
    """
    folder = Path(getattr(config, "CACHE_DIR", "") or tempfile.gettempdir())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / f"mgraph-kernels-{os.getuid()}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return None
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            time.sleep(0.02)
    os.close(file)
    return None
