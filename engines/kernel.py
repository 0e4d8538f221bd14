"""How a noisy chunk becomes the next one, and the scalars ("units") of it that a loss may see.

Rollout and replay both go through `chunk_unit`, so that a replay under the rollout's weights gives the same bits.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

ChunkReduce = Literal["sum", "mean"]


class Kernel(Protocol):
    """The Gaussian transition of one stochastic denoising step."""

    def transition(self, x: Tensor, velocity: Tensor, sigma: float, sigma_next: float) -> tuple[Tensor, float]:
        """Mean [B, C, f, H, W] and standard deviation of the next latent, given x at `sigma` > `sigma_next` > 0."""


class Units(Protocol):
    """What a loss sees of a candidate: one scalar for each stochastic denoising step, a sum over the clip's chunks."""

    @property
    def chunk_reduce(self) -> ChunkReduce:
        """`sum` adds the chunks' contributions; `mean` weighs each by its share of the clip's frames."""

    def unit(self, x: Tensor, velocity: Tensor, x_next: Tensor, sigma: float, sigma_next: float) -> Tensor:
        """Contribution [B] of one chunk at one step, float32; x, velocity, x_next are [B, C, f, H, W]."""


def gaussian_log_prob(x_next: Tensor, mean: Tensor, std: float) -> Tensor:
    """Log density [B] of the recorded `x_next`, as the mean over a candidate's elements, in float32.

    The mean instead of the sum is DanceGRPO's (fastvideo/train_grpo_hunyuan.py:85-94).
    """
    density = -((x_next.detach().float() - mean.float()) ** 2) / (2.0 * std**2)
    return density.flatten(1).mean(dim=1) - (math.log(std) + 0.5 * math.log(2.0 * math.pi))


@dataclass(frozen=True)
class LogProbUnits:
    """Units that are the log-probabilities of a kernel's transitions."""

    kernel: Kernel
    chunk_reduce: ChunkReduce = "sum"

    def unit(self, x: Tensor, velocity: Tensor, x_next: Tensor, sigma: float, sigma_next: float) -> Tensor:
        return gaussian_log_prob(x_next, *self.kernel.transition(x, velocity, sigma, sigma_next))


def chunk_unit(
    units: Units,
    share: float,
    x: Tensor,
    velocity: Tensor,
    x_next: Tensor,
    sigma: float,
    sigma_next: float,
) -> Tensor:
    """The weighted contribution [B] of a chunk that makes up `share` of its clip's frames."""
    contribution = units.unit(x, velocity, x_next, sigma, sigma_next)
    assert contribution.dtype == torch.float32, "units are float32"
    return contribution if units.chunk_reduce == "sum" else share * contribution
