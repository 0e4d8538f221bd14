"""Builds a `Policy` from files: a diffusers folder, or a Self-Forcing checkpoint beside such a folder's configuration.

Everything that can be wrong with the files is a `ModelError` here, before any work is done with the model.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from torch import Tensor

from asyncflow.errors import ModelError
from engines.policy.policy import Policy
from engines.policy.settings import CausalSettings, load_settings

SUBFOLDER = "transformer"
# The released checkpoints hold several networks; the averaged generator is the one that was evaluated.
CHECKPOINT_PARTS = ("generator_ema", "generator")


def load_policy(
    folder: Path,
    *,
    checkpoint: Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Policy:
    """Load the frozen policy of a diffusers folder (`transformer/`, optional `causal.json`).

    With `checkpoint`, a released Self-Forcing `.pt` file, the weights come from it and the folder needs only
    `transformer/config.json`. Raises `ModelError`.
    """
    if not (folder / SUBFOLDER / "config.json").is_file():
        raise ModelError(
            f"{folder} is not a diffusers Wan model: {SUBFOLDER}/config.json is missing. "
            "Give a folder such as a download of Wan2.1-T2V-1.3B-Diffusers."
        )
    settings = load_settings(folder)
    try:
        config = WanTransformer3DModel.load_config(folder, subfolder=SUBFOLDER, local_files_only=True)
    except OSError as error:
        raise ModelError(f"{folder / SUBFOLDER / 'config.json'} cannot be read: {_first_line(error)}.") from error
    if config.get("_class_name", WanTransformer3DModel.__name__) != WanTransformer3DModel.__name__:
        raise ModelError(f"{folder / SUBFOLDER} holds a {config['_class_name']}; only Wan is trained.")
    model = _from_folder(folder, dtype) if checkpoint is None else _from_checkpoint(checkpoint, config, dtype)
    _check_supported(folder, model, settings)
    model.requires_grad_(False)
    for parameter in model.parameters():
        # A memory-mapped tensor keeps the file's alignment, on which the last bits of CPU kernels depend.
        parameter.data = parameter.data.clone()
    return Policy(model.to(device).eval(), settings)


def _from_folder(folder: Path, dtype: torch.dtype) -> WanTransformer3DModel:
    try:
        model, info = WanTransformer3DModel.from_pretrained(
            folder, subfolder=SUBFOLDER, torch_dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"The weights in {folder / SUBFOLDER} cannot be loaded: {_first_line(error)}.") from error
    wrong = [*info["missing_keys"], *info["unexpected_keys"]]
    if wrong:
        raise ModelError(
            f"The weights in {folder / SUBFOLDER} do not fit its config.json: {len(wrong)} tensors such as {wrong[0]} "
            "are missing or unknown. Download the model again."
        )
    return model


def _from_checkpoint(path: Path, config: dict[str, Any], dtype: torch.dtype) -> WanTransformer3DModel:
    try:
        parts = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ModelError(f"{path} cannot be read as a PyTorch checkpoint: {_first_line(error)}.") from error
    part = next((name for name in CHECKPOINT_PARTS if name in parts), None) if isinstance(parts, dict) else None
    if part is None:
        raise ModelError(f"{path} holds none of {', '.join(CHECKPOINT_PARTS)}; expected a Self-Forcing checkpoint.")
    original: dict[str, Tensor] = {
        name.replace("_fsdp_wrapped_module.", "").removeprefix("model."): tensor for name, tensor in parts[part].items()
    }
    model = WanTransformer3DModel.from_config(config)
    try:
        model.load_state_dict(convert_wan_transformer_to_diffusers(original), strict=True)
    except RuntimeError as error:
        raise ModelError(
            f"{path} does not fit the folder's {SUBFOLDER}/config.json: {' '.join(str(error).split())[:300]}"
        ) from error
    return model.to(dtype)


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
