"""Initial weights: each parameter from its own generator, keyed by (rng_seed, its global name)."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from megagraph_cli.model.transformer import Stage


def parameter_seed(rng_seed: int, name: str) -> int:
    """A 63-bit seed of its own for every (rng_seed, name)."""
    digest = hashlib.sha256(f"{rng_seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@torch.no_grad()
def initialise(stage: Stage, rng_seed: int, bias_init_std: float) -> None:
    """Fill a stage's parameters: linear weights N(0, 0.02^2 / L), biases 0, norms 1, embeddings N(0, 0.02^2).

    W_bias is N(0, bias_init_std^2). Drawn on the CPU whatever the device, so that every plan and every device
    starts from the same numbers, and no rank draws a parameter that it does not hold.
    """
    for name, parameter in stage.named_parameters():
        std = _std_of(name, stage.shape.num_layers, bias_init_std)
        if std is None:
            parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            continue
        generator = torch.Generator().manual_seed(parameter_seed(rng_seed, name))
        drawn: Tensor = torch.empty(parameter.shape, dtype=parameter.dtype).normal_(0.0, 1.0, generator=generator)
        parameter.copy_(drawn.mul_(std))


def _std_of(name: str, num_layers: int, bias_init_std: float) -> float | None:
    """Standard deviation of a parameter's initial values, or None where it starts as a constant."""
    if name in ("embedding.table", "embedding.tokens", "token_bias"):
        return 0.02
    if name.endswith("bias_weight"):
        return bias_init_std
    if name == "embedding.weight" or (name.endswith(".weight") and "norm" not in name):
        return 0.02 / math.sqrt(num_layers)
    return None
