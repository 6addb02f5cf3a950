"""AdamW for the parameters that every step updates, all in one fused call."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over named parameters whose ``grad`` is there at every step.

    The fused kernel updates in place; the others make parameter-sized temporaries. ``torch.optim.AdamW`` does the
    same but imports torch's compiler, which takes each worker seconds at its start. ``moments[moment][name]`` has the
    parameter's shape, 0 at first.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.weight_decay, self.betas, self.eps = weight_decay, betas, eps
        self.moments = {
            m: {n: torch.zeros_like(p, requires_grad=False) for n, p in parameters.items()} for m in MOMENTS
        }
        self._parameters = list(parameters.values())
        device = self._parameters[0].device
        # One count of updates for each parameter, on its device: that is how the kernel wants them.
        self._counts = torch.zeros(len(self._parameters), dtype=torch.float32, device=device)

    def set_steps(self, steps: int) -> None:
        """So many updates have been made."""
        self._counts.fill_(steps)

    def tensors(self) -> list[Tensor]:
        """All state."""
        return [*(held for moment in self.moments.values() for held in moment.values()), self._counts]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every parameter from its gradient."""
        gradients = []
        for parameter in self._parameters:
            assert parameter.grad is not None
            gradients.append(parameter.grad)
        means, squares = (list(self.moments[moment].values()) for moment in MOMENTS)
        adamw(
            list[Tensor](self._parameters),
            gradients,
            means,
            squares,
            [],
            list(self._counts.unbind()),
            fused=True,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=lr,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=False,
        )
