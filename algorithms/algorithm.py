"""What an algorithm states, and the scalar calculus that all of them share.

A loss depends on the weights only through scalars, its units u (M for each candidate and denoising step), so its
gradient is the sum over j of c_j grad u_j with c = dL/du: replay makes the unit gradients before any score is known,
and `coefficients` differentiates the loss over the scalars once the rewards are. `StepProgram` calls both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engines.kernel import Kernel, Units


@dataclass(frozen=True)
class GroupAdvantages:
    """Of one group: `advantages` [G, A], in columns as the loss weighs them, and who is `kept` [G] bool.

    A candidate that is not kept gets coefficient 0, and is left out of every denominator.
    """

    advantages: Tensor
    kept: Tensor


@dataclass(frozen=True)
class Loss:
    """A loss, a scalar tensor, and what is reported with it."""

    value: Tensor
    metrics: Mapping[str, float]


class Algorithm(Protocol):
    """What an algorithm states; called on the controller but for `kernel` and `units`, which the engines call."""

    @property
    def kernel(self) -> Kernel:
        """How the rollout samples a stochastic denoising step."""

    @property
    def units(self) -> Units:
        """The scalars the loss sees."""

    @property
    def global_statistics(self) -> bool:
        """Whether a group's advantages need the rewards of all groups."""

    @property
    def share_noise(self) -> bool:
        """Whether the candidates of a group start from one initial noise."""

    def trained_steps(self, stochastic_steps: int, seeds: Sequence[int]) -> Tensor:
        """For each candidate, by its seed, which of the stochastic denoising steps are trained, bool [n, K - 1]."""

    def advantages(self, group: int, rewards: Mapping[int, Tensor]) -> GroupAdvantages:
        """The advantages of `group` from the rewards [G, R], NaN where invalid, of it or of all groups."""

    def weights(self, units: Tensor, old_units: Tensor, trained: Tensor) -> Tensor:
        """How few sums of a candidate's unit gradients hold the gradient of any loss: rows [n, W, k, M], float64.

        For units [n, k, M], old [n, k] and trained [n, k] of all replayed steps or, in a packed replay, of one step
        after the other: a step's columns come from its own units alone. Whatever the rewards, dL/du must be a
        combination of a candidate's rows. Rows alike for a whole micro-batch are kept once. Engines call it.
        """

    def loss(self, units: Tensor, old_units: Tensor, advantages: Tensor, trained: Tensor) -> Loss:
        """The loss over a mini-batch of n candidates, float64 but for `trained`, which is bool.

        units [n, K, M], the old ones of the first of them [n, K], advantages [n, A], trained [n, K].
        """


def valid_candidates(rewards: Tensor) -> Tensor:
    """Who of a group has all of the rewards [G, R], of which those that are NaN are invalid: bool [G]."""
    return rewards.isfinite().all(dim=1)


def enough_valid(valid: Tensor) -> bool:
    """Whether a group trains with these `valid` candidates, bool [G]: half of it at least, and two.

    A few that a judge could read say little of the group, less so where what it fails on is what differs.
    """
    return int(valid.sum()) >= max(2.0, len(valid) / 2)


def coefficients(
    algorithm: Algorithm, units: Tensor, old_units: Tensor, advantages: Tensor, trained: Tensor
) -> tuple[Tensor, Loss]:
    """c = dL/du [n, K, M] float64, exactly 0 where not trained, and the loss; something must be trained."""
    leaf = units.detach().requires_grad_()
    loss = algorithm.loss(leaf, old_units, advantages, trained)
    (gradient,) = torch.autograd.grad(loss.value, leaf)
    return torch.where(trained[:, :, None], gradient, torch.zeros_like(gradient)), loss
