"""Feature rows in the form the store keeps: float32 or float16, sparse where that is smaller, super nodes' rows
appended. A user's own CSR stays CSR.

Legend: V nodes, Q clusters, F input features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from megagraph_cli.errors import MgraphError

SPARSE_BELOW = 0.25
"""Fraction of non-zero entries below which CSR rows are kept instead of dense ones: 8 bytes a non-zero entry against 4
an entry in float32, 6 against 2 in float16."""

_BLOCK_ENTRIES = 1 << 24
_WIDENED_COLUMNS = 8  # of float16 features that are float32 at a time


def canonical(
    origin: str,
    features: NDArray[Any] | sparse.csr_matrix | None,
    num_nodes: int,
    dtype: str = "float32",
    *,
    keep_sparse: bool = False,
) -> NDArray[Any] | sparse.csr_matrix | None:
    """Checked features [V, F] as ``dtype``, float32 or float16: CSR below 25 % density, else dense; None where there
    are no columns. With ``keep_sparse`` what comes as CSR stays CSR. CSR features of float16 are float16 numbers in a
    float32 array: scipy has no sparse float16.

    Raises MgraphError (exit 2) on NaN or infinite values, values that are not numbers, or a wrong row count.
    """
    if features is None or (features.ndim == 2 and features.shape[1] == 0):
        return None
    if features.ndim != 2 or features.shape[0] != num_nodes:
        raise MgraphError(
            f"{origin} has features of shape {list(features.shape)} for {num_nodes} nodes; give one row a node"
        )
    if features.dtype.kind not in "fiub":
        raise MgraphError(f"{origin} has features of type {features.dtype}; store them as real numbers")
    if sparse.issparse(features):
        return _canonical_sparse(origin, features, dtype, keep_sparse)
    return _canonical_dense(origin, features, dtype)


def _refuse_unless_finite(origin: str, values: NDArray[Any], first_row: int | None) -> None:
    finite = np.isfinite(values)
    if bool(finite.all()):
        return
    where = "" if first_row is None else f" at node {first_row + int(np.argwhere(~finite)[0, 0])}"
    wider = " or set dataset.feature_dtype=float32" if values.dtype == np.float16 and np.isinf(values).any() else ""
    raise MgraphError(
        f"{origin} has a feature that is NaN or beyond {values.dtype}{where}; replace it with a finite number{wider}"
    )


def _rounded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    with np.errstate(over="ignore"):  # what overflows becomes inf and is refused by name
        return values.astype(dtype, copy=False)


def _canonical_sparse(
    origin: str, features: sparse.csr_matrix, dtype: str, keep_sparse: bool
) -> NDArray[Any] | sparse.csr_matrix:
    data = _rounded(features.data, "float32")
    # A copy of the structure: sorting and summing below work in place and the caller's arrays may be mapped.
    result = sparse.csr_matrix((data, features.indices, features.indptr), shape=features.shape, copy=True)
    result.sum_duplicates()
    data = _rounded(result.data, dtype)
    _refuse_unless_finite(origin, data, None)
    result.data = data.astype(np.float32, copy=False)
    result.eliminate_zeros()
    if keep_sparse or result.nnz < SPARSE_BELOW * result.shape[0] * result.shape[1]:
        return result
    return np.asarray(result.toarray(), dtype=dtype)


def _canonical_dense(origin: str, features: NDArray[Any], dtype: str) -> NDArray[Any] | sparse.csr_matrix:
    rows, columns = features.shape
    step = max(1, _BLOCK_ENTRIES // columns)
    nonzero = 0
    for first in range(0, rows, step):
        block = _rounded(features[first : first + step], dtype)
        _refuse_unless_finite(origin, block, first)
        nonzero += int(np.count_nonzero(block))
    if nonzero >= SPARSE_BELOW * rows * columns:
        return _rounded(features, dtype)
    blocks = [
        sparse.csr_matrix(_rounded(features[first : first + step], dtype).astype(np.float32, copy=False))
        for first in range(0, rows, step)
    ]
    return sparse.vstack(blocks, format="csr", dtype=np.float32) if len(blocks) > 1 else blocks[0]


def super_rows(
    features: NDArray[Any] | sparse.csr_matrix, clusters: NDArray[np.int32], sizes: NDArray[np.int32]
) -> NDArray[np.float32] | sparse.csr_matrix:
    """The mean of each cluster's feature rows [Q, F] (paper: Coarsening), as a sparse matrix product.

    Summed in float64 for sparse and in float32 for dense features, members in ascending order.
    """
    num_nodes = clusters.shape[0]
    members = np.argsort(clusters, kind="stable").astype(np.int32)
    indptr = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    if sparse.issparse(features):
        weights = np.repeat(1.0 / sizes, sizes)
        mean = sparse.csr_matrix((weights, members, indptr), shape=(sizes.shape[0], num_nodes)) @ features
        mean.sort_indices()
        return mean.astype(np.float32)
    weights = np.repeat((1.0 / sizes).astype(np.float32), sizes)
    averaging = sparse.csr_matrix((weights, members, indptr), shape=(sizes.shape[0], num_nodes))
    if features.dtype == np.float32:
        return np.asarray(averaging @ features, dtype=np.float32)
    dense = np.empty((sizes.shape[0], features.shape[1]), dtype=np.float32)
    for start in range(0, features.shape[1], _WIDENED_COLUMNS):
        columns = slice(start, start + _WIDENED_COLUMNS)
        dense[:, columns] = averaging @ features[:, columns].astype(np.float32)
    return dense
