"""What a CUDA out-of-memory error means for the user: which rank, what was asked, predicted and measured."""

from __future__ import annotations

import re

import torch

from megagraph_cli.artifacts.plan import Plan
from megagraph_cli.errors import EXIT_WORKER, MgraphError
from megagraph_cli.runtime.setup import Worker
from megagraph_cli.units import MIB, format_bytes

_ASKED = re.compile(r"[Tt]ried to allocate ([0-9.]+) (\w+)")
_SCALE = {"bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}


def explain_out_of_memory(error: torch.OutOfMemoryError, worker: Worker, plan: Plan) -> MgraphError:
    """One sentence with rank, place, asked, predicted and measured bytes, and the ``search --mem`` that would fit."""
    held, reserved, free, peak = _device_figures(worker.device)
    asked = asked_bytes(str(error))
    predicted = f"{format_bytes(plan.predicted.peak_bytes)} predicted" if plan.predicted else "no forecast"
    return MgraphError(
        f"rank {worker.rank} ({worker.place}) ran out of device memory: it asked for {format_bytes(asked)} with "
        f"{format_bytes(held)} live ({format_bytes(peak)} at most, {predicted}) and {format_bytes(free)} free; "
        f"search again with --mem {fitting_mib(plan, reserved + free, held + asked)}MiB",
        EXIT_WORKER,
        asked_bytes=asked,
        measured_bytes=peak,
        predicted_bytes=plan.predicted.peak_bytes if plan.predicted else None,
    )


def out_of_memory_in(error: BaseException) -> torch.OutOfMemoryError | None:
    """The shortage that started an error, whatever wrapped it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError):
            return cause
        cause = cause.__cause__
    return None


def asked_bytes(message: str) -> int:
    """Bytes that torch's message says it tried to allocate (0 where it does not say)."""
    match = _ASKED.search(message)
    return round(float(match[1]) * _SCALE.get(match[2], 1)) if match else 0


def fitting_mib(plan: Plan, usable_bytes: int, needed_bytes: int) -> int:
    """A limit in MiB under which the search's forecasts would have kept this rank within ``usable_bytes``.

    The plan's forecast was short by needed / predicted, so the limit shrinks by that factor.
    """
    short = max(1.0, needed_bytes / plan.predicted.peak_bytes) if plan.predicted else 1.0
    return max(1, int(usable_bytes / short) // MIB)


def _device_figures(device: torch.device) -> tuple[int, int, int, int]:
    """(live, reserved, free, peak) bytes of the device."""
    free, _ = torch.cuda.mem_get_info(device)
    return (
        torch.cuda.memory_allocated(device),
        torch.cuda.memory_reserved(device),
        int(free),
        torch.cuda.max_memory_allocated(device),
    )
