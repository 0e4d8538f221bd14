"""`asyncflow generate`: videos from a model folder, with or without an adapter, in this one process."""

from pathlib import Path
from typing import Annotated, Literal

import click
import torch
from diffusers import AutoencoderKLWan
from msgspec import Meta
from torch import Tensor
from transformers.utils import logging as transformers_logging

from algorithms.kernels import ConsistencyKernel
from algorithms.model import ModelConfig
from algorithms.prepare import check_model, check_size, read_adapter
from algorithms.prompts import read_prompts
from asyncflow.errors import ConfigError
from asyncflow.options import options
from asyncflow.randomness import derive_seed
from asyncflow.video import write_mp4
from engines.adapter import Adapter
from engines.kernel import LogProbUnits
from engines.policy import Policy, load_policy
from engines.rank import compute_dtype, encode_prompts, pick_device
from engines.rollout import Seeds, rollout
from engines.toy import EVAL_PROMPTS
from engines.vae import StreamingDecoder, load_vae


class GenerateConfig(ModelConfig, frozen=True, kw_only=True):
    """What to generate, and where to."""

    adapter: Annotated[str, Meta(description="Adapter folder, as a run writes it; empty for the model alone.")] = ""
    prompt: Annotated[tuple[str, ...], Meta(description="A prompt; give it again for several.")] = ()
    prompts: Annotated[str, Meta(description="File of prompts: .txt, .csv or .jsonl.")] = ""
    samples: Annotated[int, Meta(ge=1, description="Videos a prompt.")] = 1
    seed: Annotated[int, Meta(ge=0, description="Seed of the noise.")] = 0
    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="Where the model runs.")] = "auto"
    out: Annotated[str, Meta(description="Folder for the mp4 files.")] = "videos"

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(not prompt.strip() for prompt in self.prompt):
            raise ConfigError("--prompt: the prompt is empty; write one")


@click.command("generate")
@options(GenerateConfig)
def main(config: GenerateConfig) -> None:
    """Generate videos from a model folder, with or without an adapter."""
    folder = config.folder
    check_model(folder)
    settings = config.settings()
    check_size(folder, settings)
    adapter = read_adapter(Path(config.adapter), "--adapter") if config.adapter else None
    prompts = [*config.prompt, *(read_prompts(Path(config.prompts)) if config.prompts else [])]
    if not prompts and config.model:
        raise ConfigError("--prompt: nothing to generate; give --prompt TEXT or --prompts FILE")
    prompts = prompts or read_prompts(EVAL_PROMPTS)
    out = Path(config.out)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out: {out} is no folder; choose another")
    device = pick_device(config.device, 0)
    transformers_logging.disable_progress_bar()
    texts = encode_prompts(folder, prompts, device)
    policy = load_policy(folder, **config.weights, settings=settings, device=device, dtype=compute_dtype(device))
    if adapter:
        Adapter(policy.model, adapter, config.seed).load(Path(config.adapter))
    vae = load_vae(folder, device=device)
    for place, prompt in enumerate(prompts):
        text = texts[prompt][None].to(device)
        for sample in range(config.samples):
            seeds = Seeds(*(derive_seed(config.seed, place, sample, what) for what in ("initial", "steps")))
            path = out / f"{place:03d}-{sample}.mp4"
            write_mp4(path, sample_video(policy, vae, text, seeds).numpy(), fps=policy.settings.fps)
            click.echo(f"{path}  {prompt}")


def sample_video(policy: Policy, vae: AutoencoderKLWan, text: Tensor, seeds: Seeds) -> Tensor:
    """One video, uint8 [T, H, W, 3] on the host, from a prompt's embedding [1, L, D], decoded chunk by chunk."""
    scale, settings, kernel = vae.config.scale_factor_spatial, policy.settings, ConsistencyKernel()
    decoder = StreamingDecoder(vae)
    parts: list[Tensor] = []
    rollout(
        policy,
        text,
        [seeds],
        (settings.height // scale, settings.width // scale),
        kernel,
        LogProbUnits(kernel),
        on_chunk=lambda _, clean: parts.append(decoder.decode(clean).cpu()),
    )
    return torch.cat(parts, dim=1)[0]
