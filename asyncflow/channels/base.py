"""What every channel offers, and what is the same for all of them.

Contract: all calls come from the rank's one communication thread, in increasing sequence number; a send may block until
its receiver has launched the same number. Only point to point calls differ between channels: a sum over ranks is made
of them in a fixed order, so that its bits do not depend on the channel.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
import torch

from asyncflow.errors import TransferError
from asyncflow.wire import Header


class Channel(Protocol):
    """Blocking, ordered, point to point."""

    rank: int
    device: torch.device
    """Where tensors lie when they travel."""

    def send(self, sequence: int, target: int, tensor: torch.Tensor) -> None:
        """Hand `tensor`, of any device, to rank `target` as transfer `sequence`. Raises RankLost if that is gone."""

    def receive(self, sequence: int, source: int, header: Header) -> torch.Tensor:
        """The tensor of transfer `sequence`: on `device` if it was on one like it, else on the host.

        Raises RankLost if `source` is gone, TransferError if another came.
        """

    def close(self) -> None:
        """Give everything back; no transfer may be on its way."""


class Frame(msgspec.Struct, frozen=True):
    """What announces a tensor: its receiver compares it with what is due before it takes a byte."""

    sequence: int
    header: Header

    def expect(self, due: "Frame", source: int) -> None:
        """Raise TransferError unless this is the frame that is due from rank `source`."""
        if self != due:
            raise TransferError(
                f"rank {source} sent {self} where transfer {due.sequence} with {due.header} was due; "
                "tensors that ranks sum must look alike"
            )


def sum_over_ranks(channel: Channel, sequence: int, ranks: Sequence[int], tensor: torch.Tensor) -> torch.Tensor:
    """The sum of `tensor` over `ranks`, on its device: added in rank order on the first, sent back, the same bits."""
    root, *others = sorted(ranks)
    if channel.rank != root:
        channel.send(sequence, root, tensor)
        return channel.receive(sequence, root, header_of(tensor)).to(tensor.device)
    total = tensor.clone()
    for other in others:
        total += channel.receive(sequence, other, header_of(tensor)).to(tensor.device)
    for other in others:
        channel.send(sequence, other, total)
    return total


def header_of(tensor: torch.Tensor) -> Header:
    """The header that describes `tensor`."""
    return Header(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.device.type)


def dtype_of(header: Header) -> torch.dtype:
    """The torch dtype that a header names."""
    dtype = getattr(torch, header.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
