"""What context parallelism leaves on a rank: peak bytes of activations and bias at cp = 1, 2, 4.

    python bench/memory.py [--rows 512,2048] [--context ring]

A training step of 4 layers (d = ffn = 64, 8 heads, 6 channels) on a synthetic graph, all ranks on this machine; the
largest rank's `activations` of the memory meter (the rise during the step: saved activations, channels, temporaries),
beside 1 / cp of one rank's. Prints one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megagraph_cli.artifacts.workload import Recipe, Workload
from megagraph_cli.commands.workloads import workload_of
from megagraph_cli.graph.batch import replica_targets
from megagraph_cli.graph.prepare import load_graph, open_graph
from megagraph_cli.graph.splits import make_split
from megagraph_cli.layout.dims import AXES, ParallelDims
from megagraph_cli.parallel.mesh import build_mesh
from megagraph_cli.runtime.build import Order, build_stage
from megagraph_cli.runtime.meters import metered
from megagraph_cli.runtime.step import TrainStep
from megagraph_cli.runtime.tensors import to_device

GRAPH = "synthetic:nodes=20000,edges=200000,features=64,classes=8,seed=0"
CPU, LAYERS, TOKENS = torch.device("cpu"), 4, 4096


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="512,2048")
    parser.add_argument("--context", default="ring", choices=["ring", "allgather"])
    parser.add_argument("--degrees", default="1,2,4")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = load_graph(GRAPH, Path(folder), Path(folder) / "cache").path
        for rows in map(int, options.rows.split(",")):
            alone = None
            for cp in map(int, options.degrees.split(",")):
                peak = max(measure(cp, rows, options.context, path))
                alone = peak * cp if alone is None else alone
                line = {"rows": rows, "cp": cp, "context": options.context, "activations_bytes": peak}
                print(json.dumps(line | {"of_one_by_cp": peak / (alone / cp)}), flush=True)


def measure(cp: int, rows: int, context: str, graph_path: Path) -> list[int]:
    """Each rank's bytes of activations and bias at the peak of its second step."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (cp, rows, context, graph_path, folder), nprocs=cp, start_method="spawn")
        return [int((Path(folder) / f"rank-{rank}").read_text()) for rank in range(cp)]


def _rank(rank: int, cp: int, rows: int, context: str, graph_path: Path, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=cp, timeout=timedelta(minutes=5))
    graph = open_graph(graph_path)
    recipe = _recipe(rows)
    split = make_split(graph, recipe.dataset.split, recipe.dataset.split_seed)
    train = _train_step(workload_of(recipe, graph, split), graph, cp, context)
    targets = replica_targets(split.train[: recipe.batch.batch_size], recipe.batch.batch_size, 1, 0, 1)
    batch = [to_device(part, CPU) for part in train.parts.builder.build(targets, epoch=1, view=0)]
    for step in range(2):
        with metered(CPU, holders=train.holders(batch)) as reading:
            train.run(batch, step=step, num_targets=targets.size, lr=1e-3)
    (Path(folder) / f"rank-{rank}").write_text(str(reading.categories["activations"]))
    dist.destroy_process_group()


def _recipe(rows: int) -> Recipe:
    sections: dict[str, Any] = {
        "dataset": {"name": GRAPH},
        "model": {"num_layers": LAYERS, "hidden_dim": 64, "ffn_dim": 64, "num_heads": 8},
        "batch": {"batch_size": max(1, TOKENS // rows), "num_sampled": rows - 2, "num_super": 1, "num_global": 1},
    }
    return Recipe.model_validate(sections)


def _train_step(workload: Workload, graph: Any, cp: int, context: str) -> TrainStep:
    dims = ParallelDims(1, 1, cp)
    order = Order(dims, AXES, (LAYERS,), 1, "gpipe", context=context)
    mesh = build_mesh(dims, AXES, "cpu")
    size = workload.batch.batch_size
    return TrainStep(build_stage(order, workload, graph, mesh, CPU, threads=1, microbatch_size=size))


if __name__ == "__main__":
    main()
