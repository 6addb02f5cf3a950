"""The plans that a search looks through: every degree, micro-batch count and schedule that the request leaves open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megagraph_cli.artifacts.workload import Workload
from megagraph_cli.cost.setting import Setting
from megagraph_cli.errors import MgraphError
from megagraph_cli.layout.dims import ParallelDims, factorisations
from megagraph_cli.layout.placement import MESH_ORDERS, Placement, hosts_of, placement
from megagraph_cli.layout.schedules import SCHEDULES

MOST_GPUS = 4096
RECOMPUTES = ("none", "full")
CONTEXTS = ("ring", "allgather")
MICROBATCHES_PER_STAGE = 4
"""K is tried up to this many times pp: beyond, the pipeline's bubble hardly shrinks."""
FLAGS = {
    "pp": "pp",
    "cp": "cp",
    "dp": "dp",
    "microbatches": "num_microbatches",
    "schedule": "schedule",
    "recompute": "recompute",
    "context": "context",
    "layers": "layers",
}
"""Fields of ``Pins`` by the flag that fixes them."""


@dataclass(frozen=True)
class Pins:
    """What the user fixed; None leaves a dimension open. ``layers`` is a whole split."""

    pp: int | None = None
    cp: int | None = None
    dp: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    recompute: str | None = None
    context: str | None = None
    layers: tuple[int, ...] | None = None

    @classmethod
    def of(cls, setting: Setting, split: tuple[int, ...]) -> Pins:
        """Pins that leave one plan alone, whatever its mesh order."""
        dims, count = setting.dims, setting.num_microbatches
        return cls(dims.pp, dims.cp, dims.dp, count, setting.schedule, setting.recompute, setting.context, split)

    def flags(self) -> dict[str, str]:
        """What is fixed, by flag, as it is typed."""
        return {
            flag: ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            for flag, name in FLAGS.items()
            if (value := getattr(self, name)) is not None
        }

    def without(self, flag: str) -> Pins:
        """The same with one dimension left open."""
        return replace(self, **{FLAGS[flag]: None})


def settings(workload: Workload, gpus: int, pins: Pins, hosts: int = 1, per_host: int = 1) -> list[Setting]:
    """Every setting on ``gpus`` workers of a machine, in the order in which equal ones are preferred.

    The machine has ``hosts`` with ``per_host`` devices each: workers are shared equally by all of them, or are few
    enough for one. Raises MgraphError (exit 2) for pins, or a number of workers, that no plan can have.
    """
    if not 1 <= gpus <= MOST_GPUS:
        raise MgraphError(f"--gpus {gpus} is out of range; plan for 1 to {MOST_GPUS} workers")
    if gpus % hosts and gpus > per_host:
        raise MgraphError(
            f"--gpus {gpus} cannot be shared equally by the {hosts} hosts that were measured and is more than the "
            f"{per_host} devices of one of them; give a multiple of {hosts}, or at most {per_host}"
        )
    _check_single_pins(workload, gpus, pins)
    spread = hosts_of(gpus, hosts)
    found = sorted(setting for dims in factorisations(gpus) for setting in _settings_of(workload, dims, pins, spread))
    if not found:
        raise _nothing(workload, gpus, pins)
    return found


def _settings_of(workload: Workload, dims: ParallelDims, pins: Pins, hosts: int) -> Iterator[Setting]:
    if not _dims_allowed(workload, dims, pins):
        return
    batch_size = workload.batch.batch_size
    for count in _microbatch_counts(batch_size, dims, pins):
        for name, schedule in SCHEDULES.items():
            if pins.schedule not in (None, name) or (dims.pp == 1 and name != "gpipe"):
                continue
            if dims.dp * count <= batch_size and count >= schedule.min_microbatches(dims.pp):
                for way in _ways(dims, pins):
                    yield from (Setting(dims, count, name, *way, order) for order in _orders(dims, hosts))


def _orders(dims: ParallelDims, hosts: int) -> list[int]:
    """Numbers of the mesh orders that lie differently on the hosts, the first of each kind; on one host just one.

    Axes of degree 1 come last: the outermost is one that crosses hosts.
    """
    if hosts == 1:
        return [0]
    first: dict[Placement, int] = {}
    for number, order in enumerate(MESH_ORDERS):
        alone = [dims.degree(axis) == 1 for axis in order]
        if alone == sorted(alone):
            first.setdefault(placement(dims, order, hosts), number)
    return list(first.values())


def _ways(dims: ParallelDims, pins: Pins) -> Iterator[tuple[str, str]]:
    """(recompute, context): with cp = 1 nothing travels between context ranks, and that is called ``ring``."""
    for recompute in RECOMPUTES:
        for context in CONTEXTS if dims.cp > 1 else CONTEXTS[:1]:
            if pins.recompute in (None, recompute) and pins.context in (None, context):
                yield recompute, context


def _dims_allowed(workload: Workload, dims: ParallelDims, pins: Pins) -> bool:
    pinned = {"pp": pins.pp, "cp": pins.cp, "dp": pins.dp}
    if any(degree not in (None, dims.degree(axis)) for axis, degree in pinned.items()):
        return False
    if pins.layers is not None and len(pins.layers) != dims.pp:
        return False
    rows = workload.batch.rows().sequence_rows
    return dims.pp <= workload.model.num_layers and dims.cp <= rows and dims.dp <= workload.batch.batch_size


