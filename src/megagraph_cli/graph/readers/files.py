"""Opening raw files that may be cut, damaged or hostile: every fault becomes one sentence."""

from __future__ import annotations

import gzip
import json
import pickle
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.errors import MgraphError
from megagraph_cli.graph.readers.rows import Rows, block_rows, slices
from megagraph_cli.graph.seal import BAD_HEADER

_DAMAGE = (
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    pickle.UnpicklingError,
    EOFError,
    *BAD_HEADER,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    OverflowError,
    RuntimeError,
    ImportError,
)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns whatever a damaged file makes its parser raise into one sentence naming the file (exit 2)."""
    try:
        yield
    except MgraphError:
        raise
    except FileNotFoundError as error:
        raise MgraphError(f"{path} does not exist; check the path") from error
    except MemoryError as error:
        raise MgraphError(
            f"{path} needs more memory than there is ({_brief(error)}); free memory or check the file"
        ) from error
    except _DAMAGE as error:
        raise MgraphError(f"{path} is truncated or damaged ({_brief(error)}); replace it with a whole copy") from error
    except OSError as error:
        raise MgraphError(f"{path} cannot be read ({error.strerror or _brief(error)}); check the file") from error


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, KeyError):  # it says no more than the key
        return f"no entry {text[:120]}"
    return text[:120].rstrip(".") or type(error).__name__


class Npz:
    """The plain arrays of one ``.npz`` file; members holding Python objects are refused, never unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path):
            # np.load would try to unpickle anything that is neither a zip nor an .npy file.
            self._zip = zipfile.ZipFile(path)
        self.names = {name.removesuffix(".npy") for name in self._zip.namelist()}

    def __enter__(self) -> Npz:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._zip.close()

    def get(self, name: str) -> NDArray[Any]:
        """The array ``name``. Raises MgraphError (exit 2) where it is missing, damaged or a pickle."""
        self._header(name)
        with reading(self.path), self._zip.open(f"{name}.npy") as member:
            return np.asarray(np.lib.format.read_array(member, allow_pickle=False))

    def find(self, name: str) -> NDArray[Any] | None:
        """The array ``name``, None where the file has none."""
        return self.get(name) if name in self.names else None

    def rows(self, name: str) -> Rows:
        """The table ``name``, to be read in blocks once this file is closed. Raises MgraphError (exit 2) where it is
        missing or a pickle, and its blocks do where it is damaged."""
        path, header = self.path, self._header(name)
        return Rows(header[0], header[2], lambda scratch: _member_blocks(path, name, header, scratch))

    def find_rows(self, name: str) -> Rows | None:
        """The table ``name``, None where the file has none."""
        return self.rows(name) if name in self.names else None

    def _header(self, name: str) -> _Header:
        if name not in self.names:
            raise MgraphError(f"{self.path} has no array {name!r}; it holds {', '.join(sorted(self.names)) or 'none'}")
        with reading(self.path), self._zip.open(f"{name}.npy") as member:
            header = _read_header(member)
            if header[2].hasobject:
                raise MgraphError(
                    f"array {name!r} of {self.path} holds Python objects, which could run code and is refused; "
                    "save plain numeric arrays"
                )
            return header


_Header = tuple[tuple[int, ...], bool, np.dtype[Any]]
"""Shape, whether columns come one after another (Fortran), dtype."""
_PIECE_BYTES = 1 << 20
_BLOCKS_AT_ONCE = 4


def _read_header(member: IO[bytes]) -> _Header:
    version = np.lib.format.read_magic(member)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_column, dtype = read_header(member)
    return shape, by_column, dtype


def _member_blocks(path: Path, name: str, header: _Header, scratch: Path) -> Iterator[NDArray[Any]]:
    """Blocks of rows of a table in a ``.npz``. One stored by columns is unpacked to a file in ``scratch`` first: its
    rows are not together before all of it was read."""
    (_, columns), by_column, _ = header
    if not by_column:
        for entries in _member_entries(path, name, header, block_rows(columns) * columns):
            yield entries.reshape(-1, columns)
        return
    with tempfile.TemporaryFile(dir=scratch) as file:
        for entries in _member_entries(path, name, header, block_rows(1)):
            file.write(entries.view(np.uint8).data)
        yield from _transposed(file, header)


def _transposed(file: IO[bytes], header: _Header) -> Iterator[NDArray[Any]]:
    """Blocks of rows of a table that lies in ``file`` by columns: read in long pieces, where memory holds little of
    the file."""
    (rows, columns), _, dtype = header
    step = _BLOCKS_AT_ONCE * block_rows(columns)
    for first in range(0, rows, step):
        part = np.empty((columns, min(step, rows - first)), dtype)
        for column in range(columns):
            file.seek((column * rows + first) * dtype.itemsize)
            _fill(file, part[column].view(np.uint8))
        yield from slices(part.T)


def _member_entries(path: Path, name: str, header: _Header, most: int) -> Iterator[NDArray[Any]]:
    """The numbers of an array in a ``.npz`` as they are stored, ``most`` at a time."""
    shape, _, dtype = header
    left = int(np.prod(shape, dtype=np.int64))
    with reading(path), zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as member:
        if _read_header(member) != header:
            raise ValueError(f"array {name!r} is not the one that was there before")
        while left:
            entries = np.empty(min(most, left), dtype)
            _fill(member, entries.view(np.uint8))
            left -= entries.size
            yield entries


def _fill(member: IO[bytes], into: NDArray[np.uint8]) -> None:
    """Reads exactly so many bytes. Raises ValueError where there are fewer."""
    at = 0
    while at < into.size:
        piece = member.read(min(_PIECE_BYTES, into.size - at))
        if not piece:
            raise ValueError(f"an array ends {into.size - at} bytes early")
        into[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        at += len(piece)


def read_npy(path: Path) -> NDArray[Any]:
    """One ``.npy`` file, mapped; objects are refused. Raises MgraphError (exit 2)."""
    with reading(path):
        return np.asarray(np.lib.format.open_memmap(path, mode="r"))


def read_json(path: Path) -> Any:
    """One JSON file. Raises MgraphError (exit 2)."""
    with reading(path):
        return json.loads(path.read_text(encoding="utf-8"))
