"""Tensors between ranks of one host through anonymous shared memory: one copy in, none out.

The sender fills a fresh `memfd`, which has no name that a crash could leave behind and no mount that could be too
small, and passes its descriptor with a frame over a Unix socket; the receiver maps it. The memory lives as long as that
tensor. A sender waits while more of its bytes than a budget are on their way; received ones count no more. That cannot
deadlock: when all numbers below one have arrived, its sender has nothing on its way and need not wait.
"""

import math
import os
import select
import socket
from datetime import timedelta

import msgspec
import torch
from torch.distributed import Store

from asyncflow.channels.base import Frame, dtype_of, header_of
from asyncflow.errors import RankLost, TransferError
from asyncflow.wire import Header

_MESSAGE = 65536
_LEAST = 1 << 25
"""What a transfer counts at least: a user may have about a thousand descriptors on their way, and each takes two."""


class SharedMemoryChannel:
    """A channel over one Unix socket for each pair of ranks, in the abstract namespace: no file to clean up."""

    def __init__(self, rank: int, ranks: int, store: Store, timeout: float = 60.0, budget: int = 1 << 30) -> None:
        """Connect to all other ranks through addresses in `store`; every rank must do so within `timeout` seconds.

        `budget` bounds the bytes that this rank has sent and nobody has received; a larger tensor travels alone.
        """
        self.rank, self.device = rank, torch.device("cpu")
        self._budget = budget
        self._on_their_way = 0
        self._received = os.eventfd(0, os.EFD_CLOEXEC)
        """Receivers add to it what they took from this rank."""
        self._peers: dict[int, socket.socket] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Frame).decode
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # the kernel picks a free abstract address
            listener.listen(ranks)
            listener.settimeout(timeout)
            store.set(f"channel/{rank}", listener.getsockname())
            try:
                for other in range(rank):
                    store.wait([f"channel/{other}"], timedelta(seconds=timeout))
                    peer = self._peers[other] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    peer.connect(store.get(f"channel/{other}"))
                    peer.send(str(rank).encode())
                while len(self._peers) < ranks - 1:
                    peer, _address = listener.accept()
                    self._peers[int(peer.recv(_MESSAGE))] = peer
            except (OSError, RuntimeError) as error:
                self.close()
                missing = sorted(set(range(ranks)) - {rank, *self._peers})
                raise RankLost(f"ranks {missing} did not connect to rank {rank} within {timeout:g} seconds") from error

    def send(self, sequence: int, target: int, tensor: torch.Tensor) -> None:
        """See `Channel`. Raises TransferError if there is no memory for a copy."""
        frame = self._encode(Frame(sequence, header_of(tensor)))
        counted = max(tensor.nbytes, _LEAST)
        self._wait_for_room(counted)
        memory = os.memfd_create("asyncflow", os.MFD_CLOEXEC)
        try:
            try:
                with open(memory, "wb", closefd=False) as file:  # not mapped: a full memory is an error, not a signal
                    file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            except OSError as error:
                raise TransferError(
                    f"transfer {sequence} to rank {target} needs {tensor.nbytes} bytes of shared memory, and the host "
                    f"does not give them ({error}): free memory, raise the limit, or use fewer ranks"
                ) from error
            try:
                socket.send_fds(self._peers[target], [frame], [memory, self._received])
            except OSError as error:
                raise RankLost(f"rank {target} is gone: transfer {sequence} to it failed ({error})") from error
        finally:
            os.close(memory)
        self._on_their_way += counted

    def receive(self, sequence: int, source: int, header: Header) -> torch.Tensor:
        """See `Channel`."""
        try:
            peer, flags = self._peers[source], socket.MSG_CMSG_CLOEXEC
            body, descriptors, _flags, _address = socket.recv_fds(peer, _MESSAGE, 2, flags)
        except OSError as error:
            raise RankLost(f"rank {source} is gone: transfer {sequence} from it failed ({error})") from error
        if not body:
            raise RankLost(f"rank {source} is gone: it hung up before transfer {sequence}")
        try:
            if len(descriptors) < 2:
                raise TransferError(f"rank {self.rank} has no free file descriptor for a transfer: raise `ulimit -n`")
            self._decode(body).expect(Frame(sequence, header), source)
            memory, received = descriptors
            tensor = _mapped(memory, header)
            os.eventfd_write(received, max(tensor.nbytes, _LEAST))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return tensor

    def close(self) -> None:
        """See `Channel`."""
        os.close(self._received)
        for peer in self._peers.values():
            peer.close()

    def _wait_for_room(self, counted: int) -> None:
        """Block until the bytes fit the budget, or nothing is on its way. Raises RankLost if a rank hangs up."""
        poll = select.poll()
        poll.register(self._received, select.POLLIN)
        ranks = {peer.fileno(): rank for rank, peer in self._peers.items()}
        for descriptor in ranks:
            poll.register(descriptor, 0)  # hanging up is always told
        while self._on_their_way and self._on_their_way + counted > self._budget:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._received in ready:
                self._on_their_way -= os.eventfd_read(self._received)
            else:
                lost = ranks[min(ready)]
                raise RankLost(f"rank {lost} is gone: it hung up while rank {self.rank} waited for room to send")


def _mapped(memory: int, header: Header) -> torch.Tensor:
    """The tensor that fills a file of that descriptor. It keeps the memory, and, mapped by torch, no descriptor."""
    size, dtype = math.prod(header.shape), dtype_of(header)
    if not size:  # cannot be mapped
        return torch.empty(header.shape, dtype=dtype)
    return torch.from_file(f"/proc/self/fd/{memory}", shared=True, size=size, dtype=dtype).view(header.shape)
