"""Two hosts joined by a slow link: a plan that knows of it against one from a profile that does not.

    python bench/hosts.py [--rate 12.5MB] [--rounds 3] [--steps 8] [--plans 12]

Network namespaces, two workers each, so it needs root. `mgraph profile` and `mgraph search` run twice, with the link
free and with it limited; both plans are then trained over the limited link, in turn. Prints what the profiles saw of
the network, both plans, the ratio of their measured steps, and how far the forecasts of the second profile are off for
some plans that `mgraph validate` runs over the limited link.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.parts.slow_link import Host, limit_link, mgraph_on, missing, two_hosts

from megagraph_cli.units import parse_bytes

MODEL = ["model.num_layers=4", "model.hidden_dim=192", "model.ffn_dim=192", "batch.batch_size=64"]
DEADLINE_S = 900.0


def on_both(hosts: Sequence[Host], arguments: Sequence[str], folders: Sequence[Path]) -> dict[str, Any]:
    """`mgraph ARGUMENTS --json` on both hosts; what host 0 prints."""
    with mgraph_on(hosts, [*arguments, "--json"], folders, OMP_NUM_THREADS="1") as processes:
        printed = [process.communicate(timeout=DEADLINE_S) for process in processes]
    for process, (_, said) in zip(processes, printed, strict=True):
        if process.returncode:
            raise RuntimeError(said)
    found: dict[str, Any] = json.loads(printed[0][0])
    return found


def alone(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """`mgraph ARGUMENTS --json` without a host."""
    command = [sys.executable, "-m", "megagraph_cli.cli", *arguments, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def plan_for(hosts: Sequence[Host], folders: Sequence[Path], name: str) -> dict[str, Any]:
    """Profile, fit and search over the link as it is now; the plan goes to NAME.json."""
    sets = [part for text in MODEL for part in ("--set", text)]
    profile = [
        "profile",
        "--quick",
        "--dataset",
        "demo",
        "--device",
        "cpu",
        "--gpus",
        "4",
        "-o",
        f"{name}-profile.json",
    ]
    on_both(hosts, [*profile, *sets], folders)
    alone(["fit", f"{name}-profile.json", "-o", f"{name}-model.json"], folders[0])
    plan = alone(["search", "--cost-model", f"{name}-model.json", "-o", f"{name}.json"], folders[0])
    measured = json.loads((folders[0] / f"{name}-profile.json").read_text(encoding="utf-8"))
    for op in ("p2p", "all_reduce", "all_gather"):
        found = [each for each in measured["comm"] if each["op"] == op and each["group_size"] == 2]
        most = {each["link"]: each["time_s"] for each in found if each["message_bytes"] == 1 << 22}
        print(f"{name}: 4 MiB {op} over 2 ranks: " + ", ".join(f"{k} {1e3 * v:.1f} ms" for k, v in most.items()))
    print(
        f"{name}: {plan['dims']} outermost {plan['mesh_order'][0]}, layers {plan['layers_per_stage']}, "
        f"K {plan['num_microbatches']} {plan['schedule']}, {plan['recompute']} {plan['context']}, "
        f"predicted {1e3 * plan['predicted']['step_s']:.0f} ms",
        flush=True,
    )
    return plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=parse_bytes, default=12_500_000, help="bytes a second over the slow link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--plans", type=int, default=12)
    asked = parser.parse_args()
    why = missing()
    if why is not None:
        sys.exit(f"no slow link here: {why}")
    with tempfile.TemporaryDirectory() as base, two_hosts() as hosts:
        folders = [Path(base) / "first", Path(base) / "second"]
        for folder in folders:
            folder.mkdir()
        plan_for(hosts, folders, "free")
        limit_link(hosts, asked.rate)
        plan_for(hosts, folders, "slow")
        steps: dict[str, list[float]] = {"free": [], "slow": []}
        for number in range(asked.rounds):
            for name, taken in steps.items():
                run = [
                    "train",
                    "--plan",
                    f"{name}.json",
                    "--max-steps",
                    str(asked.steps),
                    "--run-dir",
                    f"{name}-{number}",
                ]
                taken.append(on_both(hosts, run, folders)["measured"]["step_s"])
        medians = {name: statistics.median(taken) for name, taken in steps.items()}
        found = on_both(hosts, ["validate", "--cost-model", "slow-model.json", "--plans", str(asked.plans)], folders)
        print(
            f"forecasts over the slow link, {len(found['plans'])} plans: time {found['time']}, memory {found['memory']}"
        )
        for name, taken in steps.items():
            print(f"{name}: measured {[round(1e3 * each) for each in taken]} ms, median {1e3 * medians[name]:.0f} ms")
        print(f"plan of the free link / plan of the slow link: {medians['free'] / medians['slow']:.2f}")


if __name__ == "__main__":
    main()
