"""DanceGRPO's loss as a function of the units, and its derivative."""

import math

import pytest
import torch
from torch import Tensor

from algorithms.algorithm import Loss, coefficients
from algorithms.dancegrpo import DanceGRPO, DanceGRPOConfig
from asyncflow.errors import ConfigError

CLIP = 0.25  # exact in binary, so that a ratio can lie on the boundary


def algorithm(*weights: float, **config: object) -> DanceGRPO:
    return DanceGRPO(DanceGRPOConfig(**{"model": "m", "prompts": "p.txt", "clip": CLIP, **config}), weights or (1.0,))


def differentiated(
    some: DanceGRPO, units: Tensor, advantages: list[list[float]], trained: Tensor | None = None
) -> tuple[Tensor, Loss]:
    """The coefficients [n, K] of the log-probabilities `units` [n, K] whose old ones are 0, and the loss."""
    trained = torch.ones_like(units, dtype=torch.bool) if trained is None else trained
    made, loss = coefficients(
        some, units[:, :, None], torch.zeros_like(units), torch.tensor(advantages, dtype=torch.float64), trained
    )
    return made[:, :, 0], loss


def gradient(ratio: float, advantage: float, **config: object) -> float:
    """dL/du of a lone candidate with one unit, at the given ratio."""
    return differentiated(algorithm(**config), log(ratio), [[advantage]])[0].item()


def log(ratio: float) -> Tensor:
    """The unit [1, 1] with that ratio to an old one of 0."""
    return torch.tensor([[ratio]], dtype=torch.float64).log()


@pytest.mark.parametrize("advantage", [2.0, -3.0])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.0, 1.1, 2.0])
def test_the_gradient_is_the_closed_form(ratio, advantage):
    """-A rho, except where the ratio is beyond the clip on the side that A pushes it to: there 0."""
    clipped = ratio > 1 + CLIP if advantage > 0 else ratio < 1 - CLIP
    assert gradient(ratio, advantage) == pytest.approx(0.0 if clipped else -advantage * ratio, rel=1e-12)


@pytest.mark.parametrize("advantage", [2.0, -3.0])
@pytest.mark.parametrize("ratio", [1 - CLIP, 1 + CLIP])
def test_a_tie_at_the_boundary_is_inside(ratio, advantage):
    """Exactly at the clip both branches are equal, and the gradient is that of an unclipped unit."""
    units = torch.tensor([[ratio]], dtype=torch.float64).log()
    assert units.exp().item() == ratio  # the boundary is met to the bit
    assert gradient(ratio, advantage) == -advantage * ratio


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.4, 2.0, -2.0 * 1.4), (1.6, 2.0, 0.0), (0.7, -2.0, 0.0), (1.4, -2.0, 2.0 * 1.4), (0.7, 2.0, -2.0 * 0.7)],
)
def test_an_asymmetric_clip_has_its_own_bound_above(ratio, advantage, expected):
    """1 - clip below and 1 + clip-high above."""
    assert gradient(ratio, advantage, clip_high=0.5) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(2.0, -3.0, 6.0), (2.5, -3.0, 7.5), (2.6, -3.0, 0.0), (1.1, 3.0, -3.3), (2.6, 3.0, 0.0), (0.5, -3.0, 0.0)],
)
def test_a_dual_clip_bounds_a_bad_candidate_that_became_likely(ratio, advantage, expected):
    """Beyond it a negative advantage trains no more; at it, it still does, and a positive one never minds."""
    assert gradient(ratio, advantage, dual_clip=2.5) == pytest.approx(expected, rel=1e-12)


def test_a_dual_clip_bounds_the_loss():
    """The loss is -A dual from there on, continuous with what is before."""
    losses = [differentiated(algorithm(dual_clip=2.5), log(ratio), [[-3.0]])[1] for ratio in (2.5, 2.500001, 100.0)]
    assert [loss.value.item() for loss in losses] == pytest.approx([7.5, 7.5, 7.5])


def test_the_kl_is_added_with_its_weight():
    """Mean over what is trained, whatever the rewards; its coefficients are alike."""
    units = torch.tensor([[[0.0, 0.5], [0.0, 1.5]], [[0.0, 4.0], [0.0, 9.0]]], dtype=torch.float64)
    trained = torch.tensor([[True, True], [True, False]])
    advantages = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    made, loss = coefficients(algorithm(kl=0.3), units, units[:, :, 0], advantages, trained)
    assert made[:, :, 1].tolist() == [[pytest.approx(0.1)] * 2, [pytest.approx(0.1), 0.0]]
    assert made[:, :, 0].tolist() == [[pytest.approx(-1 / 3)] * 2, [pytest.approx(2 / 3), 0.0]]
    assert loss.metrics["actor/kl_loss"] == pytest.approx(2.0)
    assert loss.value.item() == pytest.approx(0.3 * 2.0)


