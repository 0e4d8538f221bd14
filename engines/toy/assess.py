"""Print how well a toy model follows its prompts: `python -m engines.toy.assess [--model DIR] [--videos N]`.

Judged by `engines.rewards.pixels`, on training and on held-out prompts, by the few-step sampler; real and reconstructed
videos are judged as well, since no generated one can be better. Deterministic for one machine and thread count.
"""

from itertools import pairwise
from pathlib import Path

import click
import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from engines.policy import Policy, load_policy
from engines.rewards import pixels
from engines.text import load_text_encoder
from engines.toy import MODEL
from engines.toy.make_vae import psnr, reconstruct, to_model
from engines.toy.videos import render, split_prompts
from engines.vae import StreamingDecoder, load_vae, to_uint8

BATCH = 32


@torch.no_grad()
def generate(policy: Policy, text: Tensor, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """One clip for each row of `text` [N, L, D] by the few-step sampler: clean latents [N, 16, F, *size].

    The sampler is Self-Forcing's: each step estimates the clean chunk, and all but the last add fresh noise to it.
    """
    batch, channels, _, height, width = policy.latent_shape(len(text), *size)
    cache = policy.new_cache(height, width)
    chunks = []
    for frames in policy.settings.chunks:
        shape = (batch, channels, len(frames), height, width)
        x = torch.randn(shape, generator=generator)
        for sigma, following in pairwise(policy.settings.sigmas):
            clean = x - sigma * policy.velocity(x, sigma, text, cache, frames.start)
            x = (1 - following) * clean + following * torch.randn(shape, generator=generator)
        policy.write_context(clean, text, cache, frames.start)
        chunks.append(clean)
    return torch.cat(chunks, dim=2)


def judge(videos: Tensor, prompts: list[str]) -> str:
    """Accuracies and mean scores of the videos, as one line."""
    columns = (pixels.colour_right, pixels.motion_right, pixels.colour_score, pixels.motion_score)
    rows = [[float(column(video, prompt)) for column in columns] for video, prompt in zip(videos, prompts, strict=True)]
    colour, motion, colour_score, motion_score = torch.tensor(rows).mean(0).tolist()
    return (
        f"colour right {colour:6.1%}, motion right {motion:6.1%}, "
        f"colour score {colour_score:.3f}, motion score {motion_score:.3f}"
    )


@click.command()
@click.option(
    "--model", type=click.Path(exists=True, file_okay=False, path_type=Path), default=MODEL,
    help="Folder of the model; by default the toy that ships.",
)
@click.option("--videos", default=216, show_default=True, help="Videos of each kind.")
@click.option("--seed", default=0, show_default=True, help="Seed of all noise.")
def main(model: Path, videos: int, seed: int) -> None:
    """Print the accuracy of real, reconstructed and generated videos."""
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    policy, vae = load_policy(model), load_vae(model)
    settings = policy.settings
    texts = load_text_encoder(model, settings.text_length)
    size = settings.height // 8, settings.width // 8
    generator = torch.Generator().manual_seed(seed)
    training, held_out = ((prompts * videos)[:videos] for prompts in split_prompts())

    real = render(held_out, generator)
    restored = torch.cat([reconstruct(vae, to_model(batch)) for batch in real.split(BATCH)])
    click.echo(f"reconstruction of real videos: {psnr(to_model(real), restored):.1f} dB")
    click.echo(f"real              {judge(real, held_out)}")
    click.echo(f"reconstructed     {judge(to_uint8(restored), held_out)}")
    for kind, prompts in (("training", training), ("held-out", held_out)):
        batches = texts.encode(prompts).split(BATCH)
        latents = [generate(policy, batch, size, generator) for batch in batches]
        made = torch.cat([StreamingDecoder(vae).decode(batch) for batch in latents])
        click.echo(f"{kind} prompts  {judge(made, prompts)}")


if __name__ == "__main__":
    main()
