"""Whether a store still holds what was written: the hash of every file, taken again where a file was touched since.

Hashing gigabytes at every command would cost seconds. So the system's own account of each file (size, times, inode)
is kept beside the store once its content is known to be right; while that stays as it was, the content is taken to be.
"""

from __future__ import annotations

import hashlib
import json
import os
import tokenize
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

SEAL = "seal.json"
BAD_HEADER = (ValueError, SyntaxError, tokenize.TokenError)
"""What numpy raises for an ``.npy`` file that does not begin as one: it parses the header as Python."""
_BLOCK_BYTES = 1 << 24
_THREADS = 4  # hashlib and reads let go of the interpreter


def array_hash(name: str, dtype: str, shape: tuple[int, ...]) -> hashlib._Hash:
    """The hash of an array's name and kind, to be updated with its bytes."""
    return hashlib.sha256(f"{name} {dtype} {shape}".encode())


def is_sealed(folder: Path, files: Mapping[str, int]) -> bool:
    """Whether all files of a store are as they were when its content was last known to be right."""
    try:
        return bool(json.loads((folder / SEAL).read_text(encoding="utf-8")) == _account(folder, files))
    except (OSError, ValueError):
        return False


def seal(folder: Path, files: Mapping[str, int]) -> None:
    """Keep the account of files whose content is right; a folder that may not be written stays without."""
    part = folder / f".{SEAL}.{os.getpid()}"
    try:
        part.write_text(json.dumps(_account(folder, files)), encoding="utf-8")
        part.replace(folder / SEAL)
    except OSError:
        with suppress(OSError):  # a read-only file system refuses even to remove what is not there
            part.unlink(missing_ok=True)


def _account(folder: Path, files: Mapping[str, int]) -> dict[str, list[int]]:
    stats = {name: (folder / name).stat() for name in sorted(files)}
    return {name: [at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino] for name, at in stats.items()}


def first_damaged(folder: Path, hashes: Mapping[str, str]) -> str | None:
    """The first array whose file does not have its hash; None where all do. Raises OSError, BAD_HEADER."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="seal") as pool:
        found = dict(zip(hashes, pool.map(lambda name: file_hash(folder / f"{name}.npy"), hashes), strict=True))
    return next((name for name, expected in hashes.items() if found[name] != expected), None)


def file_hash(path: Path, at: Callable[[int], None] = lambda _read_bytes: None) -> str:
    """The hash of one ``.npy`` file's array; ``at`` is told how many bytes were read."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        digest = array_hash(path.stem, dtype.str, shape)
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            at(file.tell())
    return digest.hexdigest()
