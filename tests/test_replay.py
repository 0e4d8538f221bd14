"""A replay repeats the rollout's units to the bit, and its gradients are autograd's."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from algorithms.kernels import ConsistencyKernel
from engines.adapter import Adapter, AdapterSettings
from engines.kernel import LogProbUnits
from engines.policy import Policy
from engines.replay import forward_only, replay
from engines.rollout import Seeds, Trajectory, rollout
from engines.testing import texts, tiny_policy

KERNEL = ConsistencyKernel()
UNITS = LogProbUnits(KERNEL)
SEEDS = (Seeds(7, 1), Seeds(7, 2), Seeds(7, 3))


@dataclass
class Sampled:
    """A policy with an adapter whose B is not zero, and what it sampled."""

    policy: Policy
    adapter: Adapter
    text: Tensor
    trajectory: Trajectory


@pytest.fixture(params=[-1, 4], ids=["global", "window"])
def sampled(request: pytest.FixtureRequest) -> Sampled:
    policy = tiny_policy(local_attn_size=request.param)
    adapter = Adapter(policy.model, AdapterSettings(rank=2, alpha=4.0), seed=3)
    adapter.assign(adapter.flatten() + 0.1 * torch.randn(adapter.size, generator=torch.Generator().manual_seed(5)))
    text = texts(1).expand(len(SEEDS), -1, -1)
    return Sampled(policy, adapter, text, rollout(policy, text, SEEDS, (4, 4), KERNEL, UNITS))


def _autograd(sampled: Sampled, candidate: int, step: int) -> Tensor:
    """The unit's gradient by one ordinary backward through every chunk, for a batch of one."""
    policy, noisy, clean = sampled.policy, sampled.trajectory.noisy, sampled.trajectory.clean
    one = slice(candidate, candidate + 1)
    text = sampled.text[one]
    sigmas = policy.settings.sigmas[step : step + 2]
    cache = policy.new_cache(4, 4)
    total = torch.zeros(())
    for chunk in policy.settings.chunks:
        span = slice(chunk.start, chunk.stop)
        velocity = policy.velocity(noisy[step, one, :, span], sigmas[0], text, cache, chunk.start)
        total = total + UNITS.unit(noisy[step, one, :, span], velocity, noisy[step + 1, one, :, span], *sigmas).sum()
        policy.write_context(clean[one, :, span], text, cache, chunk.start)
    weights = [p for name, p in policy.model.named_parameters() if "lora_" in name]
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(total, weights)])


def test_units_are_the_rollouts_bits(sampled: Sampled) -> None:
    """Under the rollout's weights, with and without gradients, every ratio is exactly 1."""
    arguments = (sampled.trajectory, sampled.text, UNITS)
    assert torch.equal(replay(sampled.policy, sampled.adapter, *arguments).units, sampled.trajectory.units)
    assert torch.equal(forward_only(sampled.policy, *arguments), sampled.trajectory.units)


def test_units_move_with_the_weights(sampled: Sampled) -> None:
    """After an update, replay and forward-only replay still agree to the bit, on other values."""
    sampled.adapter.assign(sampled.adapter.flatten() * 1.1)
    arguments = (sampled.trajectory, sampled.text, UNITS)
    units = replay(sampled.policy, sampled.adapter, *arguments).units
    assert torch.equal(forward_only(sampled.policy, *arguments), units)
    assert not torch.equal(units, sampled.trajectory.units)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_gradients_are_autograds(sampled: Sampled, checkpointing: bool) -> None:
    """Each candidate's and step's gradient from the batched backward equals autograd's for that candidate alone."""
    if checkpointing:
        sampled.policy.model.enable_gradient_checkpointing()
    gradients = replay(sampled.policy, sampled.adapter, sampled.trajectory, sampled.text, UNITS).gradients
    assert gradients.shape == (3, 2, sampled.adapter.size)
    for candidate in range(3):
        for step in range(2):
            expected = _autograd(sampled, candidate, step)
            scale = expected.abs().max().item()
            torch.testing.assert_close(gradients[candidate, step], expected, rtol=1e-3, atol=1e-4 * scale)


def test_gradients_are_finite_differences(sampled: Sampled) -> None:
    """A unit changes along its gradient by the gradient's square, where only the recorded prefix is held fixed."""
    adapter, text = sampled.adapter, sampled.text
    # One chunk alone: later chunks' caches move with the weights, which the unit's gradient leaves out by design.
    first = Policy(sampled.policy.model, tiny_policy(latent_frames=2).settings)
    trajectory = rollout(first, text, SEEDS, (4, 4), KERNEL, UNITS)
    gradient = replay(first, adapter, trajectory, text, UNITS).gradients[1, 0]
    weights, direction = adapter.flatten(), gradient / gradient.norm()
    values = []
    for sign in (1.0, -1.0):
        adapter.assign(weights + sign * 1e-3 * direction)
        values.append(forward_only(first, trajectory, text, UNITS)[1, 0].item())
    assert (values[0] - values[1]) / 2e-3 == pytest.approx(gradient.norm().item(), rel=1e-2)


def test_chosen_steps(sampled: Sampled) -> None:
    """Training some steps gives their columns of the whole replay, in the order asked."""
    whole = replay(sampled.policy, sampled.adapter, sampled.trajectory, sampled.text, UNITS)
    part = replay(sampled.policy, sampled.adapter, sampled.trajectory, sampled.text, UNITS, steps=(1, 0))
    assert torch.equal(part.units, whole.units.flip(1))
    assert torch.equal(part.gradients, whole.gradients.flip(1))
    only = forward_only(sampled.policy, sampled.trajectory, sampled.text, UNITS, steps=(1,))
    assert torch.equal(only, whole.units[:, 1:])


def test_leaves_no_gradient_behind(sampled: Sampled) -> None:
    """Replay fills its own buffers only."""
    replay(sampled.policy, sampled.adapter, sampled.trajectory, sampled.text, UNITS)
    assert all(parameter.grad is None for parameter in sampled.policy.model.parameters())
    assert sampled.adapter.vector.grad is None
