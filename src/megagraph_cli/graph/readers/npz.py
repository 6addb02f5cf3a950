"""Graphs in one ``.npz``: the user's own keys, those of gnn-benchmark, those of the heterophilous-graph sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from megagraph_cli.errors import MgraphError
from megagraph_cli.graph.readers.files import Npz
from megagraph_cli.graph.readers.planetoid import checked_csr
from megagraph_cli.graph.readers.raw import RawGraph, stack_masks


def read_npz(path: Path) -> RawGraph:
    """The raw graph of a ``.npz`` in any of the three key layouts of the documentation.

    Raises MgraphError (exit 2) on a damaged file, one without known keys, or arrays that do not fit each other.
    """
    with Npz(path) as arrays:
        if "edge_index" in arrays.names:
            return _read_own(arrays)
        if "adj_indptr" in arrays.names:
            return _read_gnn_benchmark(arrays)
        if "edges" in arrays.names:
            return _read_heterophilous(arrays)
        raise MgraphError(
            f"{path} has none of the known keys (it holds {', '.join(sorted(arrays.names)) or 'nothing'}); "
            "give it edge_index, x and y, or the keys of gnn-benchmark (adj_*, attr_*, labels)"
        )


def _csr(arrays: Npz, prefix: str) -> sparse.csr_matrix:
    parts = [arrays.get(f"{prefix}_{key}") for key in ("data", "indices", "indptr", "shape")]
    try:
        return checked_csr(*parts)
    except (ValueError, TypeError) as error:
        raise MgraphError(f"{arrays.path} has {prefix}_* arrays with {error}; save the matrix again") from error


def _masks(arrays: Npz, plural: str) -> list[NDArray[Any] | None]:
    return [arrays.find(f"{part}_mask{plural}") for part in ("train", "val", "test")]


def _read_own(arrays: Npz) -> RawGraph:
    origin = str(arrays.path)
    edge_index, labels = arrays.get("edge_index"), arrays.get("y")
    if edge_index.ndim != 2 or edge_index.shape[0] != 2:
        raise MgraphError(f"{origin} has edge_index of shape {list(edge_index.shape)}; give it the shape [2, E]")
    features = _csr(arrays, "x") if "x_indptr" in arrays.names else arrays.find_rows("x")
    num_nodes = int(labels.shape[0]) if features is None and labels.ndim else _rows(origin, "x", features)
    masks = stack_masks(origin, num_nodes, *_masks(arrays, ""))
    return RawGraph(origin, num_nodes, edge_index[0], edge_index[1], labels, features, masks, keep_sparse=True)


def _rows(origin: str, name: str, features: Any) -> int:
    if features is None or features.ndim != 2:
        raise MgraphError(f"{origin} has {name} that is not a table; give it the shape [nodes, features]")
    return int(features.shape[0])


def _read_gnn_benchmark(arrays: Npz) -> RawGraph:
    origin = str(arrays.path)
    adjacency, labels = _csr(arrays, "adj"), arrays.get("labels")
    num_nodes, columns = adjacency.shape
    if num_nodes != columns:
        raise MgraphError(f"{origin} has an adjacency of shape {[num_nodes, columns]}; it must be square")
    features = _csr(arrays, "attr") if "attr_indptr" in arrays.names else arrays.find_rows("attr_matrix")
    tails = np.repeat(np.arange(num_nodes, dtype=np.int32), np.diff(adjacency.indptr))
    masks = stack_masks(origin, num_nodes, *_masks(arrays, ""))
    return RawGraph(origin, num_nodes, tails, adjacency.indices, labels, features, masks)


def _read_heterophilous(arrays: Npz) -> RawGraph:
    origin = str(arrays.path)
    edges, labels = arrays.get("edges"), arrays.get("node_labels")
    if edges.ndim != 2 or edges.shape[1] != 2:
        raise MgraphError(f"{origin} has edges of shape {list(edges.shape)}; give it the shape [E, 2]")
    features = arrays.find_rows("node_features")
    num_nodes = int(labels.shape[0]) if features is None and labels.ndim else _rows(origin, "node_features", features)
    masks = stack_masks(origin, num_nodes, *_masks(arrays, "s"))
    tails, heads = (np.ascontiguousarray(edges[:, end]) for end in (0, 1))
    return RawGraph(origin, num_nodes, tails, heads, labels, features, masks)
