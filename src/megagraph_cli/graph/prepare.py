"""From a dataset's name to its prepared graph: read, check, clean, coarsen, store once, then map.

Legend: V nodes, Q clusters.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from megagraph_cli.errors import MgraphError
from megagraph_cli.graph import datasets, store
from megagraph_cli.graph.datasets import Dataset
from megagraph_cli.graph.graph import Graph
from megagraph_cli.graph.readahead import large_pages
from megagraph_cli.graph.readers.download import fetch
from megagraph_cli.graph.readers.raw import RawGraph, check_edges, compact_labels
from megagraph_cli.graph.store import open_graph

__all__ = ["load_graph", "open_graph"]


def load_graph(
    name: str,
    root: Path,
    cache: Path,
    *,
    feature_dtype: str = "float32",
    accept_download: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Graph:
    """The prepared graph called ``name``: mapped from ``cache``, where it is prepared first if it is not there.

    ``name`` is a dataset, a ``synthetic:...`` spec or a path to a ``.npz`` or ``.pt`` file; ``root`` holds raw files
    and is written by an accepted download only. ``feature_dtype`` is float32, or float16: features rounded to that are
    half as large, and everything drawn from them is what the rounded features say. Several processes may call this at
    once: one prepares.
    Raises MgraphError (exit 2) on an unknown name, missing or bad raw files, and a cache that cannot be written.
    """
    report = progress or _silent
    dataset, folder = datasets.resolve(name, root)
    _require_files(dataset, folder, accept_download, report)
    path = cache / _store_name(dataset, folder, feature_dtype)
    try:
        graph = store.open_store(path, check=True)
    except store.DamagedStoreError:
        with _cache_errors(cache), store.exclusive(path, _waiting(dataset, report)) as already_there:
            if not already_there:
                store.publish(path, lambda aside: _prepare(dataset, folder, aside, feature_dtype, report))
                large_pages(open_graph(path), path, lambda: report(f"{dataset.name}: reading it back in large pages"))
        graph = open_graph(path)
    return replace(graph, name=dataset.name)


def _waiting(dataset: Dataset, report: Callable[[str], None]) -> Callable[[], None]:
    return lambda: report(f"{dataset.name}: waiting for another process that prepares it")


def _silent(_message: str) -> None:
    return None


def _require_files(dataset: Dataset, folder: Path, accept_download: bool, report: Callable[[str], None]) -> None:
    missing = [file for file in dataset.files if not (folder / file).is_file()]
    if not missing:
        return
    if not accept_download:
        raise MgraphError(
            f"{dataset.name}: raw file {Path(missing[0]).name} is missing in {(folder / missing[0]).parent}; put it "
            "there, name another folder with --root, or pass --yes to download it"
        )
    fetch(dataset.name, dataset.remotes, folder, missing, report)


def _store_name(dataset: Dataset, folder: Path, feature_dtype: str) -> str:
    """The dataset's name and a hash of what the store is made from: file sizes and times, the store's version."""
    stats = [(file, (folder / file).stat()) for file in dataset.files]
    # A user's file goes by its resolved path: one store however the path is spelled.
    users_own = bool(dataset.files) and dataset.name not in datasets.REGISTRY
    made_from = [
        store.STORE_VERSION,
        dataset.revision,
        dataset.source if users_own else dataset.name,
        [[file, at.st_size, at.st_mtime_ns] for file, at in stats],
        feature_dtype,
    ]
    key = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:16]
    slug = re.sub(r"[^A-Za-z0-9]+", "-", Path(dataset.name).stem)[:40].strip("-")
    return f"{slug}-{key}"


@contextmanager
def _cache_errors(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MgraphError(
            f"the cache {cache} cannot be written ({error.strerror or error}); free space there or name another folder "
            "with --cache"
        ) from error


def _prepare(dataset: Dataset, folder: Path, aside: Path, feature_dtype: str, report: Callable[[str], None]) -> None:
    """Writes the whole store of ``dataset`` into the folder ``aside``."""
    # numba takes most of a second to import; mapping a graph that is already prepared does without it.
    from megagraph_cli.graph.tables import build_tables

    report(f"{dataset.name}: reading {folder if dataset.files else 'nothing, generating'}")
    writer = store.Writer(aside, report)
    facts = _write_content(
        dataset.read(folder, lambda said: report(f"{dataset.name}: {said}")), dataset, feature_dtype, writer, report
    )
    writer.finish(facts)
    report(f"{dataset.name}: building the sampler's tables")
    tables = build_tables(
        store.open_store(aside),
        lambda name, dtype, shape: writer.allocate(f"{store.TABLE_PREFIX}{name}", dtype, shape),
    )
    for name, table in tables.items():
        writer.put(f"{store.TABLE_PREFIX}{name}", table)
    writer.finish(facts)


def _write_content(
    raw: RawGraph, dataset: Dataset, feature_dtype: str, writer: store.Writer, report: Callable[[str], None]
) -> store.Facts:
    from megagraph_cli.graph.coarsen import coarsen
    from megagraph_cli.graph.featurestore import write_features
    from megagraph_cli.graph.readers.adjacency import undirected
    from megagraph_cli.graph.readers.features import checked

    if raw.num_nodes == 0:
        raise MgraphError(f"{raw.origin} has no nodes; give at least one")
    labels, num_classes = compact_labels(raw.origin, raw.labels, raw.num_nodes)
    tails, heads = check_edges(raw.origin, raw.tails, raw.heads, raw.num_nodes)
    features = checked(raw.origin, raw.features, raw.num_nodes, feature_dtype, keep_sparse=raw.keep_sparse)
    # Checked ids are copies, and what follows takes the most memory.
    raw = replace(raw, features=None, tails=tails[:0].copy(), heads=heads[:0].copy())
    report(f"{dataset.name}: sorting {tails.size} edge entries of {raw.num_nodes} nodes")
    adjacency = undirected(tails, heads, raw.num_nodes)
    del tails, heads
    report(f"{dataset.name}: coarsening {adjacency.indices.size // 2} edges")
    coarse = coarsen(adjacency.indptr, adjacency.indices)
    report(f"{dataset.name}: writing {writer.folder.parent}")
    for name, array in (
        ("indptr", adjacency.indptr),
        ("indices", adjacency.indices),
        ("labels", labels),
        ("clusters", coarse.clusters),
        ("cluster_sizes", coarse.sizes),
        ("coarse_indptr", coarse.indptr),
        ("coarse_indices", coarse.indices),
    ):
        writer.put(name, array)
    if raw.masks is not None:
        for part in ("train", "val", "test"):
            writer.put(f"mask_{part}", getattr(raw.masks, part))
    entries = write_features(raw.origin, features, coarse, feature_dtype, writer)
    counts = {
        "isolated": int(np.count_nonzero(np.diff(adjacency.indptr) == 0)),
        "self_loops": adjacency.self_loops,
        "duplicates": adjacency.duplicates,
        "one_way": adjacency.one_way,
        "unlabelled": int(np.count_nonzero(labels < 0)),
    }
    num_columns = 0 if features is None else int(features.shape[1])
    return store.Facts(dataset.name, dataset.licence, dataset.source, num_classes, num_columns, counts, entries)
