"""The processes that vLLM starts: in what environment, and until when.

Invariant: they learn nothing of torchrun, this process's environment is afterwards what it was, and they end with this
process, however that ends. vLLM itself does not watch its parent; it calls `tie` in each of its processes, as the entry
point of its plugins in setup.cfg.
"""

import multiprocessing
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asyncflow.liveness import die_with_parent

OWNER = "ASYNCFLOW_VLLM_OWNER"
"""The environment variable with the process whose end is theirs; without it `tie` does nothing."""
PLUGIN = "asyncflow"
"""The entry point's name."""

_LAUNCHERS = re.compile(
    r"((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|TORCH_NCCL_\w+|VLLM_DP_\w+"
    r"|OMP_NUM_THREADS"
)
"""What torchrun sets for a rank. vLLM would take it for itself: ranks of its own, or one thread for the whole model."""
_QUIETER = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
"""Unless the user has it otherwise: a rank says what went wrong, and nobody else is told."""


@contextmanager
def own_environment(device: torch.device) -> Iterator[None]:
    """What is started meanwhile finds an environment for vLLM on `device`, alone on a host as it were."""
    before = dict(os.environ)
    for name in filter(_LAUNCHERS.fullmatch, before):
        del os.environ[name]
    for name, value in _QUIETER.items():
        os.environ.setdefault(name, value)
    os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", OWNER: str(os.getpid())}
    if plugins := before.get("VLLM_PLUGINS"):
        os.environ["VLLM_PLUGINS"] = f"{plugins},{PLUGIN}"
    if device.type == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = _physical(device.index or 0, before.get("CUDA_VISIBLE_DEVICES"))
    try:
        yield
    finally:  # vLLM also sets some
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ |= {name: value for name, value in before.items() if os.environ.get(name) != value}


def tie() -> None:
    """End with the process that started this one, and leave its group, where Ctrl-C would end this one before it."""
    owner = os.environ.get(OWNER)
    if owner is None or int(owner) == os.getpid():
        return
    os.setpgid(0, 0)
    die_with_parent()
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():  # it ended before
        os._exit(1)


def _physical(index: int, visible: str | None) -> str:
    """The name of the GPU that this process knows by `index`."""
    return visible.split(",")[index] if visible else str(index)
