"""Arrays into the ``.npy`` files of a store that is being made: at once, block by block, or filled where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megagraph_cli.graph.progress import Pace, Report
from megagraph_cli.graph.reserved import reserved_array
from megagraph_cli.graph.seal import array_hash, file_hash

_BLOCK_BYTES = 1 << 26


class Stream:
    """One array that is written block by block, hashed as it goes by.

    Plain writes, not a mapping: on a full disk a mapping dies with SIGBUS, a write raises OSError.
    """

    def __init__(self, path: Path, file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...], report: Report):
        self._file, self._dtype, self._shape = file, dtype, shape
        self._digest = array_hash(path.stem, dtype.str, shape)
        _write_header(file, dtype, shape)
        self._start = file.tell()
        self._size_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        self._pace = Pace(report, f"writing {path.name}", self._size_bytes, "B")
        self.given_up = False

    def write(self, block: NDArray[Any]) -> None:
        """The next rows, of the array's own dtype."""
        assert block.dtype == self._dtype, (block.dtype, self._dtype)
        assert block.shape[1:] == self._shape[1:], (block.shape, self._shape)
        for piece in _pieces(block):
            self._file.write(piece)
            self._digest.update(piece)
            self._pace.at(self._file.tell() - self._start)

    def rows(self, count: int) -> NDArray[Any]:
        """The first ``count`` rows, which were written, mapped."""
        self._file.flush()
        return np.memmap(self._file, self._dtype, "r", self._start, (count, *self._shape[1:])).view(np.ndarray)

    def give_up(self) -> None:
        """The array is not to be a part of the store."""
        self.given_up = True

    def digest(self) -> str:
        """The hash of the whole array."""
        assert self._file.tell() - self._start == self._size_bytes, "all of its rows were written"
        return self._digest.hexdigest()


class ArrayWriter:
    """Writes arrays into a folder, keeping each file's size and the hash of its content."""

    def __init__(self, folder: Path, report: Report = lambda _said: None) -> None:
        self.folder = folder
        self.sizes: dict[str, int] = {}
        self.hashes: dict[str, str] = {}
        self._report = report
        self._allocated: dict[str, NDArray[Any]] = {}

    def put(self, name: str, *blocks: NDArray[Any]) -> None:
        """One array made of ``blocks`` stacked along the first axis, as ``NAME.npy``; one that was allocated is there
        already and is only hashed."""
        if name in self._allocated:
            allocated = self._allocated.pop(name)
            assert blocks[0] is allocated, name
            path = self._path(name)
            pace = Pace(self._report, f"hashing {path.name}", path.stat().st_size, "B")
            self._keep(name, file_hash(path, pace.at))
            return
        shape = (sum(block.shape[0] for block in blocks), *blocks[0].shape[1:])
        with self.stream(name, blocks[0].dtype, shape) as out:
            for block in blocks:
                out.write(block)

    @contextmanager
    def stream(self, name: str, dtype: DTypeLike, shape: tuple[int, ...]) -> Iterator[Stream]:
        """One array to be written block by block, unless it is given up."""
        path = self._path(name)
        with path.open("w+b") as file:
            out = Stream(path, file, np.dtype(dtype), shape, self._report)
            yield out
            digest = None if out.given_up else out.digest()
        if digest is None:
            path.unlink()
        else:
            self._keep(name, digest)

    def allocate(self, name: str, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
        """Zeros in ``NAME.npy``, to be filled there and then to be ``put``: it may be larger than memory."""
        with self._path(name).open("w+b") as file:
            _write_header(file, np.dtype(dtype), shape)
            self._allocated[name] = reserved_array(file, dtype, shape)
        return self._allocated[name]

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.npy"

    def _keep(self, name: str, digest: str) -> None:
        path = self._path(name)
        self.sizes[path.name] = path.stat().st_size
        self.hashes[name] = digest


def _write_header(file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _pieces(block: NDArray[Any]) -> Sequence[bytes | memoryview]:
    flat = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
    return [flat[at : at + _BLOCK_BYTES].data for at in range(0, flat.size, _BLOCK_BYTES)]
