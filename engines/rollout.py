"""Samples a micro-batch of candidates chunk by chunk and records all that a replay needs.

Noise comes from seeds of each candidate alone, so who else is in the batch never changes a candidate's noise.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from engines.kernel import Kernel, Units, chunk_units
from engines.policy import Policy


class Seeds(NamedTuple):
    """Seeds of one candidate: of the initial noise (often shared by its group) and of the noise of later steps.

    They must differ, or the steps repeat the initial noise.
    """

    initial: int
    steps: int


class Trajectory(NamedTuple):
    """What was sampled, in float32.

    `noisy` [K, B, C, F, H, W] is the input of each denoising step for the whole clip, `clean` [B, C, F, H, W] the last
    step's estimate, `units` [B, K - 1] the first unit of each stochastic transition under the weights that sampled.
    """

    noisy: Tensor
    clean: Tensor
    units: Tensor


OnChunk = Callable[[range, Tensor], None]


def draw_noise(seeds: Sequence[Seeds], steps: int, clip: tuple[int, ...]) -> Tensor:
    """Standard normal noise [steps, B, *clip]: entry 0 from the initial seeds, the rest from the step seeds.

    Drawn on the CPU, so that every device type samples the same.
    """
    noise = torch.empty(steps, len(seeds), *clip)
    for place, seed in enumerate(seeds):
        torch.randn(clip, generator=torch.Generator().manual_seed(seed.initial), out=noise[0, place])
        step_noise = torch.randn((steps - 1, *clip), generator=torch.Generator().manual_seed(seed.steps))
        noise[1:, place] = step_noise
    return noise


@torch.no_grad()
def rollout(
    policy: Policy,
    text: Tensor,
    seeds: Sequence[Seeds],
    size: tuple[int, int],
    kernel: Kernel,
    units: Units,
    on_chunk: OnChunk | None = None,
) -> Trajectory:
    """Sample `len(seeds)` clips with latents of `size` (height, width).

    text [B, L, D] on the policy's device. The first K - 1 denoising steps are transitions of `kernel`, the last gives
    its estimate of the clean chunk. `on_chunk(frames, clean [B, C, f, H, W])` is called as each chunk is done.
    """
    settings = policy.settings
    sigmas = settings.sigmas
    last = len(sigmas) - 2
    shape = policy.latent_shape(len(seeds), *size)
    noisy = draw_noise(seeds, len(sigmas) - 1, shape[1:]).to(policy.device)
    clean = torch.empty_like(noisy[0])
    recorded = torch.zeros(len(seeds), last, device=policy.device)
    cache = policy.new_cache(*size)
    for chunk in settings.chunks:
        span = slice(chunk.start, chunk.stop)
        share = len(chunk) / settings.latent_frames
        # A step's noise is replaced in place by the latent it makes.
        for step, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
            x = noisy[step, :, :, span]
            velocity = policy.velocity(x, sigma, text, cache, chunk.start)
            if step == last:
                clean[:, :, span] = x - sigma * velocity
                break
            mean, std = kernel.transition(x, velocity, sigma, sigma_next)
            x_next = noisy[step + 1, :, :, span]
            x_next.mul_(std).add_(mean)
            recorded[:, step] += chunk_units(units, share, x, velocity, x_next, sigma, sigma_next)[:, 0]
        if on_chunk is not None:
            on_chunk(chunk, clean[:, :, span])
        if chunk.stop < settings.latent_frames:
            policy.write_context(clean[:, :, span], text, cache, chunk.start)
    return Trajectory(noisy, clean, recorded)
