"""Starting ranks, and what each of them does from its first to its last moment.

Invariant: a rank that fails, or dies, ends the run on every rank within seconds and with one error, printed once. The
commands of `algorithms` call `start_ranks` in the parent and `run_rank` in each rank.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import click
import torch
import torch.distributed as dist
import uvloop

from asyncflow.channels.base import Channel
from asyncflow.channels.gloo import GlooChannel
from asyncflow.channels.shared_memory import SharedMemoryChannel
from asyncflow.communicator import Communicator
from asyncflow.controller import Controller
from asyncflow.engine import Engine, Result, Work
from asyncflow.errors import AsyncflowError, RankLost
from asyncflow.lane import Lane
from asyncflow.wire import Hello, Ready, StreamLink, WorkerFailed
from asyncflow.worker import Worker

ChannelName = Literal["shared-memory", "gloo"]

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

_CONNECT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Rank:
    """This process's place in the run."""

    number: int
    ranks: int


def this_rank() -> Rank | None:
    """This process's place under torchrun (or `start_ranks`), or None in a process nobody launched as a rank."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def start_ranks(ranks: int, module: str, arguments: Sequence[str]) -> int:
    """Run `python -m module arguments` as `ranks` ranks on this host, as torchrun would; return an exit code.

    0 done, 1 failed (a rank has said why), 130 interrupted.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks say what is wrong themselves
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=f"asyncflow-{os.getpid()}",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, entrypoint=sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        return INTERRUPTED if codes == {INTERRUPTED} else 1
    except SignalException as error:
        return INTERRUPTED if error.sigval is signal.SIGINT else 1
    return 0


def run_rank(
    rank: Rank,
    build_engine: Callable[[], Engine],
    lead: Callable[[Controller], Awaitable[None]],
    channel: ChannelName = "shared-memory",
) -> None:
    """Be one rank until the run is over; rank 0 also controls it by awaiting `lead`. Ends the process if the run fails.

    `build_engine` runs in the engine thread, after the rank is connected, so that a model that does not load is
    reported like any failure.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run_rank(rank, build_engine, lead, channel))
    except AsyncflowError as error:
        _exit(error, error.exit_code)
    except KeyboardInterrupt:
        _exit(None, INTERRUPTED)


def _exit(error: AsyncflowError | None, code: int) -> None:
    """Leave at once: the engine or a transfer may block for long, and nobody needs what they do."""
    if error is not None and not isinstance(error, Silenced):
        click.echo(f"error: {error}", err=True)
        for note in getattr(error, "__notes__", []):
            click.echo(note, err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Silenced(AsyncflowError):
    """The run failed elsewhere, where it was said why."""


class EngineDevice:
    """The rank's device: an engine in the one engine thread."""

    def __init__(self) -> None:
        self._lane = Lane("asyncflow-engine")
        self._engine: Engine | None = None

    async def load(self, build_engine: Callable[[], Engine]) -> None:
        """Build the engine."""
        self._engine = await self._lane.submit(build_engine)

    async def run(self, work: Work) -> Result:
        """See `Device`."""
        assert self._engine is not None, "the engine is not loaded"
        engine = self._engine
        return await self._lane.submit(lambda: engine.run(work))

    def close(self) -> None:
        """See `Device`."""
        self._lane.close()


async def _run_rank(
    rank: Rank, build_engine: Callable[[], Engine], lead: Callable[[Controller], Awaitable[None]], channel: ChannelName
) -> None:
    store: dist.Store
    store, _, _ = next(dist.rendezvous("env://", rank.number, rank.ranks, timeout=_CONNECT))
    store = dist.PrefixStore("asyncflow", store)
    if rank.number:
        store.wait(["controller"], _CONNECT)
        await _serve(rank, build_engine, store, channel)
        return
    links: dict[int, StreamLink] = {}
    complete = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = StreamLink(reader, writer)
        links[int.from_bytes(await reader.readexactly(4), "big")] = link
        if len(links) == rank.ranks:
            complete.set()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    store.set("controller", f"{host}:{port}")
    serving = asyncio.create_task(_serve(rank, build_engine, store, channel))
    try:
        async with asyncio.timeout(_CONNECT.total_seconds()):
            await complete.wait()
    except TimeoutError:
        missing = sorted(set(range(rank.ranks)) - set(links))
        raise RankLost(f"ranks {missing} did not connect within {_CONNECT.total_seconds():.0f} seconds") from None
    controller = Controller(links, time.monotonic)
    try:
        await controller.ready()
        await lead(controller)
    except BaseException as error:
        await controller.close(str(error) or type(error).__name__)
        serving.cancel()
        raise
    await controller.close()
    await serving
    server.close()


async def _serve(rank: Rank, build_engine: Callable[[], Engine], store: dist.Store, channel: ChannelName) -> None:
    """The worker's life on this rank."""
    loop = asyncio.get_running_loop()
    host, port = store.get("controller").decode().split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(rank.number.to_bytes(4, "big"))
    link = StreamLink(reader, writer)
    link.send(Hello(rank.number, os.getpid()))
    device = EngineDevice()
    try:
        await device.load(build_engine)
        wires: Channel
        make = {"shared-memory": SharedMemoryChannel, "gloo": GlooChannel}[channel]
        wires = await loop.run_in_executor(None, make, rank.number, rank.ranks, store)
    except Exception as error:
        sentence = str(error) if isinstance(error, AsyncflowError) else f"{type(error).__name__}: {error}"
        link.send(WorkerFailed(0, sentence, ""))
        await link.close()
        raise Silenced(sentence) from error
    transport = Communicator(wires)
    worker = Worker(rank.number, link, device, transport, time.monotonic)
    link.send(Ready())
    try:
        stop = await worker.run()
    except EOFError:
        raise RankLost("rank 0, which controls the run, was lost: its process ended or hung up") from None
    if stop.error:
        raise Silenced(stop.error)
    device.close()
    transport.close()
    await link.close()


