"""Feature rows: float32, sparse under a quarter, means of clusters, and never dense or whole in between."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept import kept
from scipy import sparse

from megagraph_cli.errors import MgraphError
from megagraph_cli.graph import featurestore
from megagraph_cli.graph.graph import DenseFeatures, SparseFeatures
from megagraph_cli.graph.prepare import load_graph
from megagraph_cli.graph.readers import rows
from megagraph_cli.graph.readers.features import checked, super_blocks


@pytest.mark.parametrize("density", [0.0, 0.1, 0.24, 0.26, 1.0])
@pytest.mark.parametrize("form", ["dense", "sparse", "float64", "bool"])
def test_form_follows_density(density: float, form: str) -> None:
    x = np.zeros(10_000, np.float32)
    x[: int(density * x.size)] = 1
    x = np.random.default_rng(0).permutation(x).reshape(200, 50)
    given: Any = {"sparse": sparse.csr_matrix(x), "float64": x.astype(np.float64), "bool": x > 0}.get(form, x)
    found = kept(given, 200)
    assert sparse.issparse(found) == (density < 0.25)
    assert found is not None
    assert found.dtype == np.float32
    np.testing.assert_array_equal((found.toarray() if sparse.issparse(found) else found)[:200], x)


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_csr_that_is_to_stay_stays(density: float) -> None:
    x = (np.random.default_rng(0).random((40, 30)) < density).astype(np.float32)
    found = kept(sparse.csr_matrix(x), 40, keep_sparse=True)
    assert sparse.issparse(found)
    np.testing.assert_array_equal(found[:40].toarray(), x)
    assert sparse.issparse(kept(x, 40, keep_sparse=True)) == (density < 0.25)  # was never CSR


def test_sparse_rows_are_canonical_and_the_input_is_kept() -> None:
    given = sparse.csr_matrix(
        (np.array([1.0, 2.0, 0.0, 4.0]), np.array([3, 3, 0, 1]), np.array([0, 3, 4])), shape=(2, 9)
    )
    found = checked("file", given, 2)
    assert found.indices.tolist() == [3, 1]  # duplicates add up, stored zeros go
    assert found.data.tolist() == [3.0, 4.0]
    assert given.indices.tolist() == [3, 3, 0, 1]


def test_no_columns_is_no_features() -> None:
    assert kept(np.zeros((5, 0)), 5) is None
    assert kept(None, 5) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (np.zeros((4, 2)), "for 5 nodes"),
        (np.zeros(5), "for 5 nodes"),
        (np.full((5, 2), "a"), "type <U1"),
        (np.full((5, 2), 1j), "complex128"),
        (np.where(np.arange(10).reshape(5, 2) == 7, np.nan, 1.0), "at node 3"),
        (sparse.csr_matrix(np.diag([np.inf] * 5)), "NaN or beyond float32"),
    ],
)
def test_bad_features_are_one_sentence(given: Any, expected: str) -> None:
    with pytest.raises(MgraphError, match=expected):
        kept(given, 5)


@pytest.mark.parametrize("density", [0.1, 0.9])
def test_super_rows_are_means(density: float) -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((300, 20)) * (rng.random((300, 20)) < density)).astype(np.float32)
    clusters = rng.permutation(np.arange(300) % 31).astype(np.int32)
    found = kept(x, 300, clusters=clusters)
    assert sparse.issparse(found) == (density < 0.25)
    assert found is not None
    means = (found.toarray() if sparse.issparse(found) else found)[300:]
    expected = np.stack([x[clusters == cluster].astype(np.float64).mean(0) for cluster in range(31)])
    # Ten float32 additions of values below 4: 10 * 4 * 6e-8 absolute.
    np.testing.assert_allclose(means, expected, rtol=0, atol=3e-6)


def test_sparse_input_makes_no_dense_temporary() -> None:
    rows, columns = 20_000, 8_000  # 640 MB as dense float32
    entries = np.random.default_rng(0).integers(0, rows * columns, 160_000)
    values = np.ones(entries.size, np.float32)
    x = sparse.csr_matrix((values, (entries // columns, entries % columns)), shape=(rows, columns))
    clusters = (np.arange(rows) // 10).astype(np.int32)
    tracemalloc.start()
    features = checked("file", x, rows)
    assert sparse.issparse(features)
    assert sum(block.shape[0] for block in super_blocks(features, clusters, np.full(rows // 10, 10, np.int32))) == 2000
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 20 * (x.data.nbytes + x.indices.nbytes)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("least", [-2, 0])
def test_blocks_make_no_difference(least: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signed rows are coded, and listed without their negative entries, of which two in five are left; thin ones are
    sparse: tables and digest are those of one block."""
    rng = np.random.default_rng(0)
    x = np.maximum(rng.integers(-2, 3, (400, 40)), least) * 0.1
    thin = np.where(rng.random(x.shape) < 0.1, x, 0)
    graphs = []
    for number, given in enumerate((x, thin)):
        path = tmp_path / f"{number}.npz"
        np.savez(path, edge_index=rng.integers(0, 400, (2, 900)), x=given, y=np.arange(400) % 3)
        pair = [load_graph(str(path), tmp_path, tmp_path / "one", feature_dtype=dtype)]
        with monkeypatch.context() as patch:
            patch.setattr(rows, "BLOCK_ENTRIES", 7 * 40)
            patch.setattr(featurestore, "BLOCK_ENTRIES", 33)
            pair.append(load_graph(str(path), tmp_path, tmp_path / "many", feature_dtype=dtype))
        graphs.append(pair)
    for one, many in graphs:
        assert one.digest == many.digest
        assert one.tables.keys() == many.tables.keys()
        for name, table in one.tables.items():
            np.testing.assert_array_equal(table, many.tables[name], err_msg=name)
    assert ("feature_code" if least else "feature_indices") in graphs[0][0].tables
    assert isinstance(graphs[0][0].features, DenseFeatures)
    assert isinstance(graphs[1][0].features, SparseFeatures)


