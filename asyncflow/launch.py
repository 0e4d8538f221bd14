"""Starting ranks, and what each of them does from its first to its last moment.

Invariant: a rank that fails, or dies, ends the run on every rank within seconds and with one error, printed once. The
commands of `algorithms` call `start_ranks` in the parent and `run_rank` in each rank.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, NoReturn

import click
import torch
import torch.distributed as dist
import uvloop

from asyncflow.channels.base import Channel
from asyncflow.channels.gloo import GlooChannel
from asyncflow.channels.nccl import NcclChannel
from asyncflow.channels.shared_memory import SharedMemoryChannel
from asyncflow.communicator import Communicator
from asyncflow.controller import Controller
from asyncflow.engine import Engine, Result, Work
from asyncflow.errors import AsyncflowError, RankLost
from asyncflow.lane import Lane
from asyncflow.streams import wait_for
from asyncflow.wire import Hello, Ready, Stop, StreamLink
from asyncflow.worker import Worker, failure

ChannelName = Literal["shared-memory", "gloo", "nccl"]

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

_CONNECT = timedelta(seconds=60)
_PATIENCE_S = 0.5
"""How long rank 0 goes on after SIGTERM. A launcher sends it when another rank has ended; rank 0 is to learn which."""
_LAST_WORDS_S = 3.0
"""How long the end of a failed run may take."""


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

    logging.disable(logging.CRITICAL)  # the ranks say what is wrong themselves
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",  # the host has no need of a name
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
    finally:
        logging.disable(logging.NOTSET)
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
    except KeyboardInterrupt:
        _leave(INTERRUPTED)


def _report(error: BaseException) -> int:
    """Say why the run failed, unless that was done or is no secret; return the exit code."""
    match error:
        case KeyboardInterrupt() | asyncio.CancelledError():
            return INTERRUPTED
        case Silenced():
            return 1
        case AsyncflowError():
            click.echo("\n".join([f"error: {error}", *getattr(error, "__notes__", [])]), err=True)
            return error.exit_code
        case _:
            traceback.print_exception(error)
            return 1


def _leave(code: int) -> NoReturn:
    """Leave at once: the engine or a transfer may block for long, and nobody needs what they do."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # whoever read it is gone
            stream.flush()
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

        def run() -> Result:
            result = engine.run(work)
            wait_for([*work.tensors.values(), *result.tensors.values()])
            return result

        return await self._lane.submit(run)

    def close(self) -> None:
        """See `Device`."""
        self._lane.close()


async def _run_rank(
    rank: Rank, build_engine: Callable[[], Engine], lead: Callable[[Controller], Awaitable[None]], channel: ChannelName
) -> None:
    try:
        store: dist.Store
        store, _, _ = next(dist.rendezvous("env://", rank.number, rank.ranks, timeout=_CONNECT))
        store = dist.PrefixStore("asyncflow", store)
        if rank.number:
            await _follow(rank, build_engine, store, channel)
        else:
            await _lead(rank, build_engine, lead, store, channel)
    except BaseException as error:  # noqa: BLE001 - whatever it is, this rank ends now
        _leave(_report(error))


async def _follow(rank: Rank, build_engine: Callable[[], Engine], store: dist.Store, channel: ChannelName) -> None:
    """The life of every rank but the first."""
    store.wait(["controller"], _CONNECT)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: loop.call_later(_LAST_WORDS_S, _leave, INTERRUPTED))
    await _serve(rank, build_engine, store, channel)


async def _lead(
    rank: Rank,
    build_engine: Callable[[], Engine],
    lead: Callable[[Controller], Awaitable[None]],
    store: dist.Store,
    channel: ChannelName,
) -> None:
    """The life of rank 0, which controls the run beside serving in it."""
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    loop.add_signal_handler(signal.SIGTERM, lambda: loop.call_later(_PATIENCE_S, this.cancel))
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
    except BaseException as error:  # noqa: BLE001 - whatever it is, all ranks end now
        code = _report(error)  # first: once another rank has ended, a launcher ends this one
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await controller.close(str(error) or type(error).__name__)
        _leave(code)
    await controller.close()
    await serving
    server.close()


async def _serve(rank: Rank, build_engine: Callable[[], Engine], store: dist.Store, channel: ChannelName) -> None:
    """The worker's life on this rank."""
    host, port = store.get("controller").decode().split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(rank.number.to_bytes(4, "big"))
    link = StreamLink(reader, writer)
    link.send(Hello(rank.number, os.getpid()))
    device = EngineDevice()
    make: dict[ChannelName, Callable[..., Channel]] = {
        "shared-memory": SharedMemoryChannel,
        "gloo": GlooChannel,
        "nccl": NcclChannel,
    }
    stop: Stop | None = None
    try:
        transport = await Communicator.connect(lambda: make[channel](rank.number, rank.ranks, store))
        await device.load(build_engine)
        link.send(Ready())
        with contextlib.suppress(EOFError):
            stop = await Worker(rank.number, link, device, transport, time.monotonic).run()
    except Exception as error:
        link.send(failure(0, error))
        await link.close()
        raise Silenced(str(error)) from error
    if stop is None:
        first = store.add("ranks that miss rank 0", 1) == 1
        sentence = "rank 0, which controls the run, was lost: its process ended or hung up"
        raise RankLost(sentence) if first else Silenced(sentence)
    if stop.error:
        raise Silenced(stop.error)
    device.close()
    transport.close()
    await link.close()
