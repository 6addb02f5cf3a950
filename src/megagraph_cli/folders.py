"""Where data lies and prepared graphs go: from the flags, else the environment, which is read here for the commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from megagraph_cli.kernelcache import kernel_folder

if TYPE_CHECKING:
    from megagraph_cli.commands.workloads import Folders

_HOME = Path("~/.cache/mgraph")


def folders_of(root: Path | None, cache: Path | None, accept_download: bool) -> Folders:
    """Folders from the flags, else the environment, else the user's cache; numba's compiled kernels go there too."""
    root = root or Path(os.environ.get("MGRAPH_DATA") or _HOME / "data")
    keep_kernels(cache)
    from megagraph_cli.commands.workloads import Folders

    return Folders(root.expanduser(), _cache_of(cache), accept_download)


def keep_kernels(cache: Path | None) -> None:
    """Have numba keep compiled kernels beside the prepared graphs.

    Called before numba is imported, here and in the workers, which inherit it: kernels are compiled once per host.
    """
    try:
        folder = _cache_of(cache)
    except RuntimeError:  # a user without a home: numba looks for a place itself
        return
    os.environ.setdefault("NUMBA_CACHE_DIR", str(kernel_folder(folder.absolute())))


def _cache_of(cache: Path | None) -> Path:
    return (cache or Path(os.environ.get("MGRAPH_CACHE") or _HOME / "graphs")).expanduser()
