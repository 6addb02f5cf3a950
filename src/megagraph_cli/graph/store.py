"""The prepared graph on disk: one folder of ``.npy`` files that every process of a host maps, and ``meta.json``.

``meta.json`` is written last, and the folder gets its name when it is whole. Sizes are checked at every opening, and
the content against its hashes where a file was touched since it was last known to be right (seal.py).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.errors import MgraphError
from megagraph_cli.graph.graph import DenseFeatures, Graph, Masks, SparseFeatures
from megagraph_cli.graph.seal import BAD_HEADER, first_damaged, is_sealed, seal
from megagraph_cli.graph.writer import ArrayWriter

STORE_VERSION = 4
META = "meta.json"
TABLE_PREFIX = "table_"
_LEFT_OVER = re.compile(r"\.(.*-[0-9a-f]{16})\.(?:tmp|lock)")  # names that prepare.py gives: nobody else's


class DamagedStoreError(Exception):
    """A store folder that is incomplete or of another version; the caller prepares it again."""


@dataclass(frozen=True)
class Facts:
    """What a store says beside its arrays."""

    name: str
    licence: str
    source: str
    num_classes: int
    num_columns: int
    counts: dict[str, int]
    feature_entries: int
    """The nodes' feature entries that are not zero (density.py): counting them again would read all features."""


class Writer(ArrayWriter):
    """Writes the arrays of a store and, last, its ``meta.json``."""

    def digest(self) -> str:
        """sha256 over the content of all arrays so far but the sampler's tables, by name."""
        return _digest_of(self.hashes)

    def finish(self, facts: Facts) -> None:
        """Writes ``meta.json``: from now on the folder is a store."""
        meta = {
            "version": STORE_VERSION,
            "digest": self.digest(),
            "files": self.sizes,
            "hashes": self.hashes,
            "name": facts.name,
            "licence": facts.licence,
            "source": facts.source,
            "num_classes": facts.num_classes,
            "num_columns": facts.num_columns,
            "counts": facts.counts,
            "feature_entries": facts.feature_entries,
        }
        meta["sha256"] = _meta_hash(meta)
        with (self.folder / META).open("w", encoding="utf-8") as file:
            json.dump(meta, file, sort_keys=True, indent=1)
            file.flush()
            os.fsync(file.fileno())
        seal(self.folder, _sealed_files(meta))


