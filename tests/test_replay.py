"""Replays repeat the rollout's units, to the bit in its own batch shape, and their gradients are autograd's."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from algorithms.kernels import ConsistencyKernel
from asyncflow.engine import Cancelled
from engines.adapter import Adapter, AdapterSettings
from engines.kernel import LogProbUnits
from engines.policy import Policy
from engines.replay import Order, Replay, Replayer
from engines.rollout import Seeds, Trajectory, rollout
from engines.testing import texts, tiny_policy

KERNEL = ConsistencyKernel()
UNITS = LogProbUnits(KERNEL)
KL_UNITS = LogProbUnits(KERNEL, with_kl=True)
ORDERS = ("by-chunk", "batched", "packed")
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


def replayer(sampled: Sampled, order: Order = "by-chunk", **changes: object) -> Replayer:
    fields = {"units": UNITS, "steps": (0, 1), **changes}
    return Replayer(policy=sampled.policy, trajectory=sampled.trajectory, text=sampled.text, order=order, **fields)


def every_unit(units: Tensor, steps: slice) -> Tensor:
    """Weights of all units of two steps, each with a sum of its own; of one kind of unit after the other."""
    batch, _, kinds = units.shape
    rows = torch.eye(2 * kinds, dtype=torch.float64).unflatten(1, (kinds, 2)).transpose(1, 2)
    return rows[:, steps].expand(batch, -1, -1, -1)


def replay(sampled: Sampled, order: Order = "by-chunk", **changes: object) -> Replay:
    """Replay with a sum for each unit."""
    return replayer(sampled, order, **changes).replay(sampled.adapter, every_unit)


def frozen(sampled: Sampled, order: Order = "by-chunk") -> Tensor:
    """The predictions of the policy without its adapter."""
    with sampled.adapter.disabled():
        return replayer(sampled, order).velocities()


def _autograd(sampled: Sampled, candidate: int, step: int, reference: Tensor | None = None) -> list[Tensor]:
    """The gradients of a step's units by ordinary backwards through every chunk, for a batch of one."""
    policy, noisy, clean = sampled.policy, sampled.trajectory.noisy, sampled.trajectory.clean
    units = UNITS if reference is None else KL_UNITS
    one = slice(candidate, candidate + 1)
    text = sampled.text[one]
    sigmas = policy.settings.sigmas[step : step + 2]
    cache = policy.new_cache(4, 4)
    total = torch.zeros(())
    for chunk in policy.settings.chunks:
        span = slice(chunk.start, chunk.stop)
        x, x_next = noisy[step, one, :, span], noisy[step + 1, one, :, span]
        velocity = policy.velocity(x, sigmas[0], text, cache, chunk.start)
        other = None if reference is None else reference[step, one, :, span]
        total = total + units.of_chunk(x, velocity, x_next, *sigmas, other)
        policy.write_context(clean[one, :, span], text, cache, chunk.start)
    weights = [p for name, p in policy.model.named_parameters() if "lora_" in name]
    made = [torch.autograd.grad(unit, weights, retain_graph=True) for unit in total[0]]
    return [torch.cat([gradient.flatten() for gradient in gradients]) for gradients in made]


def test_units_are_the_rollouts_bits(sampled: Sampled) -> None:
    """Chunk by chunk under the rollout's weights, with and without gradients, every ratio is exactly 1."""
    assert torch.equal(replay(sampled).units[:, :, 0], sampled.trajectory.units)
    assert torch.equal(replayer(sampled).forward_only()[:, :, 0], sampled.trajectory.units)


