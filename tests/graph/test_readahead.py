"""Feature rows that the disk still has are asked for; those in memory are left alone."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny import random_graph

from megagraph_cli.graph import batch, prepare, readahead
from megagraph_cli.graph.graph import DenseFeatures, SparseFeatures
from megagraph_cli.graph.readahead import enter_resident, large_pages, read_ahead

PATIENCE_S = 20.0
ROWS, COLUMNS = 4096, 1024  # a page a row
HEAD = 256  # pages that come along with the file's header


def in_memory(array: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each page of a mapped array is in memory."""
    start = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    length = array.ctypes.data + array.nbytes - start
    pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), pages) == 0
    return np.frombuffer(pages, dtype=np.uint8) & 1 > 0


def mapped_cold(path: Path, array: NDArray[Any]) -> NDArray[Any]:
    """The array mapped from a file of which nothing is in memory; skips where the system keeps it there."""
    if not hasattr(os, "posix_fadvise") or not hasattr(mmap, "MADV_WILLNEED"):
        pytest.skip("the system takes no advice on files")
    np.save(path, array)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    found: NDArray[Any] = np.load(path, mmap_mode="r").view(np.ndarray)
    if in_memory(found)[HEAD:].any():
        pytest.skip("the file system keeps what it is told to drop")
    return found


def wait_until(done: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, "the pages did not come"
        time.sleep(0.01)


def test_the_rows_of_all_micro_batches_are_on_their_way_and_others_are_not(tmp_path: Path) -> None:
    x = mapped_cold(tmp_path / "x.npy", np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS))
    rows = [np.array([500, 501, 502, 2000]), np.array([501, 600, 4000])]
    # 500 to 502 lie near each other: four requests.
    assert read_ahead(DenseFeatures(x), rows) == 4
    wanted = np.unique(np.concatenate(rows))
    wait_until(lambda: in_memory(x)[wanted].all() and in_memory(x)[wanted + 1].all())
    assert in_memory(x)[HEAD:].sum() < 100
    assert read_ahead(DenseFeatures(x), rows) == 0  # they are there by now


def test_sparse_rows_are_asked_for_in_both_arrays(tmp_path: Path) -> None:
    indptr = np.arange(0, ROWS * COLUMNS + 1, COLUMNS)
    indices = mapped_cold(tmp_path / "indices.npy", np.zeros(ROWS * COLUMNS, dtype=np.int32))
    data = mapped_cold(tmp_path / "data.npy", np.ones(ROWS * COLUMNS, dtype=np.float32))
    assert read_ahead(SparseFeatures(indptr, indices, data, COLUMNS), [np.array([900, 3000])]) == 4
    wait_until(lambda: in_memory(indices)[[900, 3000]].all() and in_memory(data)[[900, 3000]].all())


def test_what_is_in_memory_whole_is_entered_at_once_and_nothing_is_read(tmp_path: Path) -> None:
    cold = mapped_cold(tmp_path / "x.npy", np.zeros((ROWS, COLUMNS), dtype=np.float32))
    graph = random_graph("dense", num_nodes=40)
    np.save(tmp_path / "warm.npy", np.ones(1 << 20))
    warm: NDArray[Any] = np.load(tmp_path / "warm.npy", mmap_mode="r").view(np.ndarray)
    assert in_memory(warm).all()
    mixed = replace(graph, features=DenseFeatures(cold), tables={**graph.tables, "stay": warm})
    before = resident_kib()
    if not reads_at_once(warm):
        pytest.skip("the system has no such request")
    entered = enter_resident(mixed)
    assert warm.nbytes <= entered <= warm.nbytes + 2 * mmap.PAGESIZE
    assert resident_kib() - before >= warm.nbytes // 1024 // 2
    assert not in_memory(cold)[HEAD:].any()
    assert enter_resident(graph) == 0  # in no file


@pytest.mark.parametrize(("available", "beside"), [(1 << 40, True), (4 * ROWS * COLUMNS - 1, False)])
def test_of_a_graph_larger_than_memory_a_missing_page_is_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int, beside: bool
) -> None:
    x = mapped_cold(tmp_path / "x.npy", np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS))
    monkeypatch.setattr(readahead, "available_bytes", lambda: available)
    graph = replace(random_graph("dense", num_nodes=40), features=DenseFeatures(x))
    enter_resident(graph)
    before = in_memory(x)[HEAD:].sum()
    assert before < ROWS // 50
    assert float(x[ROWS // 2, 0]) == ROWS // 2 * COLUMNS
    came = in_memory(x)[HEAD:].sum() - before
    assert came > 2 if beside else 1 <= came <= 2  # a row may lie on two pages


def test_of_others_files_that_may_not_be_written_nothing_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux says of each of their pages that it is in memory."""
    np.save(tmp_path / "x.npy", np.ones((ROWS, COLUMNS), dtype=np.float32))
    x: NDArray[Any] = np.load(tmp_path / "x.npy", mmap_mode="r").view(np.ndarray)
    assert in_memory(x).all()
    owner = (tmp_path / "x.npy").stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    assert enter_resident(replace(random_graph("dense", num_nodes=40), features=DenseFeatures(x))) == 0
    assert read_ahead(DenseFeatures(x), [np.array([500])]) == 1


def test_a_preparation_ends_with_large_pages_and_a_worker_begins_by_entering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Path] = []
    monkeypatch.setattr(prepare, "large_pages", lambda _graph, folder, _begin: done.append(folder))
    graph = prepare.load_graph("demo", tmp_path, tmp_path / "cache")
    prepare.load_graph("demo", tmp_path, tmp_path / "cache")
    assert done == [graph.path]
    monkeypatch.setattr(batch, "enter_resident", lambda given: done.append(given.path))
    batch.BatchBuilder(graph, batch.SequenceSpec(4, 1, 1, 0), 1, 8, 1).warm_up()
    assert done == [graph.path] * 2


def test_a_large_graph_just_written_is_in_memory_again_and_a_small_one_is_let_be(tmp_path: Path) -> None:
    graph = random_graph("dense", num_nodes=40)
    for name, rows, again in (("large", 20_000, True), ("small", 2000, False)):
        folder = tmp_path / name
        folder.mkdir()
        x = mapped_cold(folder / "x.npy", np.ones((rows, COLUMNS), dtype=np.float32))
        if not reads_at_once(x):
            pytest.skip("the system has no such request")
        begun: list[bool] = []
        large_pages(replace(graph, features=DenseFeatures(x)), folder, lambda: begun.append(True))  # noqa: B023 (called at once)
        assert bool(begun) == again
        assert bool(in_memory(x)[HEAD:].all()) == again
        np.testing.assert_array_equal(x[[0, -1]], 1)


def reads_at_once(array: NDArray[Any]) -> bool:
    """Whether the system has MADV_POPULATE_READ."""
    place = ctypes.c_void_p(array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE)
    return ctypes.CDLL(None).madvise(place, ctypes.c_size_t(mmap.PAGESIZE), 22) == 0


def resident_kib() -> int:
    """Pages of files that this process has in its tables."""
    return next(
        int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "RssFile" in line
    )


def test_what_is_in_no_file_is_left_alone() -> None:
    x = np.zeros((4, 3), dtype=np.float32)
    assert read_ahead(DenseFeatures(x), [np.array([0, 1])]) == 0
    assert read_ahead(None, [np.array([0, 1])]) == 0
    assert read_ahead(DenseFeatures(x), [np.array([], dtype=np.int64)]) == 0
