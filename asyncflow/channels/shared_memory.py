"""Tensors between ranks of one host through anonymous shared memory: one copy in, none out.

The sender fills a fresh `memfd`, which has no name that a crash could leave behind, and passes its descriptor with a
header over a Unix socket; the receiver maps it and returns a view. The memory lives as long as that tensor.
"""

import mmap
import os
import socket
from datetime import timedelta

import msgspec
import torch
from torch.distributed import Store

from asyncflow.channels.base import dtype_of, header_of
from asyncflow.errors import RankLost, TransferError
from asyncflow.wire import Header

_MESSAGE = 65536


class Frame(msgspec.Struct, frozen=True):
    """What travels beside the descriptor."""

    sequence: int
    header: Header


class SharedMemoryChannel:
    """A channel over one Unix socket for each pair of ranks, in the abstract namespace: no file to clean up."""

    def __init__(self, rank: int, ranks: int, store: Store, timeout: float = 60.0) -> None:
        """Connect to all other ranks through addresses in `store`; every rank must do so within `timeout` seconds."""
        self.rank = rank
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
        """See `Channel`."""
        frame = self._encode(Frame(sequence, header_of(tensor)))
        descriptor = os.memfd_create("asyncflow", os.MFD_CLOEXEC)
        try:
            if tensor.nbytes:
                os.ftruncate(descriptor, tensor.nbytes)
                with mmap.mmap(descriptor, tensor.nbytes) as memory:
                    torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
            try:
                socket.send_fds(self._peers[target], [frame], [descriptor])
            except OSError as error:
                raise RankLost(f"rank {target} is gone: transfer {sequence} to it failed ({error})") from error
        finally:
            os.close(descriptor)

    def receive(self, sequence: int, source: int, header: Header) -> torch.Tensor:
        """See `Channel`."""
        try:
            body, descriptors, _flags, _address = socket.recv_fds(self._peers[source], _MESSAGE, 1)
        except OSError as error:
            raise RankLost(f"rank {source} is gone: transfer {sequence} from it failed ({error})") from error
        if not body:
            raise RankLost(f"rank {source} is gone: it hung up before transfer {sequence}")
        (descriptor,) = descriptors
        try:
            frame = self._decode(body)
            if frame != Frame(sequence, header):
                raise TransferError(f"rank {source} sent {frame} where transfer {sequence} with {header} was due")
            size = os.fstat(descriptor).st_size
            if not size:
                return torch.empty(header.shape, dtype=dtype_of(header))
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        return torch.frombuffer(memory, dtype=dtype_of(header)).view(header.shape)

    def close(self) -> None:
        """See `Channel`."""
        for peer in self._peers.values():
            peer.close()
