"""Test accuracy of the shipped recipes beside a GCN and an MLP on the same splits, in the same run.

    python bench/accuracy.py [--datasets citeseer,cora,computers,photo] [--seeds 42,0,1] [--gpus 2]

For every dataset and split seed (random 60/20/20): `mgraph train` with the recipe that ships, data parallel over
`--gpus` CPU workers, a two-layer GCN of torch-geometric and a two-layer MLP in plain torch, each tested at its best
validation epoch. Raw files lie under MGRAPH_DATA. Prints mean and standard error over the seeds, and the training time
of mgraph.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy import sparse
from torch.nn import functional
from torch_geometric.nn import GCNConv
from torch_geometric.utils import to_torch_csr_tensor

from megagraph_cli import recipes
from megagraph_cli.artifacts.plan import Dims, Plan
from megagraph_cli.artifacts.workload import Recipe, Workload
from megagraph_cli.graph.graph import DenseFeatures, Graph, Split
from megagraph_cli.graph.prepare import load_graph
from megagraph_cli.graph.splits import make_split

EPOCHS, HIDDEN, DROPOUT, LR, WEIGHT_DECAY = 200, 64, 0.5, 0.01, 5e-4
"""The usual setting of both peers (Kipf & Welling), untuned."""
DENSE_FROM = 0.1
"""Density from which a product of dense matrices is the faster one."""


class Peer(torch.nn.Module):
    """A two-layer GCN over an adjacency [V, V] in CSR, or an MLP where there is none."""

    def __init__(self, num_features: int, num_classes: int, adjacency: torch.Tensor | None) -> None:
        super().__init__()
        make = torch.nn.Linear if adjacency is None else partial(GCNConv, cached=True)
        self.first, self.second = make(num_features, HIDDEN), make(HIDDEN, num_classes)
        self.edges = () if adjacency is None else (adjacency,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = drop_entries(x, DROPOUT) if self.training else x
        x = functional.dropout(self.first(x, *self.edges).relu(), DROPOUT, self.training)
        return self.second(x, *self.edges)


def drop_entries(x: torch.Tensor, probability: float) -> torch.Tensor:
    """Dropout; of a CSR matrix the stored entries are enough, for dropping a zero changes nothing."""
    if x.layout == torch.strided:
        return functional.dropout(x, probability)
    kept = functional.dropout(x.values(), probability)
    return torch.sparse_csr_tensor(x.crow_indices(), x.col_indices(), kept, x.shape)


def peer_accuracy(graph: Graph, split: Split, x: torch.Tensor, *, edges: torch.Tensor | None, seed: int) -> float:
    """Test accuracy in per cent at the best validation epoch."""
    torch.manual_seed(seed)
    model = Peer(x.shape[1], graph.num_classes, edges)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    labels = torch.from_numpy(np.array(graph.labels))
    train, val, test = (torch.from_numpy(np.array(part)) for part in (split.train, split.val, split.test))
    best, at_best = -1.0, 0.0
    for _ in range(EPOCHS):
        model.train()
        optimizer.zero_grad()
        functional.cross_entropy(model(x)[train], labels[train]).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            right = model(x).argmax(-1) == labels
        score = float(right[val].float().mean())
        if score > best:
            best, at_best = score, 100 * float(right[test].float().mean())
    return at_best


def node_features(graph: Graph) -> torch.Tensor:
    """Node features [V, F]: sparse ones as CSR, rows scaled to sum 1 as both peers expect; dense ones as they are,
    with which both peers do better."""
    rows = csr(graph)
    if rows.nnz > DENSE_FROM * np.prod(rows.shape):
        return torch.from_numpy(rows.toarray())
    totals = np.maximum(abs(rows).sum(1), 1e-12)
    scaled = sparse.csr_matrix(rows.multiply(1 / totals), dtype=np.float32)
    parts = (torch.from_numpy(part) for part in (scaled.indptr, scaled.indices, scaled.data))
    return torch.sparse_csr_tensor(*parts, size=scaled.shape)


def csr(graph: Graph) -> sparse.csr_matrix:
    features = graph.features
    if isinstance(features, DenseFeatures):
        return sparse.csr_matrix(np.array(features.x[: graph.num_nodes], dtype=np.float32))
    assert features is not None
    indptr = np.array(features.indptr[: graph.num_nodes + 1])
    stored = features.data[: indptr[-1]].astype(np.float32), features.indices[: indptr[-1]], indptr
    return sparse.csr_matrix(stored, shape=(graph.num_nodes, features.num_columns))


def adjacency(graph: Graph) -> torch.Tensor:
    """A [V, V] in CSR."""
    tails = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    edges = torch.from_numpy(np.stack([tails, np.array(graph.indices, dtype=np.int64)]))
    return to_torch_csr_tensor(edges, size=(graph.num_nodes, graph.num_nodes))


def mgraph_accuracy(recipe: Recipe, gpus: int, folder: Path) -> tuple[float, float]:
    """(test accuracy in per cent, seconds) of `mgraph train` under a data-parallel plan."""
    plan = Plan(
        gpus=gpus,
        device="cpu",
        workload=Workload(dataset=recipe.dataset, model=recipe.model, batch=recipe.batch, train=recipe.train),
        dims=Dims(pp=1, dp=gpus, cp=1),
        layers_per_stage=[recipe.model.num_layers],
        num_microbatches=1,
    )
    plan.save(folder / "plan.json")
    command = [sys.executable, "-m", "megagraph_cli.cli", "train", "--json", "--run-dir", "run"]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"mgraph train failed with exit code {done.returncode}: {done.stderr[-500:]}")
    score = json.loads((folder / "run" / "run.json").read_text(encoding="utf-8"))["test_score"]
    return 100 * score, seconds


def spread(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.1f} +- {error:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default="citeseer,cora,computers,photo")
    parser.add_argument("--seeds", default="42,0,1")
    parser.add_argument("--gpus", type=int, default=2)
    chosen = parser.parse_args()
    root = Path(os.environ.get("MGRAPH_DATA", Path.home() / ".cache/mgraph/data"))
    cache = Path(os.environ.get("MGRAPH_CACHE", Path.home() / ".cache/mgraph/graphs"))
    print(f"{'set':12s}{'MLP':>14s}{'GCN':>14s}{'mgraph':>14s}{'minus GCN':>11s}{'s per run':>11s}")
    for name in chosen.datasets.split(","):
        dtype = recipes.resolve(name, None, ()).dataset.feature_dtype
        graph = load_graph(name, root, cache, feature_dtype=dtype)
        x, edges = node_features(graph), adjacency(graph)
        mlp, gcn, ours, seconds = [], [], [], []
        for seed in map(int, chosen.seeds.split(",")):
            recipe = recipes.resolve(name, None, (f"dataset.split_seed={seed}",))
            split = make_split(graph, recipe.dataset.split, seed)
            mlp.append(peer_accuracy(graph, split, x, edges=None, seed=seed))
            gcn.append(peer_accuracy(graph, split, x, edges=edges, seed=seed))
            with tempfile.TemporaryDirectory() as folder:
                score, taken = mgraph_accuracy(recipe, chosen.gpus, Path(folder))
            ours.append(score)
            seconds.append(taken)
            print(f"  {name} seed {seed}: MLP {mlp[-1]:.1f} GCN {gcn[-1]:.1f} mgraph {score:.1f}", file=sys.stderr)
        gap = statistics.mean(ours) - statistics.mean(gcn)
        print(f"{name:12s}{spread(mlp):>14s}{spread(gcn):>14s}{spread(ours):>14s}{gap:>+11.1f}{max(seconds):>11.0f}")


if __name__ == "__main__":
    main()
