"""How fast tensors get from rank to rank, one way, header included: each channel, and plain TCP beside them.

Half of a round trip between two processes, so that one clock is enough. The transports take turns, so that whatever
else the machine does falls on all of them.
"""

import multiprocessing
import socket
import time
from collections import defaultdict
from pathlib import Path

import click
import torch
from torch.distributed import Store, TCPStore

from asyncflow.channels.base import Channel, header_of
from asyncflow.channels.gloo import GlooChannel
from asyncflow.channels.shared_memory import SharedMemoryChannel
from asyncflow.wire import Header
from bench.table import report, spread

SIZES = {"1 KB": 1 << 10, "64 KB": 1 << 16, "4 MB": 4 << 20, "100 MB": 100 << 20}


class TcpChannel:
    """The least that TCP can do: a number, the bytes, and fresh memory to receive them in."""

    device = torch.device("cpu")

    def __init__(self, rank: int, store: Store) -> None:
        self.rank = rank
        if rank:
            self._peer = socket.create_connection(("127.0.0.1", int(store.get("port"))))
        else:
            with socket.create_server(("127.0.0.1", 0)) as server:
                store.set("port", str(server.getsockname()[1]))
                self._peer, _ = server.accept()
        self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, sequence: int, target: int, tensor: torch.Tensor) -> None:
        """See `Channel`."""
        self._peer.sendall(sequence.to_bytes(8, "big"))
        self._peer.sendall(tensor.numpy().data)

    def receive(self, sequence: int, source: int, header: Header) -> torch.Tensor:
        """See `Channel`."""
        came = self._peer.recv(8, socket.MSG_WAITALL)
        assert int.from_bytes(came, "big") == sequence
        tensor = torch.empty(header.shape, dtype=torch.uint8)
        received = self._peer.recv_into(tensor.numpy().data, 0, socket.MSG_WAITALL)
        assert received == tensor.nbytes
        return tensor

    def close(self) -> None:
        """See `Channel`."""
        self._peer.close()


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="File to write the table to.")
@click.option("--repeats", default=30, show_default=True, help="Round trips of each size.")
def transport(json_file: Path | None, repeats: int) -> None:
    """Transfers between two ranks of this host. A view is not read; a copy is, into memory of the receiver's own."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = multiprocessing.get_context("spawn").Process(target=_echo, args=(store.port, repeats))
    other.start()
    times = _exchange(0, store, repeats)
    other.join()
    rows = []
    for (size, name), samples in times.items():
        measured = spread(samples)
        rows.append({"size": size, "transport": name, "n": measured.pop("n")}
                    | {f"ms {key}": value for key, value in measured.items()})  # fmt: skip
    report("transport: milliseconds one way", rows, json_file)


def _echo(port: int, repeats: int) -> None:
    _exchange(1, TCPStore("127.0.0.1", port, is_master=False), repeats)


def _exchange(rank: int, store: Store, repeats: int) -> dict[tuple[str, str], list[float]]:
    """Send tensors to and fro over all transports; the milliseconds of half a round trip, by size and transport."""
    torch.set_num_threads(1)
    shared_memory, gloo, tcp = SharedMemoryChannel(rank, 2, store), GlooChannel(rank, 2, store), TcpChannel(rank, store)
    transports: dict[str, tuple[Channel, bool]] = {
        "shared memory, view": (shared_memory, False),
        "shared memory, copy": (shared_memory, True),
        "gloo": (gloo, False),
        "TCP": (tcp, False),
    }
    times = defaultdict(list)
    number = 0
    for size, nbytes in SIZES.items():
        tensor = torch.ones(nbytes, dtype=torch.uint8)
        for _ in range(repeats):
            for name, (channel, copied) in transports.items():
                began = time.perf_counter()
                for sender in (0, 1):
                    number += 1
                    if rank == sender:
                        channel.send(number, 1 - rank, tensor)
                    else:
                        came = channel.receive(number, 1 - rank, header_of(tensor))
                        if copied:
                            came.clone()
                times[size, name].append((time.perf_counter() - began) * 1e3 / 2)
    for channel in (shared_memory, gloo, tcp):
        channel.close()
    return times