def _digest_of(hashes: dict[str, str]) -> str:
    lines = [f"{name} {value}" for name, value in sorted(hashes.items()) if not name.startswith(TABLE_PREFIX)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _meta_hash(meta: dict[str, Any]) -> str:
    rest = {key: value for key, value in meta.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _sealed_files(meta: dict[str, Any]) -> dict[str, int]:
    return {**meta["files"], META: 0}


def open_store(path: Path, *, check: bool = False) -> Graph:
    """Maps the store in ``path``; ``check`` compares its content with its hashes where files were touched.

    Raises DamagedStoreError where it is missing, incomplete, of another version, or found to be damaged.
    """
    meta = _read_meta(path)
    if check:
        _check_content(path, meta)
    arrays = {name.removesuffix(".npy"): _map(path / name) for name in meta["files"]}
    try:
        return _assemble(path, meta, arrays)
    except KeyError as error:
        raise DamagedStoreError(f"{path} lacks {error}") from error


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta: dict[str, Any] = json.loads((path / META).read_text(encoding="utf-8"))
        version, files = meta["version"], meta["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedStoreError(f"{path} has no whole {META}") from error
    if version != STORE_VERSION:
        raise DamagedStoreError(f"{path} has store version {version} instead of {STORE_VERSION}")
    for name, size_bytes in files.items():
        try:
            found_bytes = (path / name).stat().st_size
        except OSError as error:
            raise DamagedStoreError(f"{path} lacks {name}") from error
        if found_bytes != size_bytes:
            raise DamagedStoreError(f"{path / name} has {found_bytes} bytes instead of {size_bytes}")
    return meta


def _check_content(path: Path, meta: dict[str, Any]) -> None:
    files = _sealed_files(meta)
    if is_sealed(path, files):
        return
    try:
        hashes: dict[str, str] = meta["hashes"]
        damaged = first_damaged(path, hashes)
        agrees = meta["sha256"] == _meta_hash(meta)
    except (OSError, KeyError, AttributeError, TypeError, *BAD_HEADER) as error:
        raise DamagedStoreError(f"{path} cannot be checked ({error})") from error
    if damaged is not None:
        raise DamagedStoreError(f"{path / damaged}.npy does not have the content that was written")
    if not agrees:
        raise DamagedStoreError(f"{path / META} is not what was written")
    seal(path, files)


def _map(path: Path) -> NDArray[Any]:
    try:
        # A plain ndarray view: numba and torch treat np.memmap as a foreign subclass.
        mapped: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
        return mapped
    except (OSError, *BAD_HEADER) as error:
        raise DamagedStoreError(f"{path} cannot be mapped ({error})") from error


def _assemble(path: Path, meta: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Graph:
    features: SparseFeatures | DenseFeatures | None = None
    if "features_x" in arrays:
        features = DenseFeatures(arrays["features_x"])
    elif "features_data" in arrays:
        features = SparseFeatures(
            arrays["features_indptr"], arrays["features_indices"], arrays["features_data"], int(meta["num_columns"])
        )
    masks = None
    if "mask_train" in arrays:
        masks = Masks(arrays["mask_train"], arrays["mask_val"], arrays["mask_test"])
    tables = {name.removeprefix(TABLE_PREFIX): array for name, array in arrays.items() if name.startswith(TABLE_PREFIX)}
    return Graph(
        name=meta["name"],
        digest=meta["digest"],
        path=path,
        num_classes=int(meta["num_classes"]),
        features=features,
        masks=masks,
        licence=meta["licence"],
        source=meta["source"],
        counts=meta["counts"],
        feature_entries=meta.get("feature_entries"),
        tables=tables,
        **{key: arrays[key] for key in _CORE},
    )


_CORE = ("indptr", "indices", "labels", "clusters", "cluster_sizes", "coarse_indptr", "coarse_indices")


def open_graph(path: Path) -> Graph:
    """Maps an existing store folder, as worker processes do.

    Raises MgraphError (exit 2) where the folder is not a whole store.
    """
    try:
        return open_store(path)
    except DamagedStoreError as error:
        raise MgraphError(f"the prepared graph is not whole ({error}); run mgraph data again") from error


@contextmanager
def exclusive(path: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Holds the lock of the store ``path`` among all processes; yields whether a whole store is there by now.

    ``waiting`` is called where another process holds it. What interrupted preparations left behind is removed on the
    way.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(_lock_path(path), waiting):
        _sweep(path)
        try:
            open_store(path, check=True)
        except DamagedStoreError:
            yield False
        else:
            yield True


def publish(path: Path, fill: Callable[[Path], None]) -> None:
    """Fills a folder beside ``path`` and renames it to ``path``: others see the whole store or none.

    The caller holds the lock (``exclusive``). Whatever ``fill`` raises leaves nothing behind.
    """
    aside = _aside_path(path)
    aside.mkdir()
    try:
        fill(aside)
        if path.exists():
            shutil.rmtree(path)
        aside.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _aside_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _lock_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


@contextmanager
def _locked(lock: Path, waiting: Callable[[], None] | None) -> Iterator[bool]:
    """Holds the file lock ``lock`` and removes it afterwards. Where another process holds it ``waiting`` is called and
    it is waited for; without ``waiting`` this yields False at once."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is None:
                os.close(descriptor)
                yield False
                return
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_at(descriptor, lock):
            break
        os.close(descriptor)  # the holder before us removed this file: lock the one that is there now
    try:
        yield True
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _sweep(path: Path) -> None:
    """Removes what killed preparations left in the cache: own leftovers, and others' that nobody holds a lock on.

    The caller holds the lock of ``path``.
    """
    own = _aside_path(path)
    if own.exists():
        shutil.rmtree(own)
    found = [_LEFT_OVER.fullmatch(item.name) for item in path.parent.glob(".*-*.*")]
    for name in sorted({match[1] for match in found if match} - {path.name}):
        other = path.with_name(name)
        with suppress(OSError), _locked(_lock_path(other), None) as held:  # another user's may not be ours to open
            if held:
                shutil.rmtree(_aside_path(other), ignore_errors=True)
