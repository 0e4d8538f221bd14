"""Builds a `Policy` from files: a diffusers folder, or one whose weights are another checkpoint's.

Everything that can be wrong with the files is a `ModelError` here, before any work is done with the model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import init_empty_weights
from diffusers import WanTransformer3DModel
from torch import Tensor

from asyncflow.errors import ModelError
from engines.policy.original import check_names, read_generator, read_lora
from engines.policy.policy import Policy
from engines.policy.settings import CausalSettings, load_settings

SUBFOLDER = "transformer"
DESCRIBED = f"the model that {SUBFOLDER}/config.json describes"


def load_policy(
    folder: Path,
    *,
    checkpoint: Path | None = None,
    base_lora: Path | None = None,
    settings: CausalSettings | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Policy:
    """Load the frozen policy of a diffusers folder (`transformer/`, optional `causal.json`).

    With `checkpoint`, a released Self-Forcing or LongLive `.pt` file, the weights come from it and the folder needs
    only `transformer/config.json`. `base_lora`, LongLive's `lora.pt`, is fused into the weights. `settings` go before
    `causal.json`. Weights are `dtype` but for those that diffusers keeps in float32: norms, time embedding and
    modulation. Raises `ModelError`.
    """
    settings = settings or load_settings(folder)
    model, weights, lora = check_policy(folder, checkpoint=checkpoint, base_lora=base_lora, settings=settings)
    if weights:
        model.load_state_dict(weights, assign=True)
    else:
        model = _from_folder(folder, torch.float32 if lora else dtype)
    for name, (down, up) in lora.items():
        weight = model.get_parameter(f"{name}.weight")
        weight.data = weight.data.float() + up.float() @ down.float()
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        # A memory-mapped tensor keeps the file's alignment, on which the last bits of CPU kernels depend.
        parameter.data = parameter.data.to(torch.float32 if keeps_float32(name) else dtype, copy=True)
    return Policy(model.to(device).eval(), settings)


class Checked(NamedTuple):
    """A model with its parameters on the meta device, and the weights and LoRA of its files, which are not yet read."""

    model: WanTransformer3DModel
    weights: Mapping[str, Tensor]
    lora: Mapping[str, tuple[Tensor, Tensor]]


def check_policy(
    folder: Path, *, checkpoint: Path | None = None, base_lora: Path | None = None, settings: CausalSettings
) -> Checked:
    """All of `load_policy` that needs no data: raises the `ModelError` of files that do not fit."""
    model = empty_transformer(folder)
    _check_supported(folder, model, settings)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    weights = read_generator(checkpoint) if checkpoint else {}
    if checkpoint:
        check_names(checkpoint, DESCRIBED, expected.keys() - weights.keys(), weights.keys() - expected.keys())
        for name, tensor in weights.items():
            _check_shape(checkpoint, name, tensor.shape, expected[name])
    lora = read_lora(base_lora) if base_lora else {}
    if base_lora:
        check_names(base_lora, "a LoRA of this model", (), [name for name in lora if f"{name}.weight" not in expected])
        for name, (down, up) in lora.items():
            _check_shape(base_lora, name, torch.Size((len(up), down.shape[1])), expected[f"{name}.weight"])
    return Checked(model, weights, lora)


def empty_transformer(folder: Path) -> WanTransformer3DModel:
    """The model that `transformer/config.json` describes, its parameters on the meta device. Raises `ModelError`."""
    path = folder / SUBFOLDER / "config.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} is not a diffusers Wan model: {SUBFOLDER}/config.json is missing. "
            "Give a folder such as a download of Wan2.1-T2V-1.3B-Diffusers."
        )
    try:
        config = WanTransformer3DModel.load_config(folder, subfolder=SUBFOLDER, local_files_only=True)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {_first_line(error)}.") from error
    if config.get("_class_name", WanTransformer3DModel.__name__) != WanTransformer3DModel.__name__:
        raise ModelError(f"{folder / SUBFOLDER} holds a {config['_class_name']}; only Wan is trained.")
    with init_empty_weights():
        model: WanTransformer3DModel = WanTransformer3DModel.from_config(config)
    return model


def keeps_float32(name: str) -> bool:
    """Whether diffusers keeps the parameter of that name in float32 whatever the model's dtype."""
    return not set(WanTransformer3DModel._keep_in_fp32_modules).isdisjoint(name.split("."))


def _from_folder(folder: Path, dtype: torch.dtype) -> WanTransformer3DModel:
    try:
        model, info = WanTransformer3DModel.from_pretrained(
            folder, subfolder=SUBFOLDER, torch_dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"The weights in {folder / SUBFOLDER} cannot be loaded: {_first_line(error)}.") from error
    check_names(folder / SUBFOLDER, DESCRIBED, info["missing_keys"], info["unexpected_keys"])
    return model


def _check_shape(path: Path, name: str, found: torch.Size, expected: torch.Size) -> None:
    if found != expected:
        raise ModelError(
            f"{path} is not {DESCRIBED}: its {name} is {list(found)}, expected {list(expected)}; give the files of one "
            "model"
        )


def _check_supported(folder: Path, model: WanTransformer3DModel, settings: CausalSettings) -> None:
    config = model.config
    if config.patch_size[0] != 1 or config.image_dim is not None or config.added_kv_proj_dim is not None:
        raise ModelError(f"{folder} is an image-to-video or temporally patched model; give a text-to-video Wan.")
    if settings.latent_frames > config.rope_max_seq_len:
        raise ModelError(
            f"{folder}: latent_frames is {settings.latent_frames}; the model has {config.rope_max_seq_len} positions."
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
