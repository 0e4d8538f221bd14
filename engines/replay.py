"""Recomputes a trajectory's units and their gradients, chunk by chunk.

Each chunk reads a cache made of the recorded clean chunks before it, without gradient; the activations of a (chunk,
step) are gone before the next. The batch is the rollout's, so under the rollout's weights the units are the recorded
bits. No score is among the inputs: gradients are of the units themselves, one for each candidate and step.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engines.adapter import Adapter
from engines.kernel import Units, chunk_unit
from engines.policy import KVCache, Policy
from engines.rollout import Trajectory


class Replay(NamedTuple):
    """Units [B, U] and their gradients [B, U, P] with respect to the adapter's vector, both float32."""

    units: Tensor
    gradients: Tensor


def replay(
    policy: Policy,
    adapter: Adapter,
    trajectory: Trajectory,
    text: Tensor,
    units: Units,
    steps: Sequence[int] | None = None,
) -> Replay:
    """Units and unit gradients of the trained denoising `steps` (by default all K - 1 stochastic ones), in their order.

    text [B, L, D] as in the rollout. A candidate's gradients do not depend on the others of its batch.
    """
    chosen = _steps(trajectory, steps)
    batch = trajectory.clean.shape[0]
    total = torch.zeros(batch, len(chosen), device=policy.device)
    gradients = torch.zeros(batch, len(chosen), adapter.size, device=policy.device)
    for chunk, cache in _chunks(policy, trajectory, text):
        for place, step in enumerate(chosen):
            with torch.enable_grad(), adapter.recording(gradients[:, place]):
                value = _unit(policy, trajectory, text, units, chunk, step, cache)
                value.sum().backward()
            total[:, place] += value.detach()
    return Replay(total, gradients)


@torch.no_grad()
def forward_only(
    policy: Policy, trajectory: Trajectory, text: Tensor, units: Units, steps: Sequence[int] | None = None
) -> Tensor:
    """The units [B, U] of `replay`, the same bits, without gradients."""
    chosen = _steps(trajectory, steps)
    total = torch.zeros(trajectory.clean.shape[0], len(chosen), device=policy.device)
    for chunk, cache in _chunks(policy, trajectory, text):
        for place, step in enumerate(chosen):
            total[:, place] += _unit(policy, trajectory, text, units, chunk, step, cache)
    return total


def _steps(trajectory: Trajectory, steps: Sequence[int] | None) -> Sequence[int]:
    stochastic = range(trajectory.noisy.shape[0] - 1)
    chosen = stochastic if steps is None else steps
    assert all(step in stochastic for step in chosen), f"only steps {stochastic} are stochastic"
    return chosen


def _chunks(policy: Policy, trajectory: Trajectory, text: Tensor) -> Iterator[tuple[range, KVCache]]:
    """Each chunk with the cache it reads; the chunk's recorded latents join the cache before the next is given."""
    frames = policy.settings.latent_frames
    height, width = trajectory.clean.shape[-2:]
    cache = policy.new_cache(height, width)
    for chunk in policy.settings.chunks:
        yield chunk, cache
        if chunk.stop < frames:
            policy.write_context(trajectory.clean[:, :, chunk.start : chunk.stop], text, cache, chunk.start)


def _unit(
    policy: Policy, trajectory: Trajectory, text: Tensor, units: Units, chunk: range, step: int, cache: KVCache
) -> Tensor:
    span = slice(chunk.start, chunk.stop)
    sigma, sigma_next = policy.settings.sigmas[step : step + 2]
    x = trajectory.noisy[step, :, :, span]
    x_next = trajectory.noisy[step + 1, :, :, span]
    velocity = policy.velocity(x, sigma, text, cache, chunk.start)
    share = len(chunk) / policy.settings.latent_frames
    return chunk_unit(units, share, x, velocity, x_next, sigma, sigma_next)
