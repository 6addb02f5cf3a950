"""A whole training step of a 16-layer model beside the serial dense formulation, on the same batch, in the same run.

    python bench/step.py [--threads 1] [--shapes 256x17,128x64,8x512] [--rounds 7] [--dropout 0] [--recompute none]

The peer stores scores and adds the bias to them, every layer for all rows, by autograd, as the paper writes the model:
same weights, same batch (graph, features, labels), same loss, gradient clipping and AdamW. Both build the bias channels
from the adjacency in every step. d = ffn = 64, 8 heads, 6 channels, 767 features. Steps alternate; ratios are ours over
the peer's: medians of seconds, and peak bytes of live tensors (weights, gradients, optimizer and batch included).
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from megagraph_cli.artifacts.workload import BatchSection, DatasetSection, ModelSection, Recipe, TrainSection
from megagraph_cli.commands.workloads import workload_of
from megagraph_cli.graph.prepare import load_graph
from megagraph_cli.graph.splits import make_split
from megagraph_cli.layout.dims import AXES, ParallelDims
from megagraph_cli.model.bias import Topology
from megagraph_cli.parallel.mesh import build_mesh
from megagraph_cli.runtime.build import Order, StageParts, build_stage
from megagraph_cli.runtime.meters import metered
from megagraph_cli.runtime.step import TrainStep
from megagraph_cli.runtime.tensors import DeviceBatch, to_device

LAYERS, HEADS, HIDDEN, CHANNELS = 16, 8, 64, 6
CPU = torch.device("cpu")
GRAPH = "synthetic:nodes=13752,edges=245861,features=767,classes=10,seed=0"


def recipe(batch: int, rows: int, dropout: float) -> Recipe:
    num_super = max(1, rows // 16)
    return Recipe(
        dataset=DatasetSection(name=GRAPH),
        model=ModelSection(
            num_layers=LAYERS,
            num_heads=HEADS,
            hidden_dim=HIDDEN,
            ffn_dim=HIDDEN,
            dropout=dropout,
            attention_dropout=dropout,
            input_dropout=dropout,
            bias_powers=CHANNELS,
            bias_init_std=1.0,
        ),
        batch=BatchSection(batch_size=batch, num_sampled=rows - 1 - num_super, num_super=num_super, num_global=1),
        train=TrainSection.model_validate({"lr": 1e-4, "grad_clip": 1.0}),
    )


class DenseLayer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.bias_weight = nn.Parameter(torch.empty(CHANNELS, HEADS))
        self.bias_offset = nn.Parameter(torch.empty(HEADS))
        self.dropout = dropout

    def forward(self, x: Tensor, channels_MBSS: Tensor, padded: Tensor, tokens: Tensor) -> Tensor:
        batch, rows, _ = x.shape
        # Channels of a head lie [E, H] in mgraph's projections: the same weights give the same heads.
        q, k, v = self.qkv(self.norm1(x)).view(batch, rows, 3, -1, HEADS).permute(2, 4, 0, 1, 3)
        bias = torch.addmm(self.bias_offset.unsqueeze(-1), self.bias_weight.T, channels_MBSS.flatten(1))
        bias = bias.view(HEADS, batch, rows, rows) + (self.bias_weight.T @ tokens).view(HEADS, 1, rows, rows)
        logits = q @ k.transpose(-1, -2) / math.sqrt(HIDDEN // HEADS) + bias
        weights = torch.softmax(logits.masked_fill(padded, -1e30), dim=-1)
        heads = functional.dropout(weights, self.dropout, self.training) @ v
        x = x + functional.dropout(self.out(heads.permute(1, 2, 3, 0).flatten(2)), self.dropout, self.training)
        branch = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + functional.dropout(branch, self.dropout, self.training)


class Dense(nn.Module):
    """The model as the paper writes it: channels, bias and scores of all rows, stored."""

    def __init__(self, parts: StageParts) -> None:
        super().__init__()
        model, spec = parts.workload.model, parts.workload.batch
        graph = parts.workload.graph
        assert graph is not None
        self.nodes, self.supers = spec.num_sampled, spec.num_super
        self.rows = self.nodes + self.supers + 1
        self.input = nn.Linear(graph.features, HIDDEN)
        self.token, self.token_bias = nn.Parameter(torch.empty(1, HIDDEN)), nn.Parameter(torch.empty(1, CHANNELS))
        self.layers = nn.ModuleList(DenseLayer(model.dropout) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, graph.classes)
        self.dropout = model.input_dropout
        on_token = torch.zeros(self.rows, self.rows)
        on_token[-1] = on_token[:, -1] = 1.0
        self.register_buffer("on_token", on_token.view(1, -1))
        self._copy(dict(parts.runner.stage.named_parameters()))

    @torch.no_grad()
    def _copy(self, theirs: dict[str, nn.Parameter]) -> None:
        renamed = {
            "input.bias": "embedding.bias",
            "token": "embedding.tokens",
            "token_bias": "token_bias",
            "norm.weight": "head.norm.weight",
            "norm.bias": "head.norm.bias",
            "head.weight": "head.linear.weight",
            "head.bias": "head.linear.bias",
        }
        for name, mine in self.named_parameters():
            if name == "input.weight":
                mine.copy_(theirs["embedding.weight"].T)
                continue
            other = renamed.get(name, name)
            short = name.rpartition(".")[0].rpartition(".")[2]
            if short in ("qkv", "out"):
                other = name.replace(f".{short}.", f".attention.{short}.")
            elif ".bias_" in name:
                other = name.replace(".bias_", ".attention.bias_")
            mine.copy_(theirs[other])

    def channels(self, topology: Topology) -> Tensor:
        """[M, B, S, S]: powers of the adjacency between nodes, of the coarse one where a super node takes part."""
        node = adjacency(topology.node_bits, topology.node_scale)
        coarse = adjacency(topology.coarse_bits, topology.coarse_scale)
        place, known = topology.coarse_index.long(), self.nodes + self.supers
        out = node.new_zeros(CHANNELS, node.shape[0], self.rows, self.rows)
        power, thin = node, torch.gather(coarse, 2, place[:, None, self.nodes :].expand(-1, coarse.shape[1], -1))
        for m in range(CHANNELS):
            pairs = torch.gather(thin, 1, place[:, :, None].expand(-1, -1, self.supers))
            out[m, :, : self.nodes, : self.nodes] = power
            out[m, :, :known, self.nodes : known] = pairs
            out[m, :, self.nodes : known, :known] = pairs.transpose(1, 2)
            if m + 1 < CHANNELS:
                power, thin = power @ node, coarse @ thin
        return out

    def forward(self, batch: DeviceBatch) -> Tensor:
        nodes = batch.nodes
        assert nodes is not None
        if nodes.dense is not None:
            rows = self.input(nodes.dense)
        else:
            assert nodes.columns is not None
            rows = self.input.bias + functional.embedding_bag(
                nodes.columns,
                self.input.weight.T,
                nodes.offsets,
                mode="sum",
                per_sample_weights=nodes.values,
                include_last_offset=True,
            )
        x = functional.embedding(nodes.place, torch.cat((rows, self.token, rows.new_zeros(1, HIDDEN))))
        x = functional.dropout(x, self.dropout, self.training)
        channels = self.channels(batch.topology)
        padded = functional.pad(~batch.topology.real, (0, 1)).view(1, -1, 1, self.rows)
        tokens = self.token_bias.T * self.on_token
        for layer in self.layers:
            x = layer(x, channels, padded, tokens)
        return self.head(self.norm(x[:, 0]))


def adjacency(bits: Tensor, scale: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8)
    dense = ((bits.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., : scale.shape[-1]].float()
    return dense * scale.unsqueeze(-1) * scale.unsqueeze(-2)


class DenseStep:
    def __init__(self, parts: StageParts) -> None:
        self.model = Dense(parts).train()
        self.parameters = list(self.model.parameters())
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, weight_decay=0.01, fused=True)

    def run(self, batch: DeviceBatch) -> Tensor:
        self.optimizer.zero_grad(set_to_none=False)
        loss = functional.cross_entropy(self.model(batch), batch.labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return loss.detach()


def seconds(run: object) -> float:
    start = time.perf_counter()
    run()  # type: ignore[operator]
    return time.perf_counter() - start


def measure(shape: str, arguments: argparse.Namespace, cache: Path) -> str:
    batch_size, rows = map(int, shape.split("x"))
    graph = load_graph(GRAPH, Path("no-data"), cache)
    chosen = recipe(batch_size, rows, arguments.dropout)
    split = make_split(graph, chosen.dataset.split, chosen.dataset.split_seed)
    workload = workload_of(chosen, graph, split)
    order = Order(ParallelDims(1, 1, 1), AXES, (LAYERS,), 1, "gpipe", recompute=arguments.recompute)
    mesh = build_mesh(order.dims, AXES, "cpu")
    threads = torch.get_num_threads()
    parts = build_stage(order, workload, graph, mesh, CPU, threads=threads, microbatch_size=batch_size)
    batch = [to_device(part, CPU) for part in parts.builder.build(split.train[:batch_size], epoch=1, view=0)]
    peer, train = DenseStep(parts), TrainStep(parts)
    counter = iter(range(1000))

    def ours() -> float:
        return float(train.run(batch, step=next(counter), num_targets=batch_size, lr=1e-4)[0])

    def dense() -> float:
        return float(peer.run(batch[0]))

    first = ours(), dense()
    assert arguments.dropout or abs(first[0] - first[1]) <= 1e-4 * first[1], f"losses differ: {first}"
    times: dict[str, list[float]] = {"ours": [], "dense": []}
    for _ in range(arguments.rounds):
        times["ours"].append(seconds(ours))
        times["dense"].append(seconds(dense))
    fixed = 16 * sum(p.numel() for p in peer.parameters) + batch_bytes(batch[0])
    peaks = {name: fixed + rise(run) for name, run in (("ours", ours), ("dense", dense))}
    mine, theirs = (statistics.median(times[name]) for name in ("ours", "dense"))
    return (
        f"{threads:7}  {shape:9}  {mine * 1e3:7.0f}  {theirs * 1e3:8.0f}  {mine / theirs:10.2f}  "
        f"{peaks['ours'] / 2**20:8.1f}  {peaks['dense'] / 2**20:9.1f}  {peaks['ours'] / peaks['dense']:11.3f}"
    )


def batch_bytes(batch: DeviceBatch) -> int:
    holders = (batch.topology, batch.nodes, batch)
    tensors = [t for holder in holders for t in vars(holder).values() if isinstance(t, Tensor)]
    return sum(t.nbytes for t in tensors)


def rise(run: object) -> int:
    with metered(CPU, from_zero=True) as reading:
        run()  # type: ignore[operator]
    return reading.peak_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shapes", default="256x17,128x64,8x512")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--recompute", choices=("none", "full"), default="none")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cache = Path(os.environ.get("MGRAPH_CACHE", "~/.cache/mgraph/graphs")).expanduser()
    print("threads  B x S      ours ms  dense ms  time ratio  ours MiB  dense MiB  bytes ratio", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for shape in arguments.shapes.split(","):
            print(measure(shape, arguments, cache), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
