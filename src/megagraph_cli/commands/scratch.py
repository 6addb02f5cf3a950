"""A folder for one call's working files, gone with the call however it ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megagraph_cli.errors import EXIT_WORKER, MgraphError
from megagraph_cli.failures import WorkerFailed

_LOCK, _KEPT = "lock", "kept"


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A new folder under the system's temporary one, removed at the end; after a worker's failure it stays.

    That failure names a log in it. A folder whose call was killed is removed by the next call: the lock that the call
    held on it went with its process.
    """
    _sweep(prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    fresh = folder / f"{_LOCK}.new"
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        fresh.rename(folder / _LOCK)  # held before it has the name that others look for
        yield folder
    except MgraphError as error:
        if isinstance(error, WorkerFailed) or error.exit_code == EXIT_WORKER:
            keep(folder)
        raise
    finally:
        if not (folder / _KEPT).exists():
            shutil.rmtree(folder)
        os.close(descriptor)


def keep(folder: Path) -> None:
    """Leave a folder of ``scratch`` there: the user was told of a log in it."""
    (folder / _KEPT).touch()


def _sweep(prefix: str) -> None:
    """Remove this user's folders that nobody holds and that no error told of."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or (folder / _KEPT).exists():
                continue
            descriptor = os.open(folder / _LOCK, os.O_WRONLY)
        except OSError:
            continue  # without a lock file it is no folder of ours, or its call is just making it
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue  # in use
        finally:
            os.close(descriptor)
