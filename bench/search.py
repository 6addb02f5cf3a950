"""The search against an enumeration that shares no code with it, and how long large searches take.

``python bench/search.py [INSTANCES [FIRST]]``: optimum, whole front and counts of random instances (a tenth of them
with 24 layers on up to 4 stages or 12 on up to 8), then process seconds of large searches.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cost import planted
from tests.cost.exact import LONG_FROM, compare

from megagraph_cli.cost.fitting import fit
from megagraph_cli.cost.predict import Predictor
from megagraph_cli.cost.search import search
from megagraph_cli.cost.space import Pins

LARGE = (
    (96, 64, Pins()),
    (32, 1024, Pins()),
    (96, 64, Pins(pp=32, schedule="1f1b")),
    (96, 64, Pins(pp=64, schedule="1f1b")),
)


def main() -> None:
    """Print one line per comparison; an instance that differs ends the run with its seed."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    seeds = [*range(first, first + count - count // 10), *range(LONG_FROM + first, LONG_FROM + first + count // 10)]
    for done, seed in enumerate(seeds, start=1):
        compare(seed)
        if done % 50 == 0:
            print(f"{done} of {count} instances equal the enumeration", flush=True)
    for layers, gpus, pins in LARGE:
        model = fit(planted.profile(gpus=4, work=planted.workload(layers, 8192)))
        begin = time.process_time()
        found = search(Predictor(model, model.workload), gpus, 1 << 50, pins, 5)
        print(
            f"{layers} layers on {gpus} workers, pp {pins.pp or 'open'}: {time.process_time() - begin:.2f} s "
            f"of process time, {found.num_candidates:.3g} plans, front of {len(found.pareto)}, gap {found.max_gap:g}",
            flush=True,
        )


if __name__ == "__main__":
    main()
