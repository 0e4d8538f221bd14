"""What every channel offers, and what is the same for all of them.

Contract: all calls come from the rank's one communication thread, in increasing sequence number; a send may block until
its receiver has launched the same number. Only point to point calls differ between channels: a sum over ranks is made
of them in a fixed order, so that its bits do not depend on the channel.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from asyncflow.wire import Header


class Channel(Protocol):
    """Blocking, ordered, point to point."""

    rank: int

    def send(self, sequence: int, target: int, tensor: torch.Tensor) -> None:
        """Hand `tensor` (dense, on the host) to rank `target` as transfer `sequence`."""

    def receive(self, sequence: int, source: int, header: Header) -> torch.Tensor:
        """The tensor of transfer `sequence`. Raises RankLost if `source` is gone, TransferError if another came."""

    def close(self) -> None:
        """Give everything back; no transfer may be on its way."""


def sum_over_ranks(channel: Channel, sequence: int, ranks: Sequence[int], tensor: torch.Tensor) -> torch.Tensor:
    """The sum of `tensor` over `ranks`, added in rank order on the first and sent back: the same bits on all."""
    root, *others = sorted(ranks)
    if channel.rank != root:
        channel.send(sequence, root, tensor)
        return channel.receive(sequence, root, header_of(tensor))
    total = tensor.clone()
    for other in others:
        total += channel.receive(sequence, other, header_of(tensor))
    for other in others:
        channel.send(sequence, other, total)
    return total


def header_of(tensor: torch.Tensor) -> Header:
    """The header that describes `tensor`."""
    return Header(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def dtype_of(header: Header) -> torch.dtype:
    """The torch dtype that a header names."""
    dtype = getattr(torch, header.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
