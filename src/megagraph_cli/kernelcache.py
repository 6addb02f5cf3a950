"""Where numba keeps compiled kernels.

numba compiles a kernel again when the file it stands in changes, not when one that it calls from another file does.
So each state of the sources has a folder of its own.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

_WITH_KERNELS = ("cost", "graph", "model")


def kernel_folder(cache: Path) -> Path:
    """The folder below ``cache`` for kernels compiled from the sources as they are now."""
    package = Path(__file__).parent
    content = hashlib.sha256()
    for folder in _WITH_KERNELS:
        for file in sorted((package / folder).rglob("*.py")):
            content.update(file.read_bytes())
    return cache / "numba" / content.hexdigest()[:12]
