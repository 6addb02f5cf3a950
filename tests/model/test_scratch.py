"""The kernels' scratch memory is theirs until they are done, whatever other threads allocate meanwhile.

numba frees an array after its last mention, and does not count its address as one.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading

import pytest
import torch

from megagraph_cli.layout.rows import RowLayout
from megagraph_cli.model.block import block_of
from megagraph_cli.model.compiled import CompiledKernel
from tests.model.cases import bias_of, make_case

NOT_A_NUMBER = 0xFF
"""A byte of which floats are NaN."""
SIZES = range(4096, 1 << 17, 4096)
"""Bytes that the other thread asks for: scratch is tens of KiB, and a freed block goes to what fits in it."""


def overwrite_free_memory(stopped: threading.Event) -> None:
    """Write NaN all over what malloc holds free, until told to stop."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    while not stopped.is_set():
        taken = [(libc.malloc(size), size) for size in SIZES]
        for address, size in taken:
            ctypes.memset(address, NOT_A_NUMBER, size)
        for address, _ in taken:
            libc.free(address)


def disturbed(calls: int) -> int:
    """How many of some calls gave other outputs or gradients beside a thread that writes to free memory."""
    layout = RowLayout(60, 4, 1)
    case = make_case(layout, batch=4, heads=8, head_dim=8)
    block = block_of(bias_of(case, layout, 0), 0, None)
    kernel = CompiledKernel()

    def call() -> list[torch.Tensor]:
        out, lse = kernel.forward(case.q, case.k, case.v, block, case.weights)
        delta = (case.grad * out).sum(-1)
        return [out, lse, *kernel.backward(case.grad, delta, lse, case.q, case.k, case.v, block, case.weights)]

    first = call()
    stopped = threading.Event()
    other = threading.Thread(target=overwrite_free_memory, args=(stopped,))
    other.start()
    try:
        return sum(not all(map(torch.equal, first, call())) for _ in range(calls))
    finally:
        stopped.set()
        other.join()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc can be told to use one arena")
def test_scratch_is_not_given_to_another_thread() -> None:
    code = f"import torch; torch.set_num_threads(1); from {__name__} import disturbed; print(disturbed(200))"
    # One arena: what a thread frees, another may be given.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0"
