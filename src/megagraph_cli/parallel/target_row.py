"""Row 0 of sequences whose rows live on several context ranks: its query for all, its softmax's total from all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class SharedRow:
    """Row 0 lives on rank 0 of the context ``group`` of ``size`` ranks; all of them call together."""

    group: dist.ProcessGroup
    size: int

    def query(self, q_HB1E: Tensor) -> Tensor:
        """The query of row 0, on every rank."""
        q = q_HB1E.clone(memory_format=torch.contiguous_format)
        dist.broadcast(q, group=self.group, group_src=0)
        return q

    def total(self, lse_HB: Tensor) -> Tensor:
        """The log-sum-exp over the columns of all ranks, the same on each."""
        parts = [torch.empty_like(lse_HB) for _ in range(self.size)]
        dist.all_gather(parts, lse_HB.contiguous(), group=self.group)
        return torch.stack(parts).logsumexp(0)
