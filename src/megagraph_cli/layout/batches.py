"""How a global batch of targets is cut into replicas and micro-batches: the same numbers for every command."""

from __future__ import annotations


def microbatch_targets(batch_size: int, dp: int, num_microbatches: int) -> int:
    """Targets of one micro-batch, padding included: ceil(batch / (dp K))."""
    return -(-batch_size // (dp * num_microbatches))


def steps_per_epoch(num_train: int, batch_size: int) -> int:
    """Optimizer steps of one epoch; a batch larger than the training set is one padded step."""
    return max(1, -(-num_train // batch_size))
