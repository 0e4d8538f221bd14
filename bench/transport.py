"""How fast tensors get from rank to rank: one way, header included, for both channels."""

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import click
import torch
import torch.distributed as dist

from asyncflow.channels.base import Channel, header_of
from asyncflow.channels.gloo import GlooChannel
from asyncflow.channels.shared_memory import SharedMemoryChannel
from bench.table import report, spread

CHANNELS = {"shared-memory": SharedMemoryChannel, "gloo": GlooChannel}
SIZES = {"1 KB": 1 << 10, "4 MB": 4 << 20, "100 MB": 100 << 20}


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="File to write the table to.")
@click.option("--repeats", default=20, show_default=True, help="Transfers of each size.")
def transport(json_file: Path | None, repeats: int) -> None:
    """Transfers between two ranks of this host; a round trip's half, so that one clock is enough."""
    rows = []
    for name in CHANNELS:
        context = multiprocessing.get_context("spawn")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mine, theirs = context.Pipe()
        other = context.Process(target=_echo, args=(name, store.port, repeats, theirs))
        other.start()
        channel = CHANNELS[name](0, 2, store)
        for label, nbytes in SIZES.items():
            times = spread(_halves(channel, nbytes, repeats, first=list(SIZES).index(label)))
            rows.append({"channel": name, "size": label}
                        | {f"ms {key}" if key != "n" else key: value for key, value in times.items()})
        mine.recv()
        other.join()
        channel.close()
    report("transport: milliseconds one way", rows, json_file)


def _halves(channel: Channel, nbytes: int, repeats: int, first: int) -> list[float]:
    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    times = []
    for repeat in range(repeats):
        number = 2 * (first * repeats + repeat) + 1
        began = time.perf_counter()
        channel.send(number, 1, tensor)
        channel.receive(number + 1, 1, header_of(tensor))
        times.append((time.perf_counter() - began) * 1e3 / 2)
    return times


def _echo(name: str, port: int, repeats: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    channel = CHANNELS[name](1, 2, dist.TCPStore("127.0.0.1", port, is_master=False))
    number = 1
    for nbytes in SIZES.values():
        header = header_of(torch.zeros(nbytes, dtype=torch.uint8))
        for _ in range(repeats):
            channel.send(number + 1, 0, channel.receive(number, 0, header))
            number += 2
    pipe.send("done")
    channel.close()
