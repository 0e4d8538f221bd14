"""Helpers to test schedules, algorithms and the runtime: virtual time, and a whole run in one process.

`VirtualLoop` is an event loop whose clock jumps to the next timer, so a test of an hour takes milliseconds and ends
with the same trace every time. `run_virtually` executes a step with the real controller and the real workers over
fake devices and transfers that take what a `Durations` says.
"""

import asyncio
import heapq
import selectors
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from contextvars import Context
from itertools import count
from typing import Any, TypeVar

import torch

from asyncflow.channels.base import header_of
from asyncflow.controller import Controller, Program, StepResult
from asyncflow.core.cost import Durations
from asyncflow.core.graph import Graph, Task
from asyncflow.core.plan import CONTROLLER, Plan
from asyncflow.engine import Engine, Result, Work
from asyncflow.wire import Hello, Message, Ready, Receive, Send
from asyncflow.worker import Worker

T = TypeVar("T")


class Deadlock(Exception):
    """Nothing can ever happen again in a virtual loop: everything waits for everything else."""


class _Timer(asyncio.TimerHandle):
    """A timer that fires in the order it was set among those of one moment."""

    _order = count()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.number = next(self._order)

    def __lt__(self, other: object) -> bool:
        assert isinstance(other, _Timer)
        return (self.when(), self.number) < (other.when(), other.number)


class _Jump(selectors.SelectSelector):
    """A selector that, instead of waiting, moves the loop's clock."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                waiting = ", ".join(map(str, asyncio.all_tasks(self.loop)))
                raise Deadlock(f"every coroutine waits for another: {waiting}")
            self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which starts at 0 and never sleeps. Threads have no place in it."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _Jump()
        selector.loop = self
        super().__init__(selector)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Seconds of virtual time."""
        return self.now

    def call_at(  # type: ignore[override]  # the base class's variadic signature cannot be written without its privates
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As any loop's, but timers of one moment fire in the order they were set."""
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    @classmethod
    def run(cls, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` to its end in a new virtual loop."""
        with asyncio.Runner(loop_factory=cls) as runner:
            return runner.run(main)


async def until(when: float) -> None:
    """Wait for a moment of the loop's clock, which may be now."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    loop.call_at(when, future.set_result, None)
    await future


class MemoryLink:
    """One end of a link within a process; `pair` makes both."""

    def __init__(self) -> None:
        self._inbox: asyncio.Queue[Message | None] = asyncio.Queue()
        self._other: MemoryLink = self

    @classmethod
    def pair(cls) -> "tuple[MemoryLink, MemoryLink]":
        """Two ends, joined."""
        one, other = cls(), cls()
        one._other, other._other = other, one
        return one, other

    def send(self, message: Message) -> None:
        """See `Link`."""
        self._other._inbox.put_nowait(message)

    async def receive(self) -> Message:
        """See `Link`."""
        message = await self._inbox.get()
        if message is None:
            raise EOFError("the other end hung up")
        return message

    async def close(self) -> None:
        """See `Link`."""
        self._other._inbox.put_nowait(None)


class FakeNetwork:
    """What the fake devices and transports of one run share: durations, and when each rank's transfer lane is free."""

    def __init__(self, durations: Durations) -> None:
        self.durations = durations
        self.free: dict[int, float] = defaultdict(float)
        self.sent: dict[int, torch.Tensor] = {}


class FakeDevice:
    """A device on which tasks take what the durations say; an engine, if given, computes their results at the end."""

    def __init__(self, rank: int, network: FakeNetwork, engine: Engine | None = None) -> None:
        self._rank, self._network, self._engine = rank, network, engine

    async def run(self, work: Work) -> Result:
        """See `Device`."""
        end = asyncio.get_running_loop().time() + self._network.durations.run(work.tasks, self._rank)
        if work.sum_over_ranks:  # the collective holds its place in the sequence until the gang ends
            self._network.free[self._rank] = max(self._network.free[self._rank], end)
        await until(end)
        return self._engine.run(work) if self._engine else Result(tensors=defaultdict(lambda: torch.empty(0)))

    def close(self) -> None:
        """See `Device`."""


class FakeTransport:
    """A transport in virtual time; it refuses a launch that does not follow the one sequence."""

    def __init__(self, rank: int, network: FakeNetwork) -> None:
        self._rank, self._network = rank, network
        self._last = 0

    async def send(self, order: Send, tensor: torch.Tensor) -> None:
        """See `Transport`."""
        self._take(order.sequence)
        self._network.sent[order.sequence] = tensor

    async def receive(self, order: Receive) -> tuple[torch.Tensor, float, float]:
        """See `Transport`."""
        self._take(order.sequence)
        free = self._network.free
        start = max(asyncio.get_running_loop().time(), free[order.source], free[self._rank])
        end = start + self._network.durations.move(order.tensor, order.source, self._rank)
        free[order.source] = free[self._rank] = end
        await until(end)
        tensor = self._network.sent.pop(order.sequence)
        assert header_of(tensor) == order.header, f"{order} met {header_of(tensor)}"
        return tensor, start, end

    def collective(self, sequence: int, ranks: tuple[int, ...]) -> "FakeCollective":
        """See `Transport`."""
        self._take(sequence)
        return FakeCollective()

    def close(self) -> None:
        """See `Transport`."""

    def _take(self, sequence: int) -> None:
        assert sequence > self._last, f"rank {self._rank} launched transfer {sequence} after {self._last}"
        self._last = sequence


class FakeCollective:
    """The place of a gang whose ranks do not talk to each other: the sum is the rank's own tensor."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Collective`."""
        return tensor

    def cancel(self) -> None:
        """See `Collective`."""


class NoProgram:
    """A program that tells tasks nothing and computes nothing."""

    def payload(self, tasks: Sequence[Task], values: Mapping[str, Any]) -> None:
        """See `Program`."""

    def local(self, task: Task, values: Mapping[str, Any]) -> tuple[None, tuple[str, ...]]:
        """See `Program`."""
        return None, ()


def run_virtually(
    graph: Graph,
    plan: Plan,
    durations: Durations,
    program: Program | None = None,
    engines: Mapping[int, Engine] | None = None,
) -> StepResult:
    """Execute one step with the real controller and workers in virtual time, and check that no tensor is left over.

    Without `engines` tasks give empty tensors; without `program` they are told nothing.
    """
    ranks = sorted({rank for places in plan.ranks.values() for rank in places} - {CONTROLLER})
    network = FakeNetwork(durations)

    async def main() -> StepResult:
        clock = asyncio.get_running_loop().time
        ends = {rank: MemoryLink.pair() for rank in ranks}
        workers = []
        for rank, (_, end) in ends.items():
            device = FakeDevice(rank, network, engines[rank] if engines else None)
            workers.append(Worker(rank, end, device, FakeTransport(rank, network), clock))
            end.send(Hello(rank, 0))
            end.send(Ready())
        controller = Controller({rank: end for rank, (end, _) in ends.items()}, clock)
        serving = [asyncio.create_task(worker.run()) for worker in workers]
        try:
            await controller.ready()
            return await controller.run(graph, plan, program or NoProgram())
        finally:
            await controller.close()
            await asyncio.gather(*serving)
            left = [worker.rank for worker in workers if len(worker.store)]
            assert not left, f"ranks {left} still hold tensors"

    return VirtualLoop.run(main())