@pytest.mark.parametrize("order", ["batched", "packed"])
def test_other_orders_give_the_rollouts_units_up_to_rounding(sampled: Sampled, order: Order) -> None:
    """Several steps or chunks in one forward see what each saw alone, window and sink included."""
    torch.testing.assert_close(
        replay(sampled, order).units[:, :, 0], sampled.trajectory.units, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("order", ORDERS)
def test_units_move_with_the_weights(sampled: Sampled, order: Order) -> None:
    """After an update, replay and forward-only replay still agree to the bit, on other values."""
    sampled.adapter.assign(sampled.adapter.flatten() * 1.1)
    units = replay(sampled, order).units
    assert torch.equal(replayer(sampled, order).forward_only(), units)
    assert (units[:, :, 0] - sampled.trajectory.units).abs().max() > 1e-3


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_gradients_are_autograds(sampled: Sampled, order: Order, checkpointing: bool) -> None:
    """Each candidate's and unit's gradient from the batched backward equals autograd's for that candidate alone."""
    if checkpointing:
        sampled.policy.model.enable_gradient_checkpointing()
    reference = frozen(sampled, order)
    made = replay(sampled, order, units=KL_UNITS, reference=reference)
    assert made.sums.shape == (3, 4, sampled.adapter.size)
    for candidate in range(3):
        for step in range(2):
            for unit, expected in enumerate(_autograd(sampled, candidate, step, reference)):
                scale = expected.abs().max().item()
                gradient = made.sums[candidate, 2 * unit + step]
                torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("order", ORDERS)
def test_the_kl_is_to_the_policy_without_its_adapter(sampled: Sampled, order: Order) -> None:
    """Exactly 0 while the adapter adds nothing, and above 0 otherwise; the log-probability keeps its bits beside it."""
    reference = frozen(sampled, order)
    units = replay(sampled, order, units=KL_UNITS, reference=reference).units
    assert torch.equal(units[:, :, 0], replay(sampled, order).units[:, :, 0])
    assert (units[:, :, 1] > 0).all()
    sampled.adapter.assign(torch.zeros(sampled.adapter.size))
    assert torch.equal(frozen(sampled, order), reference)
    assert not replay(sampled, order, units=KL_UNITS, reference=reference).units[:, :, 1].any()


@pytest.mark.parametrize("order", ORDERS)
def test_sums_are_weighted_and_kept_apart_only_where_they_differ(sampled: Sampled, order: Order) -> None:
    """Rows alike for the whole batch are one sum; one that differs from some step on is right from the first step."""

    def weigh(units: Tensor, steps: slice) -> Tensor:
        rows = torch.tensor([[0.5, 2.0], [0.5, 2.0], [0.5, -1.0]], dtype=torch.float64)
        made = rows[:, steps, None].expand(3, -1, -1, -1).clone()
        made[0, 2] = made[0, 0]
        return made

    apart = replay(sampled, order).sums
    made = replayer(sampled, order).replay(sampled.adapter, weigh)
    assert made.weights.shape == (3, 2, 2, 1)
    expected = torch.einsum("bwk,bkp->bwp", made.weights.squeeze(3).float(), apart)
    torch.testing.assert_close(made.sums, expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(made.weights[0, 0], made.weights[0, 1])


def test_a_packed_replay_skips_a_backward_that_nobody_asks_for(sampled: Sampled) -> None:
    """A step whose weights are 0 for the whole batch has its forward only."""
    backwards = 0

    def weigh(units: Tensor, steps: slice) -> Tensor:
        return torch.tensor([[1.0, 0.0]], dtype=torch.float64)[:, steps, None].expand(3, -1, -1, -1)

    def count(*_: object) -> None:
        nonlocal backwards
        backwards += 1

    for name, module in sampled.policy.model.named_modules():
        if name == "blocks.0.attn1.to_q.lora_B.policy":
            module.register_full_backward_hook(count)
    made = replayer(sampled, "packed").replay(sampled.adapter, weigh)
    assert backwards == 1
    torch.testing.assert_close(made.sums[:, 0], replay(sampled, "packed").sums[:, 0])


@pytest.mark.parametrize("order", ORDERS)
def test_an_unneeded_replay_stops_before_the_next_forward(sampled: Sampled, order: Order) -> None:
    """It is asked before each, those that fill the cache included, and leaves the adapter as it was."""
    answers = [False, True]
    with pytest.raises(Cancelled):
        replay(sampled, order, is_unneeded=lambda: answers.pop(0))
    assert not answers
    assert replay(sampled).units.shape == (3, 2, 1)


def test_gradients_are_finite_differences(sampled: Sampled) -> None:
    """A unit changes along its gradient by the gradient's square, where only the recorded prefix is held fixed."""
    # One chunk alone: later chunks' caches move with the weights, which the unit's gradient leaves out by design.
    first = Policy(sampled.policy.model, tiny_policy(latent_frames=2).settings)
    one = Sampled(first, sampled.adapter, sampled.text, rollout(first, sampled.text, SEEDS, (4, 4), KERNEL, UNITS))
    gradient = replay(one).sums[1, 0]
    weights, direction = one.adapter.flatten(), gradient / gradient.norm()
    values = []
    for sign in (1.0, -1.0):
        one.adapter.assign(weights + sign * 1e-3 * direction)
        values.append(replayer(one).forward_only()[1, 0, 0].item())
    assert (values[0] - values[1]) / 2e-3 == pytest.approx(gradient.norm().item(), rel=1e-2)


@pytest.mark.parametrize("order", ORDERS)
def test_chosen_steps(sampled: Sampled, order: Order) -> None:
    """Training some steps gives their units of the whole replay, in the order asked."""
    whole = replay(sampled, order)
    part = replay(sampled, order, steps=(1, 0))
    assert torch.equal(part.units, whole.units.flip(1))
    assert torch.equal(part.sums, whole.sums.flip(1))
    assert torch.equal(replayer(sampled, order, steps=(1,)).forward_only(), whole.units[:, 1:])


@pytest.mark.parametrize("order", ORDERS)
def test_leaves_no_gradient_behind(sampled: Sampled, order: Order) -> None:
    """Replay fills its own sums only."""
    replay(sampled, order)
    assert all(parameter.grad is None for parameter in sampled.policy.model.parameters())
    assert sampled.adapter.vector.grad is None
