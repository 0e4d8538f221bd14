"""Tensors between ranks through torch.distributed's NCCL backend, from GPU to GPU. It has not been run on GPUs.

All that it adds to the channel over gloo is which group is made: one communicator for all ranks, made at once, on which
NCCL runs what a rank launches in turn. It demands one order of launches on all devices, which the one sequence is.
"""

import torch
from torch.distributed import Store

from asyncflow.channels.distributed import DistributedChannel, join


class NcclChannel(DistributedChannel):
    """A channel over the default process group, which it makes and destroys; rank `rank` has the GPU of that number."""

    def __init__(self, rank: int, ranks: int, store: Store, timeout: float = 1800.0) -> None:
        """See `join`."""
        device = torch.device("cuda", rank)
        join("nccl", rank, ranks, store, timeout, device)
        super().__init__(rank, device)
