"""Starting ranks, and what each of them does from its first to its last moment.

Invariant: a rank that fails, dies or freezes ends the run on every rank within seconds and with one error, printed
once; no rank outlives rank 0, nor the process that started it. A signal ends the run in order, if it can. The commands
of `algorithms` call `start_ranks` in the parent and `run_rank` in each rank.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar

import click
import msgspec
import torch
import torch.distributed as dist
import uvloop

from asyncflow.channels.base import Channel
from asyncflow.channels.gloo import GlooChannel
from asyncflow.channels.nccl import NcclChannel
from asyncflow.channels.shared_memory import SharedMemoryChannel
from asyncflow.communicator import Communicator
from asyncflow.controller import Controller
from asyncflow.core.graph import DEVICE
from asyncflow.engine import Engine, Result, Work
from asyncflow.errors import AsyncflowError, Interrupted, RankLost
from asyncflow.lane import Lane
from asyncflow.liveness import STANDARD, Limits, LivingLink, die_with_parent, outlive
from asyncflow.port import Address, ControlPort, join
from asyncflow.streams import wait_for
from asyncflow.wire import Beat, Hello, Link, Ready, Stop
from asyncflow.worker import Worker, failure

T = TypeVar("T")

ChannelName = Literal["shared-memory", "gloo", "nccl"]

INTERRUPTED = Interrupted.exit_code
"""Exit code after Ctrl-C."""

_CONNECT = timedelta(seconds=60)
_PATIENCE_S = 0.5
"""How long rank 0 goes on after SIGTERM. A launcher sends it when another rank has ended; rank 0 is to learn which."""
_LAST_WORDS_S = 3.0
"""How long the end of a failed run may take."""
_ONE_SIGNAL_S = 1.0
"""Signals within it are one: Ctrl-C reaches a rank from the terminal and from its launcher."""


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

    0 done, 1 failed (a rank has said why), 128 and a signal's number where one ended the run: 130 after Ctrl-C.
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
        shutdown_timeout=round(STANDARD.grace + 2 * _LAST_WORDS_S),
    )
    try:
        elastic_launch(config, entrypoint=sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        return INTERRUPTED if codes == {INTERRUPTED} else 1
    except SignalException as error:
        return 128 + error.sigval
    finally:
        logging.disable(logging.NOTSET)
    return 0


def run_rank(
    rank: Rank,
    build_engine: Callable[[], Engine],
    lead: Callable[[Controller], Awaitable[None]],
    channel: ChannelName = "shared-memory",
    limits: Limits = STANDARD,
) -> None:
    """Be one rank until the run is over; rank 0 also controls it by awaiting `lead`. Ends the process if the run fails.

    `build_engine` runs in the engine thread, after the rank is connected, so that a model that does not load is
    reported like any failure. After a signal the step under way raises Interrupted in `lead`, which has the limits'
    grace to end.
    """
    die_with_parent()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run_rank(rank, build_engine, lead, channel, limits))
    except KeyboardInterrupt:
        _leave(INTERRUPTED)


def _report(error: BaseException) -> int:
    """Say why the run failed, unless that was done or is no secret; return the exit code."""
    match error:
        case KeyboardInterrupt() | asyncio.CancelledError() | Interrupted():
            return INTERRUPTED
        case Silenced():
            return error.exit_code
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
    """The run ended elsewhere, where it was said why."""

    def __init__(self, sentence: str, exit_code: int = 1) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class EngineDevice:
    """The rank's device: an engine in the engine's thread, and in one for each judge that is apart."""

    def __init__(self) -> None:
        self._lanes: dict[str, Lane] = {}
        self._engine: Engine | None = None

    async def load(self, build_engine: Callable[[], Engine]) -> None:
        """Build the engine."""
        self._engine = await self._lane(DEVICE).submit(build_engine)

    async def run(self, work: Work) -> Result:
        """See `Device`."""
        assert self._engine is not None, "the engine is not loaded"
        engine = self._engine

        def run() -> Result:
            result = engine.run(work)
            wait_for([*work.tensors.values(), *result.tensors.values()])
            return result

        return await self._lane(work.tasks[0].lane).submit(run)

    async def close(self) -> None:
        """See `Device`."""
        if self._engine:
            await self._lane(DEVICE).submit(self._engine.close)
        for lane in self._lanes.values():
            lane.close()

    def _lane(self, name: str) -> Lane:
        if name not in self._lanes:
            self._lanes[name] = Lane("asyncflow-engine" if name == DEVICE else f"asyncflow-{name}")
            # Torch tells a thread how many it may use when that first asks it to share work, and MKL before that not.
            self._lanes[name].submit(partial(torch.set_num_threads, torch.get_num_threads()))
        return self._lanes[name]


async def _run_rank(
    rank: Rank,
    build_engine: Callable[[], Engine],
    lead: Callable[[Controller], Awaitable[None]],
    channel: ChannelName,
    limits: Limits,
) -> None:
    try:
        store: dist.Store
        store, _, _ = next(dist.rendezvous("env://", rank.number, rank.ranks, timeout=_CONNECT))
        store = dist.PrefixStore("asyncflow", store)
        if rank.number:
            await _follow(rank, build_engine, store, channel, limits)
        else:
            await _lead(rank, build_engine, lead, store, channel, limits)
    except BaseException as error:  # noqa: BLE001 - whatever it is, this rank ends now
        _leave(_report(error))


async def _follow(
    rank: Rank, build_engine: Callable[[], Engine], store: dist.Store, channel: ChannelName, limits: Limits
) -> None:
    """The life of every rank but the first, which ends when rank 0 says so; signals are for that one to obey."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, loop.call_later, limits.grace + _LAST_WORDS_S, _leave, INTERRUPTED)
    store.wait(["controller"], _CONNECT)
    address = msgspec.json.decode(store.get("controller"), type=Address)
    await _serve(rank, build_engine, store, address, channel, limits)


