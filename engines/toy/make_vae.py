"""Train the toy's video autoencoder from nothing on procedural videos.

Invariant: the result is a stock `AutoencoderKLWan` (8x in space, 4x in time, 16 channels) whose `latents_mean` and
`latents_std` are measured, so that normalised latents have about unit variance. Called by `engines.toy.make`.
"""

import logging
import math
from collections.abc import Callable

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from engines.toy.videos import all_prompts, render

log = logging.getLogger(__name__)

STEPS = 2600
LEARNING_RATE = 2e-3
KL_WEIGHT = 3e-4
CLIPS = ((9, 16), (17, 8), (33, 4))  # (frames, batch) of the three phases, of equal cost a step
PHASES = (0.3, 0.85)  # shares of the steps at which the second and the third phase begin


def new_vae() -> AutoencoderKLWan:
    """The untrained autoencoder, 0.70 M parameters."""
    return AutoencoderKLWan(
        base_dim=16,
        z_dim=16,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * 16,
        latents_std=[1.0] * 16,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
    )


def to_model(videos: Tensor) -> Tensor:
    """uint8 [N, T, H, W, 3] to float32 [N, 3, T, H, W] in [-1, 1]."""
    return videos.permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def draw(n: int, generator: torch.Generator, prompts: list[str] | None = None) -> tuple[list[str], Tensor]:
    """n random prompts (of `prompts`, or of all 72) and a 33-frame uint8 video of each."""
    prompts = prompts or all_prompts()
    chosen = [prompts[i] for i in torch.randint(len(prompts), (n,), generator=generator).tolist()]
    return chosen, render(chosen, generator)


def train_vae(
    steps: int = STEPS, seed: int = 0, checkpoint: Callable[[AutoencoderKLWan], None] | None = None
) -> AutoencoderKLWan:
    """Train on random clips by L1 reconstruction and a small KL term; then measure the latents' mean and deviation.

    `checkpoint`, if given, is called with the model every 200 steps. Deterministic for one machine and thread count.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    held_out = to_model(draw(8, torch.Generator().manual_seed(seed + 1))[1])
    vae = new_vae()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=1e-4)
    for step in range(steps):
        progress = step / steps
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * progress))
        frames, batch = CLIPS[sum(progress >= begin for begin in PHASES)]
        first = int(torch.randint(33 - frames + 1, (), generator=generator))
        clip = to_model(draw(batch, generator)[1][:, first : first + frames])

        posterior = vae.encode(clip).latent_dist
        restored = vae.decode(posterior.sample()).sample
        kl = 0.5 * (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        loss = (restored - clip).abs().mean() + KL_WEIGHT * kl
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()

        if step % 200 == 199 or step == steps - 1:
            log.info("vae step %d: loss %.4f, kl %.2f, held-out PSNR %.2f dB",
                     step + 1, loss.item(), kl.item(), psnr(held_out, reconstruct(vae, held_out)))
            if checkpoint is not None:
                checkpoint(vae)
    measure_latents(vae, generator)
    return vae.eval()


@torch.no_grad()
def reconstruct(vae: AutoencoderKLWan, frames: Tensor) -> Tensor:
    """Encode to the posterior's mean and decode: [N, 3, T, H, W] in [-1, 1]."""
    return vae.decode(vae.encode(frames).latent_dist.mean).sample.clamp(-1, 1)


def psnr(truth: Tensor, estimate: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of values in [-1, 1]."""
    return 10 * math.log10(4 / (truth - estimate).square().mean().item())


@torch.no_grad()
def measure_latents(vae: AutoencoderKLWan, generator: torch.Generator, videos: int = 256) -> None:
    """Store each latent channel's mean and standard deviation in the configuration."""
    batches = (to_model(draw(32, generator)[1]) for _ in range(videos // 32))
    latents = torch.cat([vae.encode(batch).latent_dist.mean for batch in batches])
    vae.register_to_config(
        latents_mean=latents.mean((0, 2, 3, 4)).tolist(), latents_std=latents.std((0, 2, 3, 4)).tolist()
    )
