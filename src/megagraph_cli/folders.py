"""Where data lies and prepared graphs go: from the flags, else the environment, which is read here for the commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from megagraph_cli.kernelcache import kernel_folder

if TYPE_CHECKING:
    from megagraph_cli.commands.workloads import Folders


def folders_of(root: Path | None, cache: Path | None, accept_download: bool) -> Folders:
    """Folders from the flags, else the environment, else the user's cache; numba's compiled kernels go there too."""
    home = Path("~/.cache/mgraph").expanduser()
    root = root or Path(os.environ.get("MGRAPH_DATA") or home / "data")
    cache = cache or Path(os.environ.get("MGRAPH_CACHE") or home / "graphs")
    # Before numba is imported, here and in the workers, which inherit it: kernels are compiled once per host.
    os.environ.setdefault("NUMBA_CACHE_DIR", str(kernel_folder(cache.expanduser().absolute())))
    from megagraph_cli.commands.workloads import Folders

    return Folders(root.expanduser(), cache.expanduser(), accept_download)
