"""Bad input, unwritable caches, interrupted and simultaneous preparations."""

from __future__ import annotations

import os
import pickle
import resource
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_layouts import NUM_NODES, WRITERS, sample, write_own

from megagraph_cli.errors import EXIT_USAGE, MgraphError
from megagraph_cli.graph import store
from megagraph_cli.graph.prepare import load_graph, open_graph


class Bomb:
    """Unpickling this leaves a file behind."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.witness),)


def refused(name: str, root: Path, cache: Path) -> str:
    """The one sentence that ``name`` fails with; nothing may be left in the cache."""
    with pytest.raises(MgraphError) as caught:
        load_graph(name, root, cache)
    message = caught.value.message
    assert caught.value.exit_code == EXIT_USAGE
    assert "\n" not in message
    assert ". " not in message
    assert not cache.exists() or list(cache.iterdir()) == []
    return message


BAD_ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "label below -1": ({"y": np.full(NUM_NODES, -2)}, "the label -2"),
    "label not whole": ({"y": np.full(NUM_NODES, 0.5)}, "not a whole number"),
    "label NaN": ({"y": np.full(NUM_NODES, np.nan)}, "not a whole number"),
    "labels of another length": ({"y": np.zeros(NUM_NODES - 1, np.int64)}, "for 60 nodes"),
    "labels as text": ({"y": np.full(NUM_NODES, "cat")}, "labels of type"),
    "no labels": ({"y": None}, "no array 'y'"),
    "NaN feature": ({"x": np.full((NUM_NODES, 2), np.nan)}, "NaN or beyond float32 at node 0"),
    "infinite feature": ({"x": np.full((NUM_NODES, 2), np.inf)}, "NaN or beyond float32"),
    "feature beyond float32": ({"x": np.full((NUM_NODES, 2), 1e300)}, "NaN or beyond float32"),
    "edge beyond the nodes": ({"edge_index": np.array([[0], [NUM_NODES]])}, "edge to node 60 but only 60 nodes"),
    "negative edge": ({"edge_index": np.array([[0], [-3]])}, "edge to node -3"),
    "edges as fractions": ({"edge_index": np.array([[0.5], [1.0]])}, "float64"),
    "edges transposed": ({"edge_index": np.zeros((9, 2), np.int64)}, r"shape [9, 2]"),
    "one mask only": ({"train_mask": np.zeros(NUM_NODES, np.bool_)}, "no val mask"),
    "mask of another length": (
        {f"{part}_mask": np.zeros(NUM_NODES + 1, np.bool_) for part in ("train", "val", "test")},
        "for 60 nodes",
    ),
    "mask with other values": (
        {f"{part}_mask": np.full(NUM_NODES, 2) for part in ("train", "val", "test")},
        "besides 0 and 1",
    ),
    "no known keys": ({"edge_index": None, "senders": np.zeros(3)}, "none of the known keys"),
    "no nodes": ({"edge_index": np.zeros((2, 0), np.int64), "x": None, "y": np.zeros(0, np.int64)}, "no nodes"),
    "sparse x that does not fit": (
        {
            "x": None,
            "x_data": np.ones(3),
            "x_indices": np.array([0, 1, 5]),
            "x_indptr": np.array([0, 3] + [3] * (NUM_NODES - 1)),
            "x_shape": np.array([NUM_NODES, 5]),
        },
        "beyond the 5 columns",
    ),
    "sparse x with NaN": (
        {
            "x": None,
            "x_data": np.array([np.nan]),
            "x_indices": np.array([0]),
            "x_indptr": np.array([0] + [1] * NUM_NODES),
            "x_shape": np.array([NUM_NODES, 5]),
        },
        "NaN or beyond float32",
    ),
    "objects": ({"extra": None, "y": np.array([{}] * NUM_NODES, dtype=object)}, "Python objects"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_bad_arrays_are_one_sentence(case: str, tmp_path: Path) -> None:
    changes, expected = BAD_ARRAYS[case]
    path = write_own(tmp_path / "bad.npz", sample(), **changes)
    message = refused(str(path), tmp_path, tmp_path / "cache")
    assert expected in message
    assert str(path) in message


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("keep", [0.0, 0.6, 0.97])
def test_each_truncated_raw_file_is_named(name: str, keep: float, tmp_path: Path) -> None:
    root = tmp_path / "root"
    WRITERS[name](root / name, name, sample())
    for path in sorted((root / name).rglob("*.*")):
        whole = path.read_bytes()
        path.write_bytes(whole[: int(keep * len(whole))])
        assert str(path.parent) in refused(name, root, tmp_path / "cache")
        path.write_bytes(whole)
    assert load_graph(name, root, tmp_path / "cache").num_nodes == NUM_NODES


@pytest.mark.parametrize("name", WRITERS)
def test_missing_raw_file_is_named_with_the_way_out(name: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    WRITERS[name](root / name, name, sample())
    victim = sorted((root / name).rglob("*.*"))[-1]
    victim.unlink()
    message = refused(name, root, tmp_path / "cache")
    assert victim.name in message
    assert str(victim.parent) in message
    assert "--yes" in message


def test_pickle_bombs_never_run(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    witness = tmp_path / "executed"
    npz = write_own(tmp_path / "bomb.npz", sample(), y=np.array([Bomb(witness)] * NUM_NODES, dtype=object))
    assert "refused" in refused(str(npz), tmp_path, tmp_path / "cache")
    naked = tmp_path / "naked.npz"
    naked.write_bytes(pickle.dumps(Bomb(witness)))
    assert "naked.npz is truncated or damaged" in refused(str(naked), tmp_path, tmp_path / "cache")
    torch.save(Bomb(witness), tmp_path / "bomb.pt")
    assert "refused" in refused(str(tmp_path / "bomb.pt"), tmp_path, tmp_path / "cache")
    (tmp_path / "legacy.pt").write_bytes(pickle.dumps(Bomb(witness)))
    refused(str(tmp_path / "legacy.pt"), tmp_path, tmp_path / "cache")
    WRITERS["cora"](tmp_path / "cora", "cora", sample())
    for part in ("allx", "ally", "graph"):
        path = tmp_path / "cora" / "raw" / f"ind.cora.{part}"
        whole = path.read_bytes()
        path.write_bytes(pickle.dumps(Bomb(witness), protocol=2))
        assert "mkdir, which no planetoid file needs" in refused("cora", tmp_path, tmp_path / "cache")
        path.write_bytes(whole)
    assert not witness.exists()


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(MgraphError, match="--cache") as caught:
        load_graph("demo", tmp_path, tmp_path / "file" / "cache")
    assert caught.value.exit_code == EXIT_USAGE


def test_full_disk_leaves_nothing_and_the_next_call_works(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # writes beyond fail with EFBIG, as ENOSPC would
    try:
        message = refused("synthetic:nodes=3000,edges=9000", tmp_path, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path / "cache") in message
    assert load_graph("synthetic:nodes=3000,edges=9000", tmp_path, tmp_path / "cache").num_edges == 9000


def test_second_load_maps_the_store_untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_own(tmp_path / "own.npz", sample())
    steps: list[str] = []
    first = load_graph(str(path), tmp_path, tmp_path / "cache", progress=steps.append)
    assert steps
    steps.clear()
    monkeypatch.chdir(tmp_path)
    again = load_graph("own.npz", tmp_path, tmp_path / "cache", progress=steps.append)
    assert steps == []  # one store, however the path is spelled
    assert again.path == first.path
    assert again.digest == first.digest == open_graph(first.path).digest
    assert (first.name, again.name) == (str(path), "own.npz")


def test_changed_raw_file_is_prepared_anew(tmp_path: Path) -> None:
    path = write_own(tmp_path / "own.npz", sample(seed=0))
    first = load_graph(str(path), tmp_path, tmp_path / "cache")
    write_own(path, sample(seed=1))
    os.utime(path, (1, 1))
    assert load_graph(str(path), tmp_path, tmp_path / "cache").digest != first.digest


@pytest.mark.parametrize("damage", ["cut", "missing", "meta", "version"])
def test_damaged_store_is_noticed_and_rebuilt(damage: str, tmp_path: Path) -> None:
    first = load_graph("demo", tmp_path, tmp_path / "cache")
    victim = first.path / ("meta.json" if damage in ("meta", "version") else "indices.npy")
    content = victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    elif damage == "version":
        victim.write_bytes(content.replace(f'"version": {store.STORE_VERSION}'.encode(), b'"version": 0'))
    else:
        victim.write_bytes(content[:-10])
    with pytest.raises(MgraphError, match="run mgraph data again"):
        open_graph(first.path)
    assert load_graph("demo", tmp_path, tmp_path / "cache").digest == first.digest
    assert [item.name for item in (tmp_path / "cache").iterdir()] == [first.path.name]


@pytest.mark.parametrize("name", ["indptr.npy", "indices.npy", "features_data.npy", "table_edge_cdf.npy", "meta.json"])
def test_a_flipped_bit_is_noticed_and_mended(name: str, tmp_path: Path) -> None:
    first = load_graph("demo", tmp_path, tmp_path / "cache")
    victim = first.path / name
    before = victim.stat()
    content = bytearray(victim.read_bytes())
    places = {"meta.json": content.find(b'"digest": "') + 11, "indptr.npy": content.find(b"}")}  # the header's end
    place = places.get(name, len(content) // 2)
    content[place] ^= 1
    victim.write_bytes(content)
    os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))  # as it would look after a copy that keeps times
    steps: list[str] = []
    again = load_graph("demo", tmp_path, tmp_path / "cache", progress=steps.append)
    assert any("generating" in step for step in steps)
    assert again.digest == first.digest
    assert victim.read_bytes() != bytes(content)


def test_an_untouched_store_is_not_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_graph("demo", tmp_path, tmp_path / "cache")
    hashed: list[Path] = []
    monkeypatch.setattr(store, "first_damaged", lambda path, _hashes: hashed.append(path))
    load_graph("demo", tmp_path, tmp_path / "cache")
    assert hashed == []
    os.utime(first.path / "indices.npy")  # touched: hashed once, then known again
    load_graph("demo", tmp_path, tmp_path / "cache")
    load_graph("demo", tmp_path, tmp_path / "cache")
    assert hashed == [first.path]


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "mgraph-test", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root can mount a small disk")
    try:
        message = refused("synthetic:nodes=30000,edges=90000", tmp_path, folder / "cache")
        assert "No space left" in message
        assert "--cache" in message
        assert load_graph("demo", tmp_path, folder / "cache").num_nodes == 4000  # what fits still works
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_tables_and_digest_are_the_same_each_time(tmp_path: Path) -> None:
    one = load_graph("demo", tmp_path, tmp_path / "a")
    two = load_graph("demo", tmp_path, tmp_path / "b")
    assert one.digest == two.digest
    assert one.tables
    assert one.tables.keys() == two.tables.keys()
    for name, table in one.tables.items():
        np.testing.assert_array_equal(table, two.tables[name])
