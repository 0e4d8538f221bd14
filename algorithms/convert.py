"""`asyncflow convert`: a model of any form that `--model` and its companions take, as one diffusers folder.

Invariant: the folder appears whole or not at all, and needs no other option than `--model` afterwards.
"""

import shutil
from pathlib import Path
from typing import Annotated

import click
import msgspec
from diffusers import WanTransformer3DModel
from msgspec import Meta

from algorithms.model import ModelConfig
from algorithms.prepare import MODEL_PARTS, check_model
from asyncflow.errors import ConfigError
from asyncflow.options import options
from engines.policy import load_policy
from engines.policy.load import SUBFOLDER
from engines.policy.settings import FILE_NAME

OPTIONAL_PARTS = ("scheduler", "model_index.json")
"""What a stock `WanPipeline` reads besides."""


class ConvertConfig(ModelConfig, frozen=True, kw_only=True):
    """What to convert, and where to."""

    out: Annotated[str, Meta(description="Folder to write, which must not be there yet.")] = ""


@click.command("convert")
@options(ConvertConfig)
def main(config: ConvertConfig) -> None:
    """Write a checkpoint with its Wan folder, its LoRA and its sampler as one diffusers folder, in float32."""
    for name in ("model", "out"):
        if not getattr(config, name):
            raise ConfigError(f"--{name}: give a folder, the Wan folder to read and the one to write")
    check_model(config.folder)
    out = Path(config.out)
    if out.exists():
        raise ConfigError(f"--out: {out} is there already; choose another folder")
    policy = load_policy(config.folder, **config.weights, settings=config.settings())
    try:
        write_folder(out, config.folder, policy.model, msgspec.json.encode(policy.settings))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--out: cannot write {out}: {reason}; make room, or choose another folder") from None
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    click.echo(f"{out}: {parameters:,} parameters; train it with --model {out}")


def write_folder(out: Path, source: Path, model: WanTransformer3DModel, settings: bytes) -> None:
    """Write `out` with this transformer and `causal.json`, and the other parts of `source`. Raises OSError."""
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    try:
        partial.mkdir(parents=True)
        for part in (*MODEL_PARTS, *OPTIONAL_PARTS):
            if (source / part).is_dir() and part != SUBFOLDER:
                shutil.copytree(source / part, partial / part)
            elif (source / part).is_file():
                shutil.copy(source / part, partial / part)
        model.save_pretrained(partial / SUBFOLDER)
        (partial / FILE_NAME).write_bytes(settings)
        partial.rename(out)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
