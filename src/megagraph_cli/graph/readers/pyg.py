"""A PyG ``Data`` object (or a dict of tensors) saved with ``torch.save``: tensors only, nothing is executed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from megagraph_cli.errors import MgraphError
from megagraph_cli.graph.readers.files import reading
from megagraph_cli.graph.readers.raw import RawGraph, stack_masks


def read_pt(path: Path) -> RawGraph:
    """The raw graph of a ``.pt`` file with ``edge_index``, ``y``, optional ``x`` (dense or sparse) and masks.

    Raises MgraphError (exit 2) on a damaged file, one that would run code, or one without the tensors.
    """
    fields = _load(path)
    edge_index, labels = _array(path, fields, "edge_index"), _array(path, fields, "y")
    if labels is None or edge_index is None or edge_index.ndim != 2 or edge_index.shape[0] != 2:
        raise MgraphError(f"{path} lacks edge_index [2, E] or y [V]; save a Data object that has both")
    features = _features(path, fields.get("x"))
    num_nodes = int(labels.shape[0] if features is None and labels.ndim else _rows(path, features))
    masks = stack_masks(
        str(path), num_nodes, *(_array(path, fields, f"{part}_mask") for part in ("train", "val", "test"))
    )
    return RawGraph(str(path), num_nodes, edge_index[0], edge_index[1], labels, features, masks)


def _load(path: Path) -> dict[str, Any]:
    import torch
    from torch_geometric.data import Data
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage

    allowed: list[Any] = [Data, DataEdgeAttr, DataTensorAttr, GlobalStorage]
    try:
        with reading(path), torch.serialization.safe_globals(allowed):
            try:
                value = torch.load(path, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as error:
                raise MgraphError(
                    f"{path} holds more than tensors in a PyG Data, which could run code and is refused; "
                    "save a plain Data object with tensors"
                ) from error
    except RuntimeError as error:  # torch's zip reader on a cut file
        raise MgraphError(f"{path} is truncated or damaged; replace it with a whole copy") from error
    if isinstance(value, Data):
        return dict(value.to_dict())
    if isinstance(value, dict):
        return value
    raise MgraphError(f"{path} holds a {type(value).__name__}; save a PyG Data object")


def _array(path: Path, fields: dict[str, Any], name: str) -> NDArray[Any] | None:
    import torch

    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        raise MgraphError(f"{path} has {name} that is not a dense tensor; save it as one")
    if value.dtype == torch.bfloat16:
        value = value.float()
    return np.asarray(value.detach().numpy())


def _features(path: Path, value: Any) -> NDArray[Any] | sparse.csr_matrix | None:
    import torch

    if not isinstance(value, torch.Tensor) or value.layout == torch.strided:
        return _array(path, {"x": value}, "x")
    if value.dim() != 2:
        raise MgraphError(f"{path} has a sparse x that is not a table; give it the shape [nodes, features]")
    entries = value.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
    rows, columns = entries.indices().numpy()
    return sparse.csr_matrix((entries.values().numpy(), (rows, columns)), shape=tuple(value.shape))


def _rows(path: Path, features: Any) -> int:
    if features is None or features.ndim != 2:
        raise MgraphError(f"{path} has x or y of no usable shape; give x [nodes, features] and y [nodes]")
    return int(features.shape[0])
