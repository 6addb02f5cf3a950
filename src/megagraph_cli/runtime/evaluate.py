"""Scores on held-out targets under any plan: class probabilities averaged over several sampled views of a target."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megagraph_cli.errors import MgraphError
from megagraph_cli.graph.batch import Drawn, MicroBatch, replica_targets
from megagraph_cli.graph.loader import Begun, Prefetcher
from megagraph_cli.runtime.build import StageParts
from megagraph_cli.runtime.rewards import ArmRewards
from megagraph_cli.runtime.tensors import to_device


def predict(
    parts: StageParts,
    targets: NDArray[np.int64],
    batch_size: int,
    *,
    stopped: Callable[[], bool] = lambda: False,
    rewards: ArmRewards | None = None,
) -> Tensor | None:
    """Class and probability of class 1 for each target: float64 [n, 2] on the CPU, the same on every rank.

    Views 0, 1, ... of epoch 0, as many as the workload's ``eval_views``. ``stopped`` is a vote that all ranks cast
    together after each batch; None when it says stop. ``rewards`` listens, where given.
    """
    parts.runner.eval()
    views = parts.workload.batch.eval_views
    cuts = range(0, targets.size, batch_size)
    found = torch.zeros((targets.size, 2), dtype=torch.float64)
    total: Tensor | None = None

    count = len(cuts) * views

    def draw(index: int) -> Drawn:
        start = cuts[index // views]
        return parts.builder.draw(
            _share(parts, targets[start : start + batch_size], batch_size), epoch=0, view=index % views
        )

    listening = nullcontext() if rewards is None else rewards.listening()
    with listening, Prefetcher(Begun(draw, parts.builder.finish, count), count) as batches:
        for index, batch in enumerate(batches):
            if rewards is not None:
                rewards.expect(batch)
            probabilities = _infer(parts, batch)
            total = probabilities if index % views == 0 or total is None else total + probabilities
            if index % views == views - 1:
                _record(parts, found, total / views, cuts[index // views], batch_size)
                if stopped():
                    return None
    shared = found.to(parts.device)
    dist.all_reduce(shared)
    return shared.cpu()


def _share(parts: StageParts, targets: NDArray[np.int64], batch_size: int) -> NDArray[np.int64]:
    return replica_targets(targets, batch_size, parts.mesh.dims.dp, parts.mesh.place.dp, parts.order.num_microbatches)


def _infer(parts: StageParts, batch: list[MicroBatch]) -> Tensor:
    """Probabilities of this replica's targets [K T, C] where this rank owns them, else an empty tensor."""
    parts.runner.inbox = [to_device(part, parts.device) for part in batch]
    outputs = parts.pipeline.infer()
    parts.runner.inbox = ()
    if not outputs or parts.mesh.place.cp:
        return torch.zeros(0, dtype=torch.float64, device=parts.device)
    return torch.softmax(torch.cat(outputs).double(), dim=-1)


def _record(parts: StageParts, found: Tensor, probabilities: Tensor, start: int, batch_size: int) -> None:
    """Write this replica's predictions at its targets' places; other ranks' places stay zero for the sum."""
    if probabilities.numel() == 0:
        return
    size = min(batch_size, found.shape[0] - start)
    share = probabilities.shape[0]
    first = parts.mesh.place.dp * share
    count = max(0, min(share, size - first))
    mine = probabilities[:count].cpu()
    rows = slice(start + first, start + first + count)
    found[rows, 0] = mine.argmax(dim=-1).double()
    if mine.shape[1] > 1:
        found[rows, 1] = mine[:, 1]


def score(found: Tensor, labels: NDArray[np.int64], metric: str) -> float | None:
    """Accuracy, or the area under the ROC curve of class 1 (two classes); None where it is not defined."""
    if labels.size == 0:
        return None
    if metric == "accuracy":
        return float((found[:, 0].numpy() == labels).mean())
    return roc_auc(found[:, 1].numpy(), labels)


def roc_auc(scores: NDArray[np.float64], labels: NDArray[np.int64]) -> float | None:
    """Probability that a random positive scores above a random negative, ties counting half (Mann-Whitney)."""
    positive = labels == 1
    num_positive, num_negative = int(positive.sum()), int((labels == 0).sum())
    if num_positive + num_negative != labels.size:
        raise MgraphError("metric roc_auc needs two classes; set dataset.metric=accuracy")
    if num_positive == 0 or num_negative == 0:
        return None
    # scipy.stats.rankdata does the same; importing it takes a worker longer than importing all of numba.
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return float((ranks[positive].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))
