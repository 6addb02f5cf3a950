"""The search against an enumeration that shares no code with it, and how long large searches take.

``python bench/search.py [INSTANCES [FIRST]]``: optimum, whole front and counts of random instances, a tenth of them
with 24 layers on up to 4 stages or 12 on up to 8 and a tenth over 2 or 4 hosts, all along the run; then the limits that
infeasible searches name, and process seconds of large searches.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cost import planted
from tests.cost.exact import HOSTS, LONG, SHORT, check_named_limit, compare

from megagraph_cli.cost.fitting import fit
from megagraph_cli.cost.predict import Predictor
from megagraph_cli.cost.search import search
from megagraph_cli.cost.space import Pins

KINDS = (LONG, HOSTS, *(SHORT,) * 8)
NUM_LIMITS = 100
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
    done = dict.fromkeys(KINDS, 0)
    for seed in range(first, first + count):
        kind = KINDS[seed % len(KINDS)]
        compare(seed, kind)
        done[kind] += 1
        if sum(done.values()) % 50 == 0:
            said = ", ".join(f"{number} {kind}" for kind, number in done.items())
            print(f"{sum(done.values())} of {count} instances equal the enumeration ({said})", flush=True)
    for seed in range(first, first + NUM_LIMITS):
        check_named_limit(seed)
    print(f"{NUM_LIMITS} infeasible searches name the smallest limit that fits", flush=True)
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
