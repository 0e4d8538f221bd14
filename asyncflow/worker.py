"""The worker: one rank's end of the runtime, a coroutine for each message of the controller.

Invariant: messages are begun in the order they arrive, and what moves takes its place in the one sequence at once, so
device work and transfers are launched in the order the dispatcher gave them; each then awaits its inputs, and reports
its own end. `launch` runs one worker in each rank's event loop, `testing` several in one.
"""

import asyncio
import math
import threading
import traceback
from collections.abc import Awaitable, Callable
from functools import partial

import torch

from asyncflow.channels.base import header_of
from asyncflow.communicator import Arrival, Collective, Transport
from asyncflow.engine import Cancelled, Device, Work
from asyncflow.errors import AsyncflowError, RankLost
from asyncflow.liveness import stacks, stalled
from asyncflow.store import ObjectStore
from asyncflow.wire import (
    Beat,
    CancelTask,
    Forget,
    Link,
    Receive,
    RunTask,
    Send,
    Stop,
    TaskDone,
    TensorMoved,
    WorkerFailed,
)

_PATIENCE_S = 1.0
"""How long a rank that misses another one waits before it says so: the controller hears of it from that rank's link."""


class Worker:
    """Runs what the controller says on `device`, moves tensors over `transport`; `clock` gives seconds."""

    def __init__(self, rank: int, link: Link, device: Device, transport: Transport, clock: Callable[[], float]) -> None:
        self.rank = rank
        self.store = ObjectStore()
        self._link = link
        self._device = device
        self._transport = transport
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[int, _Running] = {}
        """By ticket."""

    async def run(self) -> Stop:
        """Serve until the controller says stop. Raises EOFError when the controller is gone."""
        try:
            while True:
                match await self._link.receive():
                    case RunTask() as message:
                        place = None
                        if message.gang:
                            place = self._transport.collective(message.sequence, message.gang)
                        self._running[message.ticket] = _Running(place, self._clock)
                        self._begin(message.ticket, partial(self._run, message))
                    case CancelTask(ticket):
                        if ticket in self._running:  # otherwise it has ended in the meantime
                            self._running[ticket].unneeded.set()
                    case Send() as message:
                        self._begin(0, partial(self._send, self._transport.send(message, self.store[message.tensor])))
                    case Receive() as message:
                        self._begin(0, partial(self._receive, message, self._transport.receive(message)))
                    case Forget(tensor):
                        self.store.drop(tensor)
                    case Beat():
                        pass  # the controller lives
                    case Stop() as message:
                        return message
                    case message:
                        raise AssertionError(f"rank {self.rank} was sent {message}")
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, ticket: int, work: Callable[[], Awaitable[None]]) -> None:
        async def supervised() -> None:
            try:
                await work()
            except RankLost as error:
                await asyncio.sleep(_PATIENCE_S)
                self._link.send(failure(ticket, error))
            except Exception as error:  # noqa: BLE001 - a task's edge: whatever it raised ends the run with one error
                self._link.send(failure(ticket, error))

        task = asyncio.create_task(supervised())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, message: RunTask) -> None:
        running = self._running[message.ticket]
        watching = None
        try:
            tensors = {name: await self.store.get(name) for task in message.tasks for name in task.inputs}
            start = self._clock()
            if message.patience < math.inf:
                watching = asyncio.create_task(self._watch(message, running))
            sum_over_ranks = running.sum_over_ranks if running.place else None
            work = Work(message.tasks, tensors, message.payload, sum_over_ranks, running.is_unneeded)
            result = await self._device.run(work)
            end = self._clock()
        except Cancelled:
            if not running.unneeded.is_set():
                raise
            self._link.send(TaskDone(message.ticket, start, self._clock(), cancelled=True))
            return
        finally:
            del self._running[message.ticket]
            if watching:
                watching.cancel()
            if running.place:
                running.place.cancel()
        kept = {name: result.tensors[name] for name in message.keep}
        for name, tensor in kept.items():
            self.store.put(name, tensor)
        headers = {name: header_of(tensor) for name, tensor in kept.items()}
        done = TaskDone(message.ticket, start, end, result.values, result.invalid, headers, summed=running.summed)
        self._link.send(done)

    async def _watch(self, message: RunTask, running: "_Running") -> None:
        """Report that the engine hangs, if it does; a rank that waits for others in a sum leaves it to them first."""
        patience = message.patience
        await stalled(lambda: running.signs, patience)
        if running.summing:
            await stalled(lambda: running.signs, patience)
            patience *= 2
        what = "waited for the sum over ranks" if running.summing else "gave no sign of progress"
        self._link.send(WorkerFailed(message.ticket, f"its engine {what} for {patience:g} seconds", stacks()))

    async def _send(self, departure: Awaitable[None]) -> None:
        await departure

    async def _receive(self, message: Receive, arrival: Awaitable[Arrival]) -> None:
        tensor, start, end = await arrival
        self.store.put(message.tensor, tensor)
        self._link.send(TensorMoved(message.sequence, start, end))


class _Running:
    """A run command under way, of whose progress the engine's thread gives signs, and the loop counts them."""

    def __init__(self, place: Collective | None, clock: Callable[[], float]) -> None:
        self.place = place
        self.unneeded = threading.Event()
        self.signs = 0
        self.summing = False
        self.summed: tuple[float, float] | None = None
        """When the sum over ranks began and ended here."""
        self._clock = clock

    def is_unneeded(self) -> bool:
        """See `Work`."""
        self.signs += 1
        return self.unneeded.is_set()

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Work`."""
        assert self.place, "only a gang has a sum"
        self.signs += 1
        self.summing, began = True, self._clock()
        total = self.place(tensor)
        self.summing, self.summed = False, (began, self._clock())
        self.signs += 1
        return total


def failure(ticket: int, error: Exception) -> WorkerFailed:
    """What the controller is told of `error`: an error raised on purpose speaks for itself, others need a traceback."""
    if isinstance(error, AsyncflowError):
        return WorkerFailed(ticket, str(error), "")
    details = "".join(traceback.format_exception(error)).rstrip()
    return WorkerFailed(ticket, f"{type(error).__name__}: {error}", details)
