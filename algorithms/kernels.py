"""Transition kernels of few-step samplers; both implement `engines.kernel.Kernel`."""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ConsistencyKernel:
    """The re-noising sampler of consistency-distilled models, whose exact policy it is.

    x' ~ N((1 - sigma') x0, sigma'^2) with x0 = x - sigma v: the denoising loop of Self-Forcing's
    pipeline/causal_inference.py.
    """

    def transition(self, x: Tensor, velocity: Tensor, sigma: float, sigma_next: float) -> tuple[Tensor, float]:
        return (1.0 - sigma_next) * (x - sigma * velocity), sigma_next


@dataclass(frozen=True)
class DanceSDEKernel:
    """DanceGRPO's flow-matching SDE step with constant noise `eta` (fastvideo/train_grpo_hunyuan.py:67-82).

    With D = sigma - sigma' and the score -(x + (1 - sigma) v) / sigma: mean = x - D v + eta^2 D score / 2 and
    std = eta sqrt(D). Written here as one coefficient for x and one for v.
    """

    eta: float

    def transition(self, x: Tensor, velocity: Tensor, sigma: float, sigma_next: float) -> tuple[Tensor, float]:
        step = sigma - sigma_next
        drift = self.eta**2 * step / (2.0 * sigma)
        mean = (1.0 - drift) * x - (step + drift * (1.0 - sigma)) * velocity
        return mean, self.eta * math.sqrt(step)
