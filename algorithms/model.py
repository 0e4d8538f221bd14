"""The options of every command that takes a model: its files, and how it is sampled.

Invariant: a key of the sampler that is not given is as the folder's `causal.json` has it, and without that file as
Self-Forcing has it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

from algorithms import presets
from asyncflow.config import toml_key
from asyncflow.errors import ConfigError
from engines.policy import CausalSettings, load_settings
from engines.toy import MODEL


class ModelConfig(Struct, frozen=True, kw_only=True):
    """Which model, and how it is sampled where that is not as its folder says."""

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = presets.PRESETS

    model: Annotated[str, Meta(description="Diffusers folder of a causal Wan model; empty for the built-in toy.")] = ""
    checkpoint: Annotated[
        str, Meta(description="Checkpoint of Self-Forcing or LongLive, instead of the weights in the model's folder.")
    ] = ""
    base_lora: Annotated[
        str, Meta(description="LongLive's own LoRA file, fused into the weights before training adds another.")
    ] = ""
    preset: Annotated[
        presets.Name | None, Meta(description="Published recipe, in place of the defaults of what is not given.")
    ] = None
    frames_per_chunk: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Latent frames a chunk, if not as the model has it.")
    ] = None
    denoising_steps: Annotated[
        tuple[float, ...],
        Meta(description="Timestep of a denoising step, if not the model's; give it for each, noisiest first."),
    ] = ()
    timestep_shift: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="Shift of the denoising steps, if not the model's.")
    ] = None
    local_attn_size: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(
            description="Latent frames that a chunk attends to, itself and the sink included, if not as the model has "
            "it; -1 for all before it."
        ),
    ] = None
    sink_size: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="First latent frames that every chunk attends to, if not as the model has it."),
    ] = None
    latent_frames: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Latent frames a clip, if not as the model has it.")
    ] = None
    height: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Height of the video in pixels, if not the model's.")
    ] = None
    width: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Width of the video in pixels, if not the model's.")
    ] = None

    def __post_init__(self) -> None:
        for name in ("checkpoint", "base_lora", "preset"):
            if getattr(self, name) and not self.model:
                raise ConfigError(
                    f"--{toml_key(name)}: give --model as well, a Wan folder with text encoder and VAE; the built-in "
                    "toy goes without"
                )

    @property
    def folder(self) -> Path:
        """The folder of the model, which may be the toy's."""
        return Path(self.model) if self.model else MODEL

    @property
    def weights(self) -> dict[str, Path | None]:
        """The files that `load_policy` reads besides, as its keywords."""
        return {name: Path(file) if (file := getattr(self, name)) else None for name in ("checkpoint", "base_lora")}

    def settings(self) -> CausalSettings:
        """How the model is sampled. Raises ModelError and ConfigError where it cannot be."""
        own = {name: getattr(self, name, None) for name in CausalSettings.__struct_fields__}
        given = {name: value for name, value in own.items() if value not in (None, ())}
        try:
            return msgspec.structs.replace(load_settings(self.folder), **given)
        except ValueError as error:
            raise ConfigError(f"{', '.join(f'--{toml_key(name)}' for name in given)}: {error}") from None
