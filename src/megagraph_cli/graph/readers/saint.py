"""Reddit as GraphSAGE's users know it (two npz files), and Reddit2 as GraphSAINT stores its graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.errors import MgraphError
from megagraph_cli.graph.graph import Masks
from megagraph_cli.graph.readers.files import Npz, read_json, read_npy, reading
from megagraph_cli.graph.readers.planetoid import checked_csr
from megagraph_cli.graph.readers.raw import RawGraph

REDDIT_FILES = ("raw/reddit_data.npz", "raw/reddit_graph.npz")
SAINT_FILES = ("raw/adj_full.npz", "raw/feats.npy", "raw/class_map.json", "raw/role.json")
SAINT_DRIVE_IDS = (
    "1sncK996BM5lpuDf75lDFqCiDZyErc1c2",
    "1ZsHaJ0ussP1W722krmEIp_8pwKAoi5b3",
    "1JF3Pjv9OboMNYs2aXRQGbJbc4t_nDd5u",
    "1nJIKd77lcAGU4j-kVNx_AIGEkveIKz3A",
)
"""Where GraphSAINT's authors publish the four files, in their order."""


def read_reddit(folder: Path) -> RawGraph:
    """``reddit_data.npz`` (feature, label, node_types 1 train, 2 val, 3 test) and ``reddit_graph.npz`` (scipy COO
    or CSR). Raises MgraphError (exit 2) on damaged files."""
    with Npz(folder / REDDIT_FILES[0]) as data:
        features, labels, types = data.rows("feature"), data.get("label"), data.get("node_types")
    if features.ndim != 2 or types.shape != (features.shape[0],):
        raise MgraphError(f"{data.path} has features and node_types that do not fit; replace it with a whole copy")
    with Npz(folder / REDDIT_FILES[1]) as adjacency:
        if "row" in adjacency.names:
            tails, heads = adjacency.get("row"), adjacency.get("col")
        else:
            tails, heads = _csr_entries(adjacency)
    train, val, test = ((types == part)[None, :] for part in (1, 2, 3))
    origin = str(folder / "raw")
    return RawGraph(origin, int(features.shape[0]), tails, heads, labels, features, Masks(train, val, test))


def _csr_entries(arrays: Npz) -> tuple[NDArray[Any], NDArray[Any]]:
    """(tails, heads) of a square CSR as scipy's save_npz writes it."""
    parts = [arrays.get(key) for key in ("data", "indices", "indptr", "shape")]
    with reading(arrays.path):
        matrix = checked_csr(*parts)
    tails = np.repeat(np.arange(matrix.shape[0], dtype=np.int32), np.diff(matrix.indptr))
    return tails, matrix.indices


def read_saint(folder: Path) -> RawGraph:
    """GraphSAINT's ``adj_full.npz`` (CSR), ``feats.npy``, ``class_map.json`` (node -> class), ``role.json``
    (tr, va, te). Nodes that the class map leaves out have no label.

    Raises MgraphError (exit 2) on damaged files.
    """
    with Npz(folder / SAINT_FILES[0]) as adjacency:
        tails, heads = _csr_entries(adjacency)
    features = read_npy(folder / SAINT_FILES[1])
    with reading(folder / SAINT_FILES[1]):
        num_nodes, _ = features.shape
    labels = np.full(num_nodes, -1, dtype=np.int64)
    class_map = read_json(folder / SAINT_FILES[2])
    with reading(folder / SAINT_FILES[2]):
        if any(isinstance(label, list) for label in class_map.values()):
            raise MgraphError(
                f"{folder / SAINT_FILES[2]} gives a node several classes, which is not supported; give each node one"
            )
        labels[_ids(list(class_map), num_nodes)] = np.array(list(class_map.values()), dtype=np.int64)
    role = read_json(folder / SAINT_FILES[3])
    masks = []
    with reading(folder / SAINT_FILES[3]):
        for part in ("tr", "va", "te"):
            mask = np.zeros((1, num_nodes), dtype=np.bool_)
            mask[0, _ids(role[part], num_nodes)] = True
            masks.append(mask)
    return RawGraph(str(folder / "raw"), num_nodes, tails, heads, labels, features, Masks(*masks))


def _ids(values: list[Any], num_nodes: int) -> NDArray[np.int64]:
    """Node ids as int64. Raises ValueError on one outside the graph."""
    ids = np.array(values, dtype=np.int64)
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= num_nodes):
        raise ValueError(f"a node beyond the {num_nodes} nodes")
    return ids
