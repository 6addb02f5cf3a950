"""Test accuracy with fixed and with adaptive sampling weights, on the same splits and seeds.

    python bench/adaptive.py [--datasets citeseer,computers] [--seeds 42,0,1] [--every 2] [--gpus 1]

For every dataset and split seed: `mgraph train` with the recipe that ships, once as it is and once with
train.sampling_update_epochs=EVERY. Raw files lie under MGRAPH_DATA. Prints mean and standard error over the seeds, the
mean of the paired differences with its standard error, and the weights p that each run ended with.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from accuracy import mgraph_accuracy, spread
from megagraph_cli import recipes


def run(name: str, seed: int, every: int, gpus: int) -> tuple[float, list[float]]:
    """(test accuracy in per cent, sampling weights of the last epoch)."""
    recipe = recipes.resolve(name, None, (f"dataset.split_seed={seed}", f"train.sampling_update_epochs={every}"))
    with tempfile.TemporaryDirectory() as folder:
        score, _ = mgraph_accuracy(recipe, gpus, Path(folder))
        found = json.loads((Path(folder) / "run" / "run.json").read_text(encoding="utf-8"))
    return score, found["epochs"][-1]["sampling_weights"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default="citeseer,computers")
    parser.add_argument("--seeds", default="42,0,1")
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=1)
    chosen = parser.parse_args()
    print(f"{'set':12s}{'fixed':>14s}{'adaptive':>14s}{'difference':>16s}")
    for name in chosen.datasets.split(","):
        fixed, adaptive, ends = [], [], []
        for seed in map(int, chosen.seeds.split(",")):
            fixed.append(run(name, seed, 0, chosen.gpus)[0])
            score, weights = run(name, seed, chosen.every, chosen.gpus)
            adaptive.append(score)
            ends.append(weights)
            print(f"  {name} seed {seed}: {fixed[-1]:.2f} {score:.2f} {[round(p, 3) for p in weights]}", flush=True)
        differences = [b - a for a, b in zip(fixed, adaptive, strict=True)]
        print(f"{name:12s}{spread(fixed):>14s}{spread(adaptive):>14s}{spread(differences):>16s}", flush=True)


if __name__ == "__main__":
    main()
