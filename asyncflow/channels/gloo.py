"""Tensors between ranks through torch.distributed's gloo backend: on the host, over TCP."""

import os

import torch
from torch.distributed import Store

from asyncflow.channels.distributed import DistributedChannel, join


class GlooChannel(DistributedChannel):
    """A channel over the default process group, which it makes and destroys."""

    def __init__(self, rank: int, ranks: int, store: Store, timeout: float = 1800.0) -> None:
        """See `join`."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host, whatever its name resolves to
        device = torch.device("cpu")
        join("gloo", rank, ranks, store, timeout, device)
        super().__init__(rank, device)
