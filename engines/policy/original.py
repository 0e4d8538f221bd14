"""Checkpoints in the layout of Wan's original code, read with the names of diffusers: Self-Forcing's and LongLive's.

They are read with `weights_only`, so that no code in a file is run. Called by `load`.
"""

import pickle
from collections.abc import Iterable
from pathlib import Path

import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from torch import Tensor

from asyncflow.errors import ModelError

GENERATORS = ("generator_ema", "generator")
"""A released checkpoint holds several networks; the averaged generator is the one that was evaluated."""

EXPECTED = "expected a Self-Forcing or LongLive checkpoint"
LORA = "generator_lora"
WRAPPER = "_fsdp_wrapped_module."
"""What FSDP leaves in the names of a checkpoint that was saved from within it."""

PREFIXES = ("base_model.model.", "model.")
SHOWN = 3
"""How many names an error shows of those that are wrong."""


def read_generator(path: Path) -> dict[str, Tensor]:
    """The weights of a Self-Forcing or LongLive `.pt` file. Raises `ModelError` where there are none."""
    parts = _read(path)
    part = next((name for name in GENERATORS if name in parts), None)
    if part is None:
        raise ModelError(f"{path} holds none of {', '.join(GENERATORS)}; {EXPECTED}")
    return _renamed(path, parts[part])


def read_lora(path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """The factors A [rank, in] and B [out, rank] of each linear in LongLive's LoRA file, by the linear's name.

    Its alpha is its rank, so what it adds to a weight is B A. Raises `ModelError` where it is no such file.
    """
    parts = _read(path)
    if LORA not in parts:
        raise ModelError(f"{path} holds no {LORA}; expected LongLive's lora.pt")
    factors = _renamed(path, parts[LORA])
    linears = {name.partition(".lora_")[0] for name in factors}
    wanted = {f"{linear}.lora_{factor}.weight" for linear in linears for factor in "AB"}
    if not linears:
        raise ModelError(f"{path} holds an empty LoRA; download it again")
    check_names(path, "a LoRA", wanted - factors.keys(), factors.keys() - wanted)
    pairs = {name: (factors[f"{name}.lora_A.weight"], factors[f"{name}.lora_B.weight"]) for name in sorted(linears)}
    for name, (down, up) in pairs.items():
        if down.ndim != 2 or up.ndim != 2 or len(down) != up.shape[1]:
            raise ModelError(f"{path} holds no LoRA of {name}: its factors are {list(down.shape)} and {list(up.shape)}")
    return pairs


def check_names(path: Path, what: str, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raises `ModelError` if there are any such tensors, with a few of each and how many there are."""
    kinds = {"missing": sorted(missing), "unexpected": sorted(unexpected)}
    wrong = [
        f"{len(names)} {kind} ({', '.join([*names[:SHOWN], *(['...'] if names[SHOWN:] else [])])})"
        for kind, names in kinds.items()
        if names
    ]
    if wrong:
        raise ModelError(
            f"{path} is not {what}, by its tensors: {' and '.join(wrong)}; download it again, or give the files of one "
            "model"
        )


def _read(path: Path) -> dict[str, dict[str, Tensor]]:
    try:
        parts = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ModelError(f"{path} cannot be read as a PyTorch checkpoint: {reason}") from error
    return parts if isinstance(parts, dict) else {}


def _renamed(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by diffusers' names, prefixes gone."""
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ModelError(f"{path} holds no tensors by name; {EXPECTED}")
    plain = {}
    for name, tensor in tensors.items():
        bare = name.replace(WRAPPER, "")
        for prefix in PREFIXES:
            bare = bare.removeprefix(prefix)
        plain[bare] = tensor
    renamed: dict[str, Tensor] = convert_wan_transformer_to_diffusers(plain)
    return renamed