_PEAK = """
import sys, threading, time
from pathlib import Path
from megagraph_cli.graph.prepare import load_graph

def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))

def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous_bytes())

folder = Path(sys.argv[1])
load_graph(str(folder / "small.npz"), folder, folder / "cache")  # compiles, imports
done, peak, before = threading.Event(), [0], anonymous_bytes()
watcher = threading.Thread(target=watch)
watcher.start()
graph = load_graph(sys.argv[2], folder, folder / "cache")
done.set()
watcher.join()
print(peak[0] - before, graph.features.x.nbytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell what is anonymous memory")
@pytest.mark.parametrize("layout", ["npy", "npz", "deflated npz", "npz by column"])
def test_memory_does_not_grow_with_features(layout: str, tmp_path: Path) -> None:
    """Of 400 MB of features, what is in memory and in no file stays below a fifth; held whole they would take all."""
    num_nodes, columns, few = 20_000, 5_000, 500
    rng = np.random.default_rng(0)
    edges, labels = rng.integers(0, num_nodes, (2, 40_000)), np.arange(num_nodes) % 3
    x = np.tile(rng.integers(-8, 9, (num_nodes, 40), dtype=np.int8).astype(np.float32), columns // 40)
    np.savez(tmp_path / "small.npz", edge_index=edges[:, :few] % few, x=x[:few, :64], y=labels[:few])
    own = tmp_path / "own.npz"
    if layout == "npy":
        raw = tmp_path / "reddit2" / "raw"
        raw.mkdir(parents=True)
        adjacency = sparse.coo_matrix((np.ones(40_000), edges), shape=(num_nodes, num_nodes))
        sparse.save_npz(raw / "adj_full.npz", adjacency.tocsr())
        np.save(raw / "feats.npy", x)
        (raw / "class_map.json").write_text(json.dumps(dict(enumerate(labels.tolist()))))
        (raw / "role.json").write_text(json.dumps({"tr": [0], "va": [1], "te": [2]}))
    else:
        save = np.savez_compressed if layout == "deflated npz" else np.savez
        save(own, edge_index=edges, x=np.asfortranarray(x) if layout == "npz by column" else x, y=labels)
    command = [sys.executable, "-c", _PEAK, str(tmp_path), "reddit2" if layout == "npy" else str(own)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    peak_bytes, feature_bytes = map(int, run.stdout.split())
    assert feature_bytes > 400e6
    assert peak_bytes < 80e6
    stores = [np.load(path, mmap_mode="r") for path in (tmp_path / "cache").glob("*/features_x.npy")]
    found = max(stores, key=lambda store: int(store.size))
    np.testing.assert_array_equal(found[:num_nodes], x)


def test_a_disk_too_small_for_features_leaves_nothing(tmp_path: Path) -> None:
    """Room for super nodes' rows is reserved before they are added up: no signal, one sentence."""
    cache = tmp_path / "cache"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit_bytes in (60_000, 150_000, 900_000):  # less than the super nodes' rows, the graph, the rows, the codes
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))  # writes beyond fail with EFBIG, as ENOSPC would
        try:
            with pytest.raises(MgraphError, match="--cache"):
                load_graph("synthetic:nodes=3000,edges=9000,features=90", tmp_path, cache)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert list(cache.iterdir()) == []
