"""What a run's numbers depend on besides its configuration: versions, devices, kernels.

Written into the run's directory by the training loop, at every start.
"""

import platform
from importlib import metadata
from typing import Any

import torch

from algorithms.config import RunConfig
from asyncflow import __version__
from engines.attention import attention_in_use
from engines.policy.load import empty_transformer
from engines.rank import compute_dtype, pick_device

PACKAGES = ("diffusers", "peft", "torch", "transformers")


def environment(config: RunConfig, ranks: int) -> dict[str, Any]:
    """An object for JSON; `attention` is that of the first rank, which always has a policy."""
    devices = [pick_device(config.device, rank) for rank in range(ranks)]
    model = empty_transformer(config.folder).config
    return {
        "asyncflow": __version__,
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(d) if d.startswith("cuda") else platform.machine() for d in devices],
        "threads": torch.get_num_threads(),
        "attention": attention_in_use(
            devices[0], compute_dtype(devices[0]), model.num_attention_heads, model.attention_head_dim
        ),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
