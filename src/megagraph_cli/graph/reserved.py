"""Arrays that lie in files while they are filled or made, where they may be larger than memory.

A mapping that finds no room on the disk dies with SIGBUS, so the room is reserved first, which raises OSError.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_ZEROS = bytes(1 << 20)
_NOT_OFFERED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def scratch_array(folder: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """Zeros in a file without a name on the disk of ``folder``, which goes with the array."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return reserved_array(file, dtype, shape)


class Spool:
    """One array of unknown length, appended to in a file without a name on the disk of ``folder``."""

    def __init__(self, folder: Path, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it goes with this object

    def append(self, values: NDArray[Any]) -> None:
        """Plain writes. Raises OSError where the disk is full."""
        self._file.write(np.ascontiguousarray(values, self._dtype).view(np.uint8).data)

    def array(self) -> NDArray[Any]:
        """All that was appended, mapped; it ends here."""
        with self._file as file:
            size_bytes = file.tell()
            file.flush()
            if size_bytes == 0:
                return np.zeros(0, self._dtype)
            return np.memmap(file, self._dtype, "r", shape=(size_bytes // self._dtype.itemsize,)).view(np.ndarray)


def reserved_array(file: IO[bytes], dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """Zeros that are the bytes of ``file`` from where it stands to its end. Raises OSError where the disk is full."""
    kind, start = np.dtype(dtype), file.tell()
    size_bytes = kind.itemsize * int(np.prod(shape, dtype=np.int64))
    if size_bytes == 0:
        return np.zeros(shape, kind)
    file.flush()
    _reserve(file, start, size_bytes)
    # A plain ndarray view: numba treats np.memmap as a foreign subclass.
    mapped = np.memmap(file, kind, "r+", start, shape)
    if hasattr(mmap, "MADV_RANDOM"):
        # Filled here and there, and of zeros: pages around the one that is touched are not worth their memory.
        mapped._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
    return mapped.view(np.ndarray)


def _reserve(file: IO[bytes], start: int, size_bytes: int) -> None:
    try:
        os.posix_fallocate(file.fileno(), start, size_bytes)
    except (AttributeError, OSError) as error:  # some systems, and some file systems, do not offer it
        if isinstance(error, OSError) and error.errno not in _NOT_OFFERED:
            raise
        for at in range(0, size_bytes, len(_ZEROS)):
            file.write(_ZEROS[: size_bytes - at])
        file.flush()
