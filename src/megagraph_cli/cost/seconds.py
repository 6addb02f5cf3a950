"""Seconds of a step's single operations beside its passes, from a cost model's coefficients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megagraph_cli.artifacts.cost_model import CostModel
from megagraph_cli.cost.arrays import Regressors
from megagraph_cli.cost.regression import evaluate, profile_call
from megagraph_cli.cost.terms import (
    all_gather_regressors,
    all_reduce_regressors,
    host_regressors,
    merge_regressors,
    over,
    p2p_regressors,
    row_update_regressors,
)

PASS, BOUNDARY, REDUCTION, CONSTRUCTION = "pass", "boundary", "reduction", "construction"
CALIBRATED = (PASS, BOUNDARY, REDUCTION, CONSTRUCTION)
"""Kinds of time of which runs of whole plans may teach a factor."""


@dataclass(frozen=True)
class Seconds:
    """``link`` is what an operation goes over, as ``size.Size.link``; bytes may be arrays over the number of layers."""

    cost_model: CostModel
    sets: tuple[str, ...] = ()
    """The ``--set`` texts with which ``mgraph profile`` measures the cost model's workload."""

    @property
    def terms(self) -> Mapping[str, Mapping[str, float]]:
        return self.cost_model.terms

    def remedy(self, gpus: int = 1) -> str:
        """The ``mgraph profile`` call that measures what is missing: ``gpus`` workers, or as many as last time."""
        return f"{self._profile_call} --gpus {max(gpus, self.cost_model.machine.num_devices)}"

    @cached_property
    def _profile_call(self) -> str:
        machine = self.cost_model.machine
        return profile_call(self.cost_model.workload, machine.device, self.sets, machine.hosts)

    def calibrated(self, kind: str, seconds: Any) -> Any:
        """Seconds stretched as runs of whole plans taught (``mgraph fit --with``)."""
        return seconds * self.terms.get("calibration", {}).get(kind, 1.0)

    def message(self, message_bytes: float, link: str) -> float:
        """One message to a neighbour."""
        return float(self._over(link, "p2p", p2p_regressors(message_bytes), BOUNDARY))

    def all_reduce(self, message_bytes: Any, group_size: int, link: str) -> Any:
        return self._over(link, "all_reduce", all_reduce_regressors(message_bytes, group_size), REDUCTION)

    def all_gather(self, message_bytes: Any, group_size: int, link: str) -> Any:
        return self._over(link, "all_gather", all_gather_regressors(message_bytes, group_size), REDUCTION)

    def merge(self, sums: int, calls: int, merged_bytes: float) -> float:
        """Touched rows of a table added up."""
        return self._alone("touched_merge_s", merge_regressors(sums, calls, merged_bytes))

    def update_rows(self, pieces: int, updated_bytes: float) -> float:
        """Touched rows of a table updated."""
        return self._alone("touched_update_s", row_update_regressors(pieces, updated_bytes))

    def construction(self, sequences: int, targets: int) -> float:
        """A rank's host threads build so many ``sequences`` and gather the features of ``targets``."""
        shares, threads = {"construct_s": sequences, "gather_s": targets}, self.cost_model.threads
        seconds = sum(self._alone(name, host_regressors(share, threads)) for name, share in shares.items())
        return float(self.calibrated(CONSTRUCTION, seconds))

    def _alone(self, quantity: str, regressors: Regressors) -> float:
        return float(evaluate(self.terms, quantity, regressors, remedy=self.remedy()))

    def _over(self, link: str, op: str, regressors: Regressors, kind: str) -> Any:
        return self.calibrated(kind, evaluate(self.terms, f"{over(link, op)}_s", regressors, remedy=self.remedy(2)))
