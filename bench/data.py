"""Data at the size of ogbn-products: preparing it, drawing from it, feeding two workers with it.

    python bench/data.py [--parts prepare,draw,hubs,plain,stall,chain] [--big synthetic:...] [--feature-dtype float16]

- prepare: `mgraph data` of the big generated graph in an empty cache; seconds, peak resident memory of its processes.
- draw: sequences of 32 nodes a second with two threads, on the big graph and on Amazon Computers.
- hubs: on 500,000 nodes with 20 hubs of 100,000 neighbours, for targets beside a hub and for others.
- plain: the same on Computers by scipy and numpy, node after node, as the published ANS-GT code does; the ratio.
- stall: two CPU workers, 4 layers, d = 64, batch 1024, rows 17 and 64, pp = 2 and dp = 2 on Computers: what a step
  waits for its batch, and what a step takes more than with batches built beforehand.
- chain: profile --quick, fit, search --gpus 2 --mem 8GB and 20 steps on the big graph, batch 1024; the most private
  memory that all workers held together at any moment; then the same two figures, of blocks of 20 steps in turn, with
  the loader and with batches built beforehand. Once with the recipe for any graph (4 layers), once with that for
  ogbn-products (16).
- disk: 40 steps on the big graph, whose store is larger than the memory of LIMIT that the command and its workers may
  use, page cache included; beside the same without a limit. Needs root, and is left out
  unless it is asked for.

Raw files lie under MGRAPH_DATA; prepared graphs go to MGRAPH_CACHE, but those of `prepare` to a folder of their own.
Prints each figure beside its bar.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megagraph_cli.artifacts.plan import Dims, Plan
from megagraph_cli.artifacts.workload import BatchSection, DatasetSection, ModelSection, TrainSection, Workload
from megagraph_cli.commands import train
from megagraph_cli.commands.workloads import Folders
from megagraph_cli.console import Screen
from megagraph_cli.graph.graph import Graph
from megagraph_cli.graph.prepare import load_graph
from megagraph_cli.graph.sequences import build_sequences
from megagraph_cli.kernelcache import kernel_folder
from megagraph_cli.units import parse_bytes
from parts import in_turn
from parts import plain as peer
from parts.limit import forget, limited
from parts.watch import Watch, is_worker, private_bytes, resident_bytes

PLAIN_TURNS = 5
BIG = "synthetic:nodes=2449029,edges=61859140,features=100,classes=47"
EVEN = np.full(4, 0.25)
STEPS = 20
STALL_TURNS = 2
CHAIN_PAIRS = {"default": 24, "products": 5}
LIMIT = "2.2GB"
ROOT = Path(os.environ.get("MGRAPH_DATA", Path.home() / ".cache/mgraph/data"))
CACHE = Path(os.environ.get("MGRAPH_CACHE", Path.home() / ".cache/mgraph/graphs")).absolute()


def say(what: str, value: str, bar: str = "") -> None:
    print(f"{what:64s}{value:>12s}   {bar}", flush=True)


def mgraph(*arguments: str, cwd: Path) -> str:
    """stdout of one command; ends the bench with its message where it fails."""
    command = [sys.executable, "-m", "megagraph_cli.cli", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"mgraph {arguments[0]} failed with exit code {done.returncode}: {done.stderr[-500:]}")
    return done.stdout


def prepare(big: str, dtype: str) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder, Watch(resident_bytes) as resident:
        start = time.perf_counter()
        mgraph("data", big, "--json", "--cache", "graphs", "--set", f"dataset.feature_dtype={dtype}", cwd=Path(folder))
        say("generated, prepared, coarsened: seconds", f"{time.perf_counter() - start:.0f}", "at most 600")
    say("  peak resident memory, GB", f"{resident.most / 1e9:.2f}", "at most 8")


def draw(name: str, graph: Graph, bar: str = "", among: NDArray[np.int64] | None = None) -> float:
    """Sequences of 32 nodes a second by two threads; the best of five calls, each on targets of its own."""
    rng = np.random.default_rng(0)
    best = 0.0
    for epoch in range(6):
        targets = rng.choice(graph.num_nodes if among is None else among, 8192, replace=False)
        start = time.perf_counter()
        build_sequences(
            graph, targets, num_sampled=32, num_super=1, weights=EVEN, rng_seed=0, epoch=epoch, view=0, threads=2
        )
        if epoch:  # the first one compiles, or loads what was compiled
            best = max(best, targets.size / (time.perf_counter() - start))
    say(f"sequences of 32 nodes a second, two threads, {name}", f"{best:,.0f}", bar)
    return best


def hubs() -> None:
    num_nodes, degree, beside = 500_000, 100_000, np.arange(250_000, 500_000)
    rng = np.random.default_rng(0)
    edges = [rng.integers(0, num_nodes, (2, 2_500_000))]
    edges += [np.stack([np.full(degree, hub), rng.choice(beside, degree, replace=False)]) for hub in range(20)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hubs.npz"
        x = rng.normal(size=(num_nodes, 64)).astype(np.float32)
        np.savez(path, edge_index=np.concatenate(edges, axis=1), x=x, y=np.arange(num_nodes) % 7)
        graph = load_graph(str(path), Path(folder), Path(folder) / "cache")
        others = draw("targets away from hubs", graph, among=np.arange(20, 250_000))
        near = draw("targets beside hubs of 100,000", graph, among=beside)
        say("  share of the rate that is left beside hubs", f"{near / others:.2f}")


def plain(graph: Graph) -> None:
    powers = ModelSection().bias_powers
    ours, theirs, spared = [], [], []
    for _ in range(PLAIN_TURNS):
        ours.append(draw("Computers", graph))
        theirs.append(peer.rate(graph, EVEN, num_sampled=32, num_targets=1000, powers=powers))
        spared.append(peer.rate(graph, EVEN, num_sampled=32, num_targets=1000, powers=1))
    say(f"the plain way, {powers} powers: sequences a second, median of {PLAIN_TURNS}", f"{median(theirs):,.0f}")
    say("  mgraph over it", f"{median(ours) / median(theirs):.0f}x", "at least 50x")
    say("  mgraph over the plain way with a single power", f"{median(ours) / median(spared):.0f}x")


def stall() -> None:
    for num_sampled in (15, 62):
        for dims in (Dims(pp=2, dp=1, cp=1), Dims(pp=1, dp=2, cp=1)):
            pieces = dims.pp * 2
            plan = Plan(
                gpus=2,
                device="cpu",
                workload=workload("computers", num_sampled),
                dims=dims,
                layers_per_stage=[2, 2] if dims.pp == 2 else [4],
                num_microbatches=pieces,
            )
            with tempfile.TemporaryDirectory() as folder:
                plan.save(Path(folder) / "plan.json")
                compare(f"Computers, {num_sampled + 2} rows, {dims.parallel()}", Path(folder), STALL_TURNS)


def workload(dataset: str, num_sampled: int) -> Workload:
    return Workload(
        dataset=DatasetSection(name=dataset, split="random:0.6,0.2,0.2"),
        model=ModelSection(num_layers=4, num_heads=8, hidden_dim=64, ffn_dim=64),
        batch=BatchSection(batch_size=1024, num_sampled=num_sampled),
        train=TrainSection(epochs=10),
    )


def compare(what: str, folder: Path, turns: int) -> None:
    """Steps of the plan in ``folder`` with the loader and with batches built beforehand, in turn; medians.

    Memory is watched in a run of its own: to add up a process's pages takes milliseconds in which it cannot map any.
    """
    loaded, ready, waits = [], [], []
    with Watch(private_bytes, is_worker) as seen:
        steps(folder, "watched", train.orders.WORKER)
    for turn in range(turns):
        step_s, stall_s = steps(folder, f"loaded-{turn}", train.orders.WORKER)
        loaded.append(step_s)
        waits.append(stall_s / step_s)
        ready.append(steps(folder, f"ready-{turn}", "parts.beforehand")[0])
    say(f"{what}: step, ms, median of {turns} runs", f"{1000 * median(loaded):.0f}")
    say("  of it, waiting for the batch", f"{median(waits):.1%}", "at most 5%")
    say("  slower than with batches built beforehand", f"{median(loaded) / median(ready) - 1:.1%}")
    say("  the same, least and most of the turns", " to ".join(f"{each - 1:.1%}" for each in ends(loaded, ready)))
    say(f"  most private memory of all workers, GB, of {seen.times} moments", f"{seen.most / 1e9:.2f}", "at most 8")


def ends(loaded: list[float], ready: list[float]) -> list[float]:
    ratios = sorted(one / other for one, other in zip(loaded, ready, strict=True))
    return [ratios[0], ratios[-1]]


def steps(folder: Path, run: str, worker: str, count: int = STEPS) -> tuple[float, float]:
    """(median step, mean wait for a batch) in seconds."""
    request = train.TrainRequest(
        folders=Folders(ROOT, CACHE),
        plan_path=folder / "plan.json",
        max_steps=count,
        run_dir=folder / run,
        worker=worker,
    )
    found, _ = train.run(request, Screen.stderr())
    assert found.measured.step_s is not None
    assert found.data_stall_s is not None
    return found.measured.step_s, found.data_stall_s


def compare_in_turn(folder: Path, pairs: int) -> None:
    """What steps of the plan in ``folder`` take more with the loader than with batches built beforehand."""
    steps(folder, "in-turn", "parts.in_turn", (2 * pairs + 1) * in_turn.BLOCK)
    blocks = json.loads((folder / "in-turn" / in_turn.FILE).read_text(encoding="utf-8"))
    assert len(blocks) == 2 * pairs, "an epoch must hold all steps"  # the last block is left at its last step
    ready, loaded = ([median(took) for took, _ in blocks[first : 2 * pairs : 2]] for first in (0, 1))
    waits = [waited / sum(took) for took, waited in blocks[1::2]]
    ratios = np.array(loaded) / np.array(ready) - 1
    quarter, middle, three_quarters = np.quantile(ratios, [0.25, 0.5, 0.75])
    say(f"  step, ms, median of {pairs} blocks", f"{1000 * median(loaded):.0f}")
    say("  of it, waiting for the batch", f"{median(waits):.1%}", "at most 5%")
    say("  slower than with batches built beforehand, median of pairs", f"{middle:.1%}", "at most 10%")
    say("  the same, half of the pairs", f"{quarter:.1%} to {three_quarters:.1%}")


def chain(big: str, recipe: str, pairs: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.perf_counter()
        what = ["--recipe", recipe, "--dataset", big, "--set", "batch.batch_size=1024", "--device", "cpu"]
        mgraph("profile", "--quick", *what, cwd=folder)
        mgraph("fit", cwd=folder)
        mgraph("search", "--gpus", "2", "--mem", "8GB", cwd=folder)
        say(f"recipe {recipe}: profile --quick, fit, search: seconds", f"{time.perf_counter() - start:.0f}")
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        say("  the plan", " ".join(f"{axis}={degree}" for axis, degree in plan["dims"].items()))
        with Watch(private_bytes, is_worker) as seen:
            steps(folder, "watched", train.orders.WORKER)
        say(f"  most private memory of all workers, GB, of {seen.times} moments", f"{seen.most / 1e9:.2f}", "at most 8")
        compare_in_turn(folder, pairs)


def disk(big: str) -> None:
    graph = load_graph(big, ROOT, CACHE)
    store = graph.path
    size = sum(path.stat().st_size for path in store.iterdir())
    del graph
    plan = Plan(
        gpus=2,
        device="cpu",
        workload=workload(big, 15),
        dims=Dims(pp=1, dp=2, cp=1),
        layers_per_stage=[4],
        num_microbatches=4,
    )
    say("the store, GB", f"{size / 1e9:.2f}")
    with tempfile.TemporaryDirectory() as name, limited(parse_bytes(LIMIT)) as group:
        folder = Path(name)
        plan.save(folder / "plan.json")
        for what, join in (("all memory", None), (f"{LIMIT} of memory", group)):
            forget(store)
            found = in_group(join, folder, folder / what.replace(" ", "-"))
            say(f"step with {what}, ms", f"{1000 * found['measured']['step_s']:.0f}")
            say("  of it, waiting for the batch (mean)", f"{found['data_stall_s'] / found['measured']['step_s']:.1%}")


def in_group(group: Path | None, folder: Path, run_dir: Path) -> dict[str, Any]:
    """run.json of `mgraph train` for twice STEPS, as a member of a control group if one is given."""
    join = f"echo 0 > {group} && " if group else ""
    words = ["train", "--plan", "plan.json", "--max-steps", str(2 * STEPS), "--run-dir", str(run_dir), "--json"]
    command = join + shlex.join(["exec", sys.executable, "-m", "megagraph_cli.cli", *words])
    done = subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"mgraph train failed with exit code {done.returncode}: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="prepare,draw,hubs,plain,stall,chain")
    parser.add_argument("--big", default=BIG)
    parser.add_argument("--feature-dtype", default="float32", help="of the big graph, in prepare and draw")
    chosen = parser.parse_args()
    # The workers find parts.beforehand here, and compiled kernels where mgraph keeps them.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("NUMBA_CACHE_DIR", str(kernel_folder(CACHE)))
    for part in chosen.parts.split(","):
        if part == "prepare":
            prepare(chosen.big, chosen.feature_dtype)
        elif part == "draw":
            graph = load_graph(chosen.big, ROOT, CACHE, feature_dtype=chosen.feature_dtype)
            draw("the big graph", graph, "at least 20,000")
        elif part == "hubs":
            hubs()
        elif part == "plain":
            plain(load_graph("computers", ROOT, CACHE))
        elif part == "stall":
            stall()
        elif part == "chain":
            for recipe, pairs in CHAIN_PAIRS.items():
                chain(chosen.big, recipe, pairs)
        elif part == "disk":
            disk(chosen.big)
        else:
            parser.error(f"--parts names {part!r}; choose from prepare, draw, hubs, plain, stall, chain, disk")


if __name__ == "__main__":
    main()