async def _lead(
    rank: Rank,
    build_engine: Callable[[], Engine],
    lead: Callable[[Controller], Awaitable[None]],
    store: dist.Store,
    channel: ChannelName,
    limits: Limits,
) -> None:
    """The life of rank 0, which controls the run beside serving in it."""
    interruption = _Interruption(limits.grace)
    port = ControlPort(rank.ranks)
    address = await port.open()
    store.set("controller", msgspec.json.encode(address).decode())
    serving = asyncio.create_task(_serve(rank, build_engine, store, address, channel, limits))
    links = await port.wait(_CONNECT.total_seconds())
    living = {number: LivingLink(link, limits) for number, link in links.items()}
    controller = interruption.controller = Controller(living, time.monotonic, limits)
    try:
        await controller.ready()
        await lead(controller)
    except BaseException as error:  # noqa: BLE001 - whatever it is, all ranks end now
        code = _report(error)  # first: once another rank has ended, a launcher ends this one
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await controller.close(str(error) or type(error).__name__, code if code == INTERRUPTED else 1)
        outlive([pid for number, pid in controller.pids.items() if number != rank.number], _LAST_WORDS_S)
        _leave(code)
    await controller.close()
    await serving


class _Interruption:
    """What rank 0 makes of Ctrl-C and SIGTERM: the run ends in order, within `grace` seconds; then, at once."""

    def __init__(self, grace: float) -> None:
        self.controller: Controller | None = None
        self._grace = grace
        self._loop = asyncio.get_running_loop()
        self._began: float | None = None
        this = asyncio.current_task()
        assert this is not None
        self._end = this.cancel
        self._loop.add_signal_handler(signal.SIGINT, self._begin)
        self._loop.add_signal_handler(signal.SIGTERM, self._loop.call_later, _PATIENCE_S, self._begin)

    def _begin(self) -> None:
        now = self._loop.time()
        if self._began is None and self.controller:
            self._began = now
            self.controller.interrupt()
            self._loop.call_later(self._grace, self._give_up)
        elif self._began is None or now > self._began + _ONE_SIGNAL_S:
            self._end()

    def _give_up(self) -> None:
        click.echo(f"interrupted, although not all that ran has ended within {self._grace:g} seconds", err=True)
        self._end()


async def _serve(
    rank: Rank,
    build_engine: Callable[[], Engine],
    store: dist.Store,
    address: Address,
    channel: ChannelName,
    limits: Limits,
) -> None:
    """The worker's life on this rank."""
    link = LivingLink(await join(rank.number, address), limits)
    link.send(Hello(rank.number, os.getpid()))
    device = EngineDevice()
    make: dict[ChannelName, Callable[..., Channel]] = {
        "shared-memory": SharedMemoryChannel,
        "gloo": GlooChannel,
        "nccl": NcclChannel,
    }

    async def load() -> Communicator:
        transport = await Communicator.connect(lambda: make[channel](rank.number, rank.ranks, store))
        await device.load(build_engine)
        return transport

    try:
        transport = await _unless_stopped(link, load())
        link.send(Ready())
        stop = await Worker(rank.number, link, device, transport, time.monotonic).run()
    except EOFError as error:
        sentence = f"rank 0 (process {address.process}), which controls the run, was lost: {error}"
        if not rank.number:
            raise Silenced(sentence) from None
        outlive([address.process], _LAST_WORDS_S)
        raise RankLost(sentence) if _is_first(store) else Silenced(sentence) from None
    except Silenced:
        raise
    except Exception as error:
        link.send(failure(0, error))
        await link.close()
        raise Silenced(str(error)) from error
    if stop.error:
        raise Silenced(stop.error, stop.code)
    await device.close()
    transport.close()
    await link.close()


async def _unless_stopped(link: Link, loading: Coroutine[Any, Any, T]) -> T:
    """What `loading` gives. Raises Silenced or EOFError as soon as the controller ends the run, or is lost."""
    load, word = asyncio.create_task(loading), asyncio.create_task(_first_word(link))
    await asyncio.wait({load, word}, return_when=asyncio.FIRST_COMPLETED)
    if not load.done():
        stop = word.result()
        raise Silenced(stop.error, stop.code)
    word.cancel()
    await asyncio.gather(word, return_exceptions=True)
    return load.result()


async def _first_word(link: Link) -> Stop:
    """What the controller says to a rank that is not ready: nothing, or stop."""
    while isinstance(message := await link.receive(), Beat):
        pass
    assert isinstance(message, Stop), f"{message} came before the rank was ready"
    return message


def _is_first(store: dist.Store) -> bool:
    """Whether no other rank has said yet that rank 0 is lost."""
    try:
        return store.add("ranks that miss rank 0", 1) == 1
    except dist.DistError:  # the store was rank 0's
        return True
