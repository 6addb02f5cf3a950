"""Freed memory stays with the process: the next step's comes without page faults."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_FAULTS_OF_A_SECOND_STEP = """
import os
import resource
import sys
import numpy as np
from megagraph_cli.runtime.heap import keep_freed_memory

def step():
    held = [np.ones(size) for size in 40 * [2_000, 20_000, 200_000]]
    del held

kept = sys.argv[1] == "keep" and keep_freed_memory(os.environ)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
_PAGES = 40 * 8 * 222_000 // 4096


def faults(mode: str, **environment: str) -> tuple[str, int]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    call = [sys.executable, "-c", _FAULTS_OF_A_SECOND_STEP, mode]
    done = subprocess.run(call, capture_output=True, text=True, check=True, env=plain | environment)
    kept, count = done.stdout.split()
    return kept, int(count)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the allocator's settings are glibc's")
def test_a_second_step_has_the_first_ones_pages() -> None:
    kept, count = faults("keep")
    if kept == "False":
        pytest.skip("this C library is not glibc")
    assert count < _PAGES / 50
    assert faults("give back")[1] > _PAGES / 4


def test_a_users_own_settings_stand() -> None:
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="1000000")[0] == "False"
