"""The output layer: LayerNorm and a linear map of the target row to class logits."""

from __future__ import annotations

from torch import Tensor, nn


class Head(nn.Module):
    """[B, 1, D] -> class logits [B, C]."""

    def __init__(self, hidden_dim: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_dim)
        self.linear = nn.Linear(hidden_dim, num_classes)

    def forward(self, target_B1D: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.norm(target_B1D.squeeze(1)))
        return logits