def test_weights_are_g_plus_g_minus_and_the_kl():
    """rho where neither sign clips; one row without what each clips; the KL of the trained steps by itself."""
    ratio = torch.tensor([[1.1, 1.3, 0.7, 3.0]], dtype=torch.float64)
    units = torch.stack([ratio.log(), torch.zeros_like(ratio)], dim=2)
    trained = torch.tensor([[True, True, True, True]])
    weights = algorithm(kl=0.1, dual_clip=2.0).weights(units, torch.zeros_like(ratio), trained)
    plus, minus, kl = weights[0]
    assert plus.T.tolist() == [[pytest.approx(1.1), 0.0, pytest.approx(0.7), 0.0], [0.0] * 4]
    assert minus.T.tolist() == [[pytest.approx(1.1), pytest.approx(1.3), 0.0, 0.0], [0.0] * 4]
    assert kl.T.tolist() == [[0.0] * 4, [1.0] * 4]


@pytest.mark.parametrize("dual", [1.2, 1.25])
def test_a_dual_clip_inside_the_clip_is_refused(dual):
    with pytest.raises(ConfigError, match="--dual-clip: expected a ratio beyond the clip"):
        algorithm(dual_clip=dual)


def test_denominators_count_what_is_trained():
    """A coefficient is -A / (number of trained units) at ratio 1, and exactly 0 where not trained."""
    units = torch.zeros(3, 2, dtype=torch.float64)
    trained = torch.tensor([[True, True], [True, False], [False, False]])
    made, loss = differentiated(algorithm(), units, [[1.0], [-2.0], [0.5]], trained)
    assert made.tolist() == [[pytest.approx(-1 / 3)] * 2, [pytest.approx(2 / 3), 0.0], [0.0, 0.0]]
    assert loss.value.item() == pytest.approx(-(1.0 + 1.0 - 2.0) / 3)


def test_what_is_not_trained_cannot_spoil_the_rest():
    """A wild or NaN unit of an untrained step has coefficient 0 and does not reach the metrics."""
    units = torch.tensor([[0.0, math.nan], [0.0, 1e9]], dtype=torch.float64)
    trained = torch.tensor([[True, False], [True, False]])
    made, loss = differentiated(algorithm(), units, [[1.0], [-1.0]], trained)
    assert made.tolist() == [[-0.5, 0.0], [0.5, 0.0]]
    assert all(math.isfinite(value) for value in loss.metrics.values())


def test_several_rewards_are_separate_clipped_losses():
    """Each reward's loss is clipped by itself and then weighted: the sum of advantages would clip otherwise."""
    units = torch.tensor([[math.log(2.0)]], dtype=torch.float64)
    made, loss = differentiated(algorithm(0.5, 2.0), units, [[1.0, -3.0]])
    assert loss.value.item() == pytest.approx(0.5 * -(1 + CLIP) + 2.0 * 3.0 * 2.0)
    assert made.item() == pytest.approx(2.0 * 3.0 * 2.0)


def test_the_metrics_of_the_loss():
    """Mean and spread of the ratio, the share beyond the clip, and the KL estimate old - new."""
    units = torch.tensor([[math.log(2.0), 0.0]], dtype=torch.float64)
    _, loss = differentiated(algorithm(), units, [[1.0]])
    assert loss.metrics["actor/ratio_mean"] == pytest.approx(1.5)
    assert loss.metrics["actor/ratio_std"] == pytest.approx(0.5)
    assert loss.metrics["actor/pg_clipfrac"] == 0.5
    assert loss.metrics["actor/ppo_kl"] == pytest.approx(-math.log(2.0) / 2)
    assert loss.metrics["actor/loss"] == loss.value.item()


def test_trained_steps_are_keyed_by_seed():
    """Each candidate trains int(fraction x steps) steps, drawn by its own seed, whoever else is asked for."""
    some = algorithm(step_fraction=0.6)
    made = some.trained_steps(5, [1, 2, 3, 4])
    assert made.sum(dim=1).tolist() == [3] * 4
    assert len({tuple(row) for row in made.tolist()}) > 1
    assert torch.equal(made[2:3], some.trained_steps(5, [3]))
    assert algorithm().trained_steps(3, [1, 2]).all()


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_a_fraction_that_trains_nothing_is_refused_with_one_that_does(steps):
    with pytest.raises(ConfigError, match="--step-fraction: 0.1 of .* trains none; give at least") as error:
        algorithm(step_fraction=0.1).trained_steps(steps, [0])
    advised = float(str(error.value).rpartition(" ")[2])
    assert algorithm(step_fraction=advised).trained_steps(steps, [0]).sum() == 1
