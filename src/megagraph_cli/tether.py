"""``python -m megagraph_cli.tether PID MODULE [ARGUMENT ...]``: run a module that ends when the process PID ends.

A process of its own sees to that, for code between fork and exec (``preexec_fn``) may wait for ever for a lock that
another thread of the parent held. Imports as little as it can: torchrun starts through it.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process with its parent, however that ends.

    Workers watch the launcher themselves, but only once they run; torchrun takes along those that do not yet.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before it could be watched
            os._exit(1)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
