"""Make the toy from nothing: `python -m engines.toy.make --out DIR`.

Writes a stock diffusers folder (weights in half precision, loaded as float32) with `causal.json` beside its parts.
The model that ships in `engines/toy/model` was made so, with the defaults; another run gives a like one, not the same.
"""

import logging
from pathlib import Path

import click
import msgspec
import torch
from diffusers import WanPipeline

from engines.policy.settings import FILE_NAME
from engines.toy.make_policy import SETTINGS, STEPS, VIDEOS, new_pipeline, train_policy
from engines.toy.make_vae import STEPS as VAE_STEPS
from engines.toy.make_vae import train_vae


def save(pipeline: WanPipeline, folder: Path) -> None:
    """Write the pipeline and its causal settings. The trained parts become half precision, in memory as well."""
    pipeline.vae.half()
    pipeline.transformer.half()
    pipeline.save_pretrained(folder)
    settings = msgspec.json.format(msgspec.json.encode(SETTINGS), indent=2)
    (folder / FILE_NAME).write_bytes(settings + b"\n")


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder to write.")
@click.option("--vae-steps", default=VAE_STEPS, show_default=True, help="Training steps of the autoencoder.")
@click.option("--policy-steps", default=STEPS, show_default=True, help="Training steps of the transformer.")
@click.option("--videos", default=VIDEOS, show_default=True, help="Videos the transformer is trained on.")
@click.option("--seed", default=0, show_default=True, help="Seed of weights, videos and noise.")
def main(out: Path, vae_steps: int, policy_steps: int, videos: int, seed: int) -> None:
    """Train the toy on procedural videos and write it as a diffusers folder; takes about an hour of one CPU core."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    pipeline = new_pipeline(train_vae(vae_steps, seed), seed)
    train_policy(pipeline, policy_steps, videos, seed)
    save(pipeline, out)


if __name__ == "__main__":
    main()
