"""DanceGRPO's loss as a function of the units, and that unit gradients times coefficients are its gradient."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrize

from algorithms.algorithm import coefficients
from algorithms.dancegrpo import DanceGRPO, DanceGRPOConfig
from asyncflow.errors import ConfigError
from engines.adapter import Adapter, AdapterSettings
from engines.gradients import combine, compress, distinct, solve
from engines.kernel import chunk_unit
from engines.replay import replay
from engines.rollout import Seeds, rollout
from engines.testing import texts, tiny_policy

CLIP = 0.25  # exact in binary, so that a ratio can lie on the boundary


def algorithm(*weights: float, **config: object) -> DanceGRPO:
    return DanceGRPO(DanceGRPOConfig(**{"model": "m", "prompts": "p.txt", "clip": CLIP, **config}), weights or (1.0,))


def gradient(ratio: float, advantage: float) -> float:
    """dL/du of a lone candidate with one unit, at the given ratio."""
    units = torch.tensor([[ratio]], dtype=torch.float64).log()
    old = torch.zeros_like(units)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    made, _ = coefficients(algorithm(), units, old, advantages, torch.ones(1, 1, dtype=torch.bool))
    return made.item()


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


def test_denominators_count_what_is_trained():
    """A coefficient is -A / (number of trained units) at ratio 1, and exactly 0 where not trained."""
    units = torch.zeros(3, 2, dtype=torch.float64)
    advantages = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    trained = torch.tensor([[True, True], [True, False], [False, False]])
    made, loss = coefficients(algorithm(), units, units.clone(), advantages, trained)
    assert made.tolist() == [[pytest.approx(-1 / 3)] * 2, [pytest.approx(2 / 3), 0.0], [0.0, 0.0]]
    assert loss.value.item() == pytest.approx(-(1.0 + 1.0 - 2.0) / 3)


def test_what_is_not_trained_cannot_spoil_the_rest():
    """A wild or NaN unit of an untrained step has coefficient 0 and does not reach the metrics."""
    units = torch.tensor([[0.0, math.nan], [0.0, 1e9]], dtype=torch.float64)
    trained = torch.tensor([[True, False], [True, False]])
    made, loss = coefficients(
        algorithm(), units, torch.zeros_like(units), torch.tensor([[1.0], [-1.0]]).double(), trained
    )
    assert made.tolist() == [[-0.5, 0.0], [0.5, 0.0]]
    assert all(math.isfinite(value) for value in loss.metrics.values())


def test_several_rewards_are_separate_clipped_losses():
    """Each reward's loss is clipped by itself and then weighted: the sum of advantages would clip otherwise."""
    units = torch.tensor([[math.log(2.0)]], dtype=torch.float64)
    old, trained = torch.zeros_like(units), torch.ones(1, 1, dtype=torch.bool)
    advantages = torch.tensor([[1.0, -3.0]], dtype=torch.float64)
    made, loss = coefficients(algorithm(0.5, 2.0), units, old, advantages, trained)
    assert loss.value.item() == pytest.approx(0.5 * -(1 + CLIP) + 2.0 * 3.0 * 2.0)
    assert made.item() == pytest.approx(2.0 * 3.0 * 2.0)


def test_the_metrics_of_the_loss():
    """Mean and spread of the ratio, the share beyond the clip, and the KL estimate old - new."""
    units = torch.tensor([[math.log(2.0), 0.0]], dtype=torch.float64)
    _, loss = coefficients(algorithm(), units, torch.zeros_like(units), torch.ones(1, 1).double(), units > -1)
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


def test_coefficients_and_unit_gradients_are_the_gradient_of_the_loss():
    """Whole check of the algebra: replayed gradients combined equal autograd through policy, kernel and loss."""
    torch.manual_seed(0)
    candidates, size = 3, (4, 4)
    policy = tiny_policy()
    adapter = Adapter(policy.model, AdapterSettings(rank=2, alpha=4.0), seed=1)
    adapter.assign(0.3 * torch.randn(adapter.size))
    some = algorithm(0.7, 1.5, clip=0.02, kernel="dance-sde")
    text = texts(candidates)
    seeds = [Seeds(7, 100 + candidate) for candidate in range(candidates)]
    trajectory = rollout(policy, text, seeds, size, some.kernel, some.units)
    adapter.assign(adapter.flatten() + 0.02 * torch.randn(adapter.size))  # an update later, so that ratios are not 1
    advantages = torch.tensor([[1.0, -0.4], [-1.3, 0.2], [0.3, 0.9]], dtype=torch.float64)
    trained = torch.tensor([[True, True], [True, False], [False, True]])

    made = replay(policy, adapter, trajectory, text, some.units)
    c, loss = coefficients(some, made.units.double(), trajectory.units.double(), advantages, trained)
    combined = combine(c, made.gradients)
    weights = distinct(some.weights(made.units.double(), trajectory.units.double(), trained))
    assert weights.shape[1] == 2, "something is clipped"
    torch.testing.assert_close(
        combine(solve(weights, c), compress(made.gradients, weights)), combined, rtol=1e-4, atol=1e-6
    )
    assert 0 < loss.metrics["actor/pg_clipfrac"] < 1

    vector = adapter.flatten().requires_grad_()
    direct = some.loss(_units(policy, adapter, vector, trajectory, text, some), trajectory.units.double(), advantages,
                       trained)
    (expected,) = torch.autograd.grad(direct.value, vector)
    assert direct.value.item() == pytest.approx(loss.value.item(), rel=1e-6)
    assert (combined - expected).norm() <= 1e-5 * expected.norm()


def _units(policy, adapter, vector: Tensor, trajectory, text: Tensor, some: DanceGRPO) -> Tensor:
    """The units [B, U] in one differentiable graph from `vector`, whose parts stand in for the model's weights."""
    parts = adapter._named_weights(vector)
    modules = dict(policy.model.named_modules())

    class Part(torch.nn.Module):
        def __init__(self, part: Tensor) -> None:
            super().__init__()
            self.part = part

        def forward(self, _: Tensor) -> Tensor:
            return self.part

    linears = {name: modules[name.removesuffix(".weight") + ".policy"] for name in parts}
    for name, part in parts.items():
        parametrize.register_parametrization(linears[name], "weight", Part(part), unsafe=True)
    cache = policy.new_cache(*trajectory.clean.shape[-2:])
    sigmas, total = policy.settings.sigmas, 0
    for chunk in policy.settings.chunks:
        span = slice(chunk.start, chunk.stop)
        share = len(chunk) / policy.settings.latent_frames
        of_chunk = []
        for step in range(len(sigmas) - 2):
            x, x_next = trajectory.noisy[step, :, :, span], trajectory.noisy[step + 1, :, :, span]
            velocity = policy.velocity(x, sigmas[step], text, cache, chunk.start)
            of_chunk.append(chunk_unit(some.units, share, x, velocity, x_next, sigmas[step], sigmas[step + 1]))
        total = total + torch.stack(of_chunk, dim=1)
        policy.write_context(trajectory.clean[:, :, span], text, cache, chunk.start)
    return total.double()
