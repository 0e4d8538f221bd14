"""AdamW on the adapter's vector, with warm-up, norm clipping and a non-finite check; all act on the combined gradient.

Every policy rank makes the same step from the same gradient, so their weights stay the same bits.
"""

import hashlib
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from asyncflow.errors import TrainingError


class OptimizerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """AdamW's settings; defaults are DanceGRPO's. `warmup` counts steps, `max_skips` gradients skipped in a row."""

    lr: float = 1e-5
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-4
    warmup: int = 0
    max_grad_norm: float = 1.0
    max_skips: int = 3


class StepMetrics(NamedTuple):
    """Of one step: the gradient's norm before clipping, the learning rate used, and whether the step was skipped."""

    grad_norm: float
    lr: float
    skipped: bool


class Optimizer:
    """Steps one flat float32 parameter in place."""

    def __init__(self, vector: nn.Parameter, settings: OptimizerSettings) -> None:
        self.settings = settings
        self.steps = 0
        self.skipped = 0
        self._skips_in_a_row = 0
        self._vector = vector
        self._adamw = torch.optim.AdamW(
            [vector],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    @property
    def lr(self) -> float:
        """Learning rate of the next step: linear from lr / warmup to lr."""
        return self.settings.lr * min(1.0, (self.steps + 1) / max(1, self.settings.warmup))

    def step(self, gradient: Tensor) -> StepMetrics:
        """Descend along `gradient` [P] float32, which is left as it was.

        A gradient that is not finite leaves weights and moments alone; `max_skips` of them in a row raise
        `TrainingError`.
        """
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()
        lr = self.lr
        if not torch.isfinite(torch.tensor(norm)):
            self.skipped += 1
            self._skips_in_a_row += 1
            if self._skips_in_a_row >= self.settings.max_skips:
                raise TrainingError(
                    f"The gradient was not finite {self._skips_in_a_row} times in a row; lower --lr, or look at the "
                    "last rewards and ratios."
                )
            return StepMetrics(norm, lr, True)
        self._skips_in_a_row = 0
        self._vector.grad = gradient * min(1.0, self.settings.max_grad_norm / (norm + 1e-6))
        self._adamw.param_groups[0]["lr"] = lr
        self._adamw.step()
        self._vector.grad = None
        self.steps += 1
        return StepMetrics(norm, lr, False)

    def weights_sha256(self) -> str:
        """Hash of the weights' bits, equal on ranks whose weights are equal."""
        return hashlib.sha256(self._vector.detach().cpu().numpy().tobytes()).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """All but the weights: moments and counters, from which `load_state_dict` goes on to the same bits."""
        return {
            "adamw": self._adamw.state_dict(),
            "steps": self.steps,
            "skipped": self.skipped,
            "skips_in_a_row": self._skips_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state made by `state_dict` for a vector of the same length."""
        self._adamw.load_state_dict(state["adamw"])
        self.steps = state["steps"]
        self.skipped = state["skipped"]
        self._skips_in_a_row = state["skips_in_a_row"]
