"""How a noisy chunk becomes the next one, and the scalars ("units") of it that a loss may see.

Rollout and replay both go through `chunk_units`, so that a replay under the rollout's weights gives the same bits.
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
    """What a loss sees of a candidate: scalars of each stochastic denoising step, sums over the clip's chunks."""

    @property
    def chunk_reduce(self) -> ChunkReduce:
        """`sum` adds the chunks' contributions; `mean` weighs each by its share of the clip's frames."""

    @property
    def per_step(self) -> int:
        """How many units M a step has in a replay."""

    @property
    def needs_reference(self) -> bool:
        """Whether a replay must be given the frozen policy's velocities."""

    def of_chunk(
        self, x: Tensor, velocity: Tensor, x_next: Tensor, sigma: float, sigma_next: float, reference: Tensor | None
    ) -> Tensor:
        """Contribution [B, M] of one chunk at one step, float32; x, velocity, x_next, reference are [B, C, f, H, W].

        `reference` is the frozen policy's velocity. The first unit is the one that the rollout records as the old one;
        it and all others that need no reference come without it too.
        """


def gaussian_log_prob(x_next: Tensor, mean: Tensor, std: float) -> Tensor:
    """Log density [B] of the recorded `x_next`, as the mean over a candidate's elements, in float32.

    The mean instead of the sum is DanceGRPO's (fastvideo/train_grpo_hunyuan.py:85-94).
    """
    density = -((x_next.detach().float() - mean.float()) ** 2) / (2.0 * std**2)
    return density.flatten(1).mean(dim=1) - (math.log(std) + 0.5 * math.log(2.0 * math.pi))


def gaussian_kl(mean: Tensor, other: Tensor, std: float) -> Tensor:
    """KL [B] between normal distributions of one deviation, as the mean over a candidate's elements, in float32."""
    return ((mean.float() - other.detach().float()) ** 2 / (2.0 * std**2)).flatten(1).mean(dim=1)


@dataclass(frozen=True)
class LogProbUnits:
    """The log-probability of a kernel's transition and, `with_kl`, its KL to the frozen policy's transition."""

    kernel: Kernel
    chunk_reduce: ChunkReduce = "sum"
    with_kl: bool = False

    @property
    def per_step(self) -> int:
        """See `Units`."""
        return 1 + self.with_kl

    @property
    def needs_reference(self) -> bool:
        """See `Units`."""
        return self.with_kl

    def of_chunk(
        self, x: Tensor, velocity: Tensor, x_next: Tensor, sigma: float, sigma_next: float, reference: Tensor | None
    ) -> Tensor:
        """See `Units`."""
        mean, std = self.kernel.transition(x, velocity, sigma, sigma_next)
        made = [gaussian_log_prob(x_next, mean, std)]
        if self.with_kl and reference is not None:
            other, _ = self.kernel.transition(x, reference, sigma, sigma_next)
            made.append(gaussian_kl(mean, other, std))
        return torch.stack(made, dim=1)


def chunk_units(
    units: Units,
    share: float,
    x: Tensor,
    velocity: Tensor,
    x_next: Tensor,
    sigma: float,
    sigma_next: float,
    reference: Tensor | None = None,
) -> Tensor:
    """The weighted contribution [B, M] of a chunk that makes up `share` of its clip's frames."""
    contribution = units.of_chunk(x, velocity, x_next, sigma, sigma_next, reference)
    return contribution if units.chunk_reduce == "sum" else share * contribution
