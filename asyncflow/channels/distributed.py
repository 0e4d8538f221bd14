"""What gloo and NCCL share: tensors between ranks through torch.distributed, whose sends are rendezvous.

A frame of fixed size goes before each tensor, and the receiver compares it with what is due before it makes room:
gloo aborts the process, and NCCL hangs, when a message is larger than its buffer. Nothing is cancelled and nothing
left behind: whoever gives up a transfer leaves it to run, since a wait that times out ends the pair for good.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import msgspec
import torch
import torch.distributed as dist

from asyncflow.channels.base import Frame, dtype_of, header_of
from asyncflow.errors import RankLost
from asyncflow.wire import Header

_FRAME_BYTES = 512


class Calls(Protocol):
    """The calls into torch.distributed, which is one such object; tests have a stricter one."""

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send to rank `dst`. gloo blocks until it is received, NCCL blocks the current stream."""

    def recv(self, tensor: torch.Tensor, src: int) -> int:
        """Receive what rank `src` sends next into `tensor`, as `send` blocks."""

    def destroy_process_group(self) -> None:
        """Leave."""


class DistributedChannel:
    """A channel whose tensors travel on `device`, between ranks that have joined the default process group."""

    def __init__(self, rank: int, device: torch.device, calls: Calls = dist) -> None:
        self.rank, self.device = rank, device
        self._calls = calls

    def send(self, sequence: int, target: int, tensor: torch.Tensor) -> None:
        """See `Channel`."""
        body = msgspec.json.encode(Frame(sequence, header_of(tensor))).ljust(_FRAME_BYTES)
        assert len(body) == _FRAME_BYTES, f"{header_of(tensor)} does not fit a frame"
        self._launch(self._calls.send, torch.frombuffer(bytearray(body), dtype=torch.uint8), target, sequence)
        self._launch(self._calls.send, tensor.contiguous(), target, sequence)

    def receive(self, sequence: int, source: int, header: Header) -> torch.Tensor:
        """See `Channel`."""
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8, device=self.device)
        self._launch(self._calls.recv, frame, source, sequence)
        came = msgspec.json.decode(frame.cpu().numpy().tobytes(), type=Frame)
        came.expect(Frame(sequence, header), source)
        tensor = torch.empty(header.shape, dtype=dtype_of(header), device=self.device)
        self._launch(self._calls.recv, tensor, source, sequence)
        return tensor.cpu() if header.device == "cpu" else tensor

    def _launch(
        self, call: Callable[[torch.Tensor, int], object], tensor: torch.Tensor, other: int, sequence: int
    ) -> None:
        if not tensor.numel():  # its frame said it all
            return
        tensor = tensor.to(self.device)
        try:
            call(tensor, other)
        except RuntimeError as error:
            raise RankLost(f"rank {other} is gone or stuck: transfer {sequence} failed ({error})") from error

    def close(self) -> None:
        """See `Channel`."""
        self._calls.destroy_process_group()


def join(backend: str, rank: int, ranks: int, store: dist.Store, timeout: float, device: torch.device) -> None:
    """Make the default process group through `store`; every rank must do so. Raises RankLost if one does not.

    `timeout`, in seconds, also bounds every transfer. On a GPU one communicator is made at once for all pairs.
    """
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout),
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as error:
        raise RankLost(f"rank {rank} could not join the other ranks over {backend} ({error})") from error