def _microbatch_counts(batch_size: int, dims: ParallelDims, pins: Pins) -> list[int]:
    if pins.num_microbatches is not None:
        return [pins.num_microbatches]
    replica = -(-batch_size // dims.dp)
    most = min(replica, MICROBATCHES_PER_STAGE * dims.pp)
    return [count for count in range(1, most + 1) if replica % count == 0]


def as_searched(setting: Setting, hosts: int) -> Setting:
    """The setting by the name that the search has for it: of names that mean the same on ``hosts`` it tries the first.

    A context of one rank sends nothing, and orders of the axes may lie alike.
    """
    dims = setting.dims
    lies = placement(dims, setting.mesh_order, hosts)
    alike = (order for order in _orders(dims, hosts) if placement(dims, MESH_ORDERS[order], hosts) == lies)
    return replace(setting, order=next(alike), context=setting.context if dims.cp > 1 else CONTEXTS[0])


def left_out_by(workload: Workload, pins: Pins, setting: Setting, split: tuple[int, ...]) -> str:
    """What kept the search from a plan, to be said after "but"; empty where it looked at the plan."""
    has = Pins.of(setting, split).flags()
    told = " ".join(f"--{flag} {said}" for flag, said in pins.flags().items() if has[flag] != said)
    if told:
        return f"the search was told {told}"
    batch_size, dims, count = workload.batch.batch_size, setting.dims, setting.num_microbatches
    if count not in _microbatch_counts(batch_size, dims, pins):
        return (
            f"of micro-batches the search tries divisors of {-(-batch_size // dims.dp)} up to "
            f"{MICROBATCHES_PER_STAGE * dims.pp}, and others where it is told --microbatches {count}"
        )
    return ""


def _check_single_pins(workload: Workload, gpus: int, pins: Pins) -> None:
    """Pins that are wrong whatever the others say."""
    limits = {
        "pp": (pins.pp, workload.model.num_layers, "layers in the model"),
        "cp": (pins.cp, workload.batch.rows().sequence_rows, "rows in a sequence"),
        "dp": (pins.dp, workload.batch.batch_size, "targets in a batch"),
        "microbatches": (pins.num_microbatches, workload.batch.batch_size, "targets in a batch"),
    }
    for flag, (asked, most, what) in limits.items():
        if asked is None:
            continue
        if not 1 <= asked <= most:
            raise MgraphError(f"--{flag} {asked} cannot be: there are {most} {what}; give 1 to {most}")
        if flag != "microbatches" and gpus % asked:
            raise MgraphError(f"--{flag} {asked} does not divide --gpus {gpus}; give a divisor of {gpus}")
    known = {
        "schedule": (pins.schedule, tuple(SCHEDULES)),
        "recompute": (pins.recompute, RECOMPUTES),
        "context": (pins.context, CONTEXTS),
    }
    for flag, (name, names) in known.items():
        if name is not None and name not in names:
            raise MgraphError(f"--{flag} {name} is unknown; give one of {', '.join(names)}")
    if pins.layers is not None:
        _check_layers(workload, gpus, pins.layers)
        if pins.pp not in (None, len(pins.layers)):
            said = ",".join(map(str, pins.layers))
            raise MgraphError(f"--layers {said} is {len(pins.layers)} stages but --pp says {pins.pp}; make them agree")


def _check_layers(workload: Workload, gpus: int, layers: tuple[int, ...]) -> None:
    said = ",".join(map(str, layers))
    total = workload.model.num_layers
    if not layers or min(layers) < 1:
        raise MgraphError(f"--layers {said} leaves a stage without a layer; give every stage at least one")
    if sum(layers) != total:
        raise MgraphError(f"--layers {said} adds up to {sum(layers)} layers but the model has {total}; make it {total}")
    if gpus % len(layers):
        raise MgraphError(f"--layers {said} is {len(layers)} stages, which do not divide --gpus {gpus}; give a divisor")


def _nothing(workload: Workload, gpus: int, pins: Pins) -> MgraphError:
    """Why no setting is left, as far as one sentence can say it."""
    said = " ".join(f"--{flag} {value}" for flag, value in pins.flags().items())
    if not said:
        limits = (
            f"{workload.model.num_layers} layers, {workload.batch.rows().sequence_rows} rows and "
            f"{workload.batch.batch_size} targets"
        )
        return MgraphError(f"--gpus {gpus} cannot be cut into pp x cp x dp within {limits}; give another number")
    if pins.context == "allgather" and (pins.cp == 1 or gpus == 1):
        return MgraphError(f"{said} leaves no plan on {gpus} workers: only cp above 1 gathers rows; loosen a pin")
    if pins.schedule == "1f1b":
        return MgraphError(
            f"{said} leaves no plan on {gpus} workers: 1f1b needs pp above 1, --microbatches of at least pp, and "
            "dp x microbatches within the batch; loosen a pin or use --schedule gpipe"
        )
    return MgraphError(
        f"{said} leaves no plan on {gpus} workers: pp x cp x dp must be {gpus} and dp x microbatches at most "
        f"{workload.batch.batch_size}; loosen a pin"
    )
