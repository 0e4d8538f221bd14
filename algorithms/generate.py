"""`asyncflow generate`: videos from a model folder, with or without an adapter, in this one process."""

from pathlib import Path
from typing import Annotated, Literal

import click
import torch
from msgspec import Meta, Struct

from algorithms.kernels import ConsistencyKernel
from algorithms.prepare import check_model
from algorithms.prompts import read_prompts
from asyncflow.errors import ConfigError
from asyncflow.options import options
from asyncflow.randomness import derive_seed
from asyncflow.video import write_mp4
from engines.adapter import PREFIX, WEIGHTS_FILE
from engines.kernel import LogProbUnits
from engines.policy import load_policy
from engines.rank import pick_device
from engines.rollout import Seeds, rollout
from engines.text import load_text_encoder
from engines.toy import EVAL_PROMPTS, MODEL
from engines.vae import StreamingDecoder, load_vae


class GenerateConfig(Struct, frozen=True, kw_only=True):
    """What to generate, and where to."""

    model: Annotated[str, Meta(description="Diffusers folder of a causal Wan model; empty for the built-in toy.")] = ""
    adapter: Annotated[str, Meta(description="Adapter folder, as a run writes it; empty for the model alone.")] = ""
    prompt: Annotated[tuple[str, ...], Meta(description="A prompt; give it again for several.")] = ()
    prompts: Annotated[str, Meta(description="File of prompts: .txt, .csv or .jsonl.")] = ""
    samples: Annotated[int, Meta(ge=1, description="Videos a prompt.")] = 1
    seed: Annotated[int, Meta(ge=0, description="Seed of the noise.")] = 0
    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="Where the model runs.")] = "auto"
    out: Annotated[str, Meta(description="Folder for the mp4 files.")] = "videos"

    def __post_init__(self) -> None:
        if any(not prompt.strip() for prompt in self.prompt):
            raise ConfigError("--prompt: the prompt is empty; write one")


@click.command("generate")
@options(GenerateConfig)
def main(config: GenerateConfig) -> None:
    """Generate videos from a model folder, with or without an adapter."""
    folder = Path(config.model) if config.model else MODEL
    check_model(folder)
    prompts = [*config.prompt, *(read_prompts(Path(config.prompts)) if config.prompts else [])]
    if not prompts and config.model:
        raise ConfigError("--prompt: nothing to generate; give --prompt TEXT or --prompts FILE")
    prompts = prompts or read_prompts(EVAL_PROMPTS)
    device = pick_device(config.device, 0)
    policy = load_policy(folder, device=device, dtype=torch.bfloat16 if device != "cpu" else torch.float32)
    if config.adapter:
        policy.model.load_lora_adapter(config.adapter, prefix=PREFIX.rstrip("."), weight_name=WEIGHTS_FILE)
    vae = load_vae(folder, device=device)
    encoder = load_text_encoder(folder, policy.settings.text_length, device=device)
    scale = vae.config.scale_factor_spatial
    size = policy.settings.height // scale, policy.settings.width // scale
    kernel = ConsistencyKernel()
    for place, prompt in enumerate(prompts):
        text = encoder.encode([prompt])
        for sample in range(config.samples):
            seeds = Seeds(*(derive_seed(config.seed, place, sample, what) for what in ("initial", "steps")))
            made = rollout(policy, text, [seeds], size, kernel, LogProbUnits(kernel))
            (video,) = StreamingDecoder(vae).decode(made.clean).cpu().numpy()
            path = Path(config.out) / f"{place:03d}-{sample}.mp4"
            write_mp4(path, video, fps=policy.settings.fps)
            click.echo(f"{path}  {prompt}")
