"""The sampler records what it did, and a candidate's noise is its own."""

import pytest
import torch

from algorithms.kernels import ConsistencyKernel, DanceSDEKernel
from engines.kernel import Kernel, LogProbUnits
from engines.rollout import Seeds, Trajectory, draw_noise, rollout
from engines.testing import CHANNELS, texts, tiny_policy

SEEDS = (Seeds(7, 1), Seeds(7, 2), Seeds(8, 3))


def _rollout(seeds: tuple[Seeds, ...] = SEEDS, kernel: Kernel | None = None) -> Trajectory:
    kernel = kernel or ConsistencyKernel()
    return rollout(tiny_policy(), texts(1).expand(len(seeds), -1, -1), seeds, (4, 4), kernel, LogProbUnits(kernel))


def test_shapes() -> None:
    """A trajectory holds K inputs, the clean clip and K - 1 units, all float32 and without a graph."""
    trajectory = _rollout()
    assert trajectory.noisy.shape == (3, 3, CHANNELS, 6, 4, 4)
    assert trajectory.clean.shape == (3, CHANNELS, 6, 4, 4)
    assert trajectory.units.shape == (3, 2)
    assert all(tensor.dtype == torch.float32 and not tensor.requires_grad for tensor in trajectory)


@pytest.mark.parametrize("kernel", [ConsistencyKernel(), DanceSDEKernel(0.3)], ids=["consistency", "dance"])
def test_follows_its_kernel(kernel: Kernel) -> None:
    """Every recorded latent is the kernel's transition of the one before; the clean clip is the last estimate."""
    policy, text = tiny_policy(), texts(1)
    trajectory = rollout(policy, text, SEEDS[:1], (4, 4), kernel, LogProbUnits(kernel))
    noise = draw_noise(SEEDS[:1], 3, trajectory.clean.shape[1:])
    sigmas = policy.settings.sigmas
    cache = policy.new_cache(4, 4)
    assert torch.equal(trajectory.noisy[0], noise[0])
    with torch.no_grad():
        for chunk in policy.settings.chunks:
            span = slice(chunk.start, chunk.stop)
            for step in range(3):
                x = trajectory.noisy[step, :, :, span]
                velocity = policy.velocity(x, sigmas[step], text, cache, chunk.start)
                if step < 2:
                    mean, std = kernel.transition(x, velocity, *sigmas[step : step + 2])
                    expected, found = mean + std * noise[step + 1, :, :, span], trajectory.noisy[step + 1, :, :, span]
                else:
                    expected, found = x - sigmas[2] * velocity, trajectory.clean[:, :, span]
                torch.testing.assert_close(found, expected)
            policy.write_context(trajectory.clean[:, :, span], text, cache, chunk.start)


def test_noise_is_the_candidates_own() -> None:
    """A candidate draws the same noise in whatever company, and samples the same clip up to rounding."""
    shape = (CHANNELS, 6, 4, 4)
    together = draw_noise(SEEDS, 3, shape)
    alone = draw_noise(SEEDS[1:2], 3, shape)
    assert torch.equal(together[:, 1], alone[:, 0])
    torch.testing.assert_close(_rollout().clean[1], _rollout(SEEDS[1:2]).clean[0], rtol=1e-3, atol=1e-3)


def test_shared_initial_noise() -> None:
    """Candidates with one initial seed start alike and part at the first transition."""
    noise = draw_noise(SEEDS, 3, (CHANNELS, 6, 4, 4))
    assert torch.equal(noise[0, 0], noise[0, 1])
    assert not torch.equal(noise[0, 0], noise[0, 2])
    assert not torch.equal(noise[1, 0], noise[1, 1])


def test_repeats_bit_for_bit() -> None:
    """The same seeds give the same trajectory."""
    assert all(torch.equal(a, b) for a, b in zip(_rollout(), _rollout(), strict=True))


def test_chunks_stream_as_they_are_done() -> None:
    """The callback sees each chunk once, in order, while later ones are still unmade."""
    seen: list[tuple[range, torch.Tensor]] = []
    policy, kernel = tiny_policy(), ConsistencyKernel()
    trajectory = rollout(
        policy,
        texts(1),
        SEEDS[:1],
        (4, 4),
        kernel,
        LogProbUnits(kernel),
        on_chunk=lambda chunk, clean: seen.append((chunk, clean.clone())),
    )
    assert [chunk for chunk, _ in seen] == [range(0, 2), range(2, 4), range(4, 6)]
    assert torch.equal(torch.cat([clean for _, clean in seen], dim=2), trajectory.clean)
