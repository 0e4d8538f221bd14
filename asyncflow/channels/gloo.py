"""Tensors between ranks through torch.distributed's gloo backend.

One process group; the sequence number is the tag. Sends are rendezvous: one returns when its receiver has it. A receive
buffer smaller than the message would abort the process, hence the header that comes first, with the control message.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from asyncflow.channels.base import dtype_of
from asyncflow.errors import RankLost
from asyncflow.wire import Header


class GlooChannel:
    """A channel over the default process group, which it makes and destroys."""

    def __init__(self, rank: int, ranks: int, store: dist.Store, timeout: float = 1800.0) -> None:
        """Join the group through `store`; every rank must do so. `timeout` in seconds bounds one transfer."""
        self.rank = rank
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host, whatever its name resolves to
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))

    def send(self, sequence: int, target: int, tensor: torch.Tensor) -> None:
        """See `Channel`."""
        try:
            dist.send(tensor.contiguous(), target, tag=sequence)
        except RuntimeError as error:
            raise RankLost(f"rank {target} is gone or stuck: transfer {sequence} to it failed ({error})") from error

    def receive(self, sequence: int, source: int, header: Header) -> torch.Tensor:
        """See `Channel`."""
        tensor = torch.empty(header.shape, dtype=dtype_of(header))
        try:
            dist.recv(tensor, source, tag=sequence)
        except RuntimeError as error:
            raise RankLost(f"rank {source} is gone or stuck: transfer {sequence} from it failed ({error})") from error
        return tensor

    def close(self) -> None:
        """See `Channel`."""
        dist.destroy_process_group()
