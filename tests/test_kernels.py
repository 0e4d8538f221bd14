"""Transition kernels and log-probabilities equal those of the papers' own code, and the sampler they describe."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from algorithms.kernels import ConsistencyKernel, DanceSDEKernel
from engines.kernel import LogProbUnits, chunk_units, gaussian_log_prob

GOLDEN = Path(__file__).parent / "golden"
DANCE = json.loads((GOLDEN / "dance_kernel.json").read_text())["dance_sde"]
VERL = [e for e in json.loads((GOLDEN / "kernels.json").read_text())["verl_kernels"] if e["kind"] == "dance_sde"]


def _noise(seed: int) -> torch.Tensor:
    return torch.randn(2, 3, 2, 2, 2, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("entry", [*DANCE, *VERL])
def test_dance_sde_equals_published_code(entry: dict[str, Any]) -> None:
    """Mean and log-probability equal DanceGRPO's flux_step and verl-omni's dance_sde to 1e-5."""
    x, velocity, x_next, expected, log_prob = (
        torch.tensor(entry[name]) for name in ("x", "v", "x_next", "mean", "log_prob")
    )
    kernel = DanceSDEKernel(entry["eta"] if "eta" in entry else entry["noise_level"])
    mean, std = kernel.transition(x, velocity, entry["sigma"], entry["sigma_next"])
    torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gaussian_log_prob(x_next, mean, std), log_prob, rtol=1e-5, atol=1e-5)


def test_golden_cases_are_there() -> None:
    """Both sources are tested."""
    assert len(DANCE) == 6
    assert VERL


def test_log_prob_is_the_normal_density() -> None:
    """The log-probability is the mean of torch's normal log densities, and the recorded latent gets no gradient."""
    x_next, mean = _noise(0).requires_grad_(), _noise(1).requires_grad_()
    value = gaussian_log_prob(x_next, mean, 0.3)
    expected = torch.distributions.Normal(mean, 0.3).log_prob(x_next).flatten(1).mean(dim=1)
    torch.testing.assert_close(value, expected)
    of_next, of_mean = torch.autograd.grad(value.sum(), (x_next, mean), allow_unused=True)
    assert of_next is None
    assert of_mean is not None


def test_consistency_kernel_is_the_renoising_sampler() -> None:
    """Mean plus std times noise is (1 - sigma') x0 + sigma' noise with x0 the clean estimate."""
    clean, noise, fresh = _noise(0), _noise(1), _noise(2)
    x = 0.25 * clean + 0.75 * noise
    mean, std = ConsistencyKernel().transition(x, noise - clean, 0.75, 0.5)
    torch.testing.assert_close(mean + std * fresh, 0.5 * clean + 0.5 * fresh)


def test_chunk_reduce() -> None:
    """A sum leaves a chunk's contribution alone; a mean weighs it by the chunk's share of the clip."""
    arguments = (_noise(0), _noise(1), _noise(2), 0.75, 0.5)
    whole = chunk_units(LogProbUnits(ConsistencyKernel(), "sum"), 0.25, *arguments)
    part = chunk_units(LogProbUnits(ConsistencyKernel(), "mean"), 0.25, *arguments)
    assert whole.shape == (2, 1)
    torch.testing.assert_close(part, 0.25 * whole)


def test_mean_over_chunks_is_the_clips_log_prob() -> None:
    """With `mean`, the chunks of a clip add up to the log-probability of the clip in one piece, as DanceGRPO has it."""
    x, velocity, x_next = (torch.cat([_noise(s), _noise(s + 10)], dim=2) for s in (0, 1, 2))
    units = LogProbUnits(DanceSDEKernel(0.3), "mean")
    parts = sum(
        chunk_units(units, 0.5, x[:, :, s], velocity[:, :, s], x_next[:, :, s], 0.75, 0.5)
        for s in (slice(0, 2), slice(2, 4))
    )
    torch.testing.assert_close(parts, units.of_chunk(x, velocity, x_next, 0.75, 0.5, None))
