"""Helpers to test schedules, algorithms and the runtime: virtual time, and a whole run in one process.

`VirtualLoop` is an event loop whose clock jumps to the next timer, so a test of an hour takes milliseconds and ends
with the same trace every time. `run_virtually` executes a step with the real controller and the real workers over
fake devices and transfers that take what a `Durations` says.
"""

import asyncio
import selectors
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import Context
from heapq import heappop, heappush
from itertools import count, product
from random import Random
from typing import Any, TypeVar

import torch

from asyncflow.channels.base import header_of
from asyncflow.communicator import Arrival
from asyncflow.controller import Controller, Program, StepResult
from asyncflow.core.cost import Durations
from asyncflow.core.graph import JUDGE_KINDS, LOCAL_KINDS, Graph, Kind, Task
from asyncflow.core.plan import CONTROLLER, Plan
from asyncflow.engine import Cancelled, Engine, Result, Work
from asyncflow.wire import HUNG_UP, Hello, Message, Ready, Receive, Send, decode, encode
from asyncflow.worker import Worker

T = TypeVar("T")


class Deadlock(Exception):
    """Nothing can ever happen again in a virtual loop: everything waits for everything else."""


class _Jump(selectors.SelectSelector):
    """A selector that fires the next timer instead of waiting for it."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:  # nothing else is left to do at this moment
            self.loop.fire()
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which starts at 0 and never sleeps. Threads have no place in it.

    Timers fire one by one, those of one moment in the order they were set, and each after all that the one before it
    set going has come to rest.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle, Callable[..., object], tuple[Any, ...]]] = []
        self._order = count()
        selector = _Jump()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Seconds of virtual time."""
        return self.now

    def call_at(  # type: ignore[override]  # the base class types `args` by a TypeVarTuple
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """See the class."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heappush(self._timers, (when, next(self._order), timer, callback, args))
        return timer

    def fire(self) -> None:
        """Move the clock to the next timer and call it. Raises Deadlock if there is none."""
        while self._timers:
            when, _, timer, callback, args = heappop(self._timers)
            if not timer.cancelled():
                self.now = max(self.now, when)
                self.call_soon(callback, *args)
                return
        waiting = ", ".join(map(str, asyncio.all_tasks(self)))
        raise Deadlock(f"every coroutine waits for another: {waiting}")

    @classmethod
    def run(cls, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` to its end in a new virtual loop."""
        with asyncio.Runner(loop_factory=cls) as runner:
            return runner.run(main)


async def until(when: float) -> None:
    """Wait for a moment of the loop's clock, which may be now."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    timer = loop.call_at(when, future.set_result, None)
    try:
        await future
    finally:
        timer.cancel()


class MemoryLink:
    """One end of a link within a process; `pair` makes both. Messages travel encoded, as they do between processes.

    In a virtual loop all links together deliver in the order in which the messages were sent.
    """

    def __init__(self) -> None:
        self._inbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._other: MemoryLink = self

    @classmethod
    def pair(cls) -> "tuple[MemoryLink, MemoryLink]":
        """Two ends, joined."""
        one, other = cls(), cls()
        one._other, other._other = other, one
        return one, other

    def send(self, message: Message) -> None:
        """See `Link`."""
        self._deliver(encode(message))

    async def receive(self) -> Message:
        """See `Link`."""
        body = await self._inbox.get()
        if not body:
            raise EOFError(HUNG_UP)
        return decode(body)

    async def close(self) -> None:
        """See `Link`."""
        self._deliver(b"")

    def _deliver(self, body: bytes) -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time(), self._other._inbox.put_nowait, body)


class FakeNetwork:
    """What the fake devices and transports of one run share: durations, and when each rank's transfer lane is free."""

    def __init__(self, durations: Durations) -> None:
        self.durations = durations
        self.free: dict[int, float] = defaultdict(float)
        self.sent: dict[int, asyncio.Future[torch.Tensor]] = defaultdict(asyncio.Future)


class FakeDevice:
    """A device on which tasks take what the durations say, on all lanes; an engine, if given, computes at their ends.

    Work lasts `chunks` equal parts, and stops between two of them once it is unneeded.
    """

    def __init__(self, rank: int, network: FakeNetwork, engine: Engine | None = None, chunks: int = 1) -> None:
        self._rank, self._network, self._engine, self._chunks = rank, network, engine, chunks

    async def run(self, work: Work) -> Result:
        """See `Device`."""
        start = asyncio.get_running_loop().time()
        seconds = self._network.durations.run(work.tasks, self._rank)
        end = start + seconds
        if work.sum_over_ranks:  # the collective holds its place in the sequence until the gang ends
            self._network.free[self._rank] = max(self._network.free[self._rank], end)
        for chunk in range(1, self._chunks):
            await until(start + seconds * chunk / self._chunks)
            if work.is_unneeded():
                raise Cancelled
        await until(end)
        return self._engine.run(work) if self._engine else Result(tensors=defaultdict(lambda: torch.empty(0)))

    async def close(self) -> None:
        """See `Device`."""


class FakeTransport:
    """A transport in virtual time; it refuses a launch that does not follow the one sequence."""

    def __init__(self, rank: int, network: FakeNetwork) -> None:
        self._rank, self._network = rank, network
        self._last = 0

    def send(self, order: Send, tensor: torch.Tensor) -> Awaitable[None]:
        """See `Transport`."""
        self._take(order.sequence)
        self._network.sent[order.sequence].set_result(tensor)
        return asyncio.create_task(asyncio.sleep(0))

    def receive(self, order: Receive) -> Awaitable[Arrival]:
        """See `Transport`."""
        self._take(order.sequence)
        return asyncio.create_task(self._arrival(order))

    async def _arrival(self, order: Receive) -> Arrival:
        free = self._network.free
        start = max(asyncio.get_running_loop().time(), free[order.source], free[self._rank])
        end = start + self._network.durations.move(order.tensor, order.source, self._rank)
        free[order.source] = free[self._rank] = end
        await until(end)
        tensor = await asyncio.shield(self._network.sent[order.sequence])  # its sender may be told of it later
        del self._network.sent[order.sequence]
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
    chunks: int = 1,
) -> StepResult:
    """Execute one step with the real controller and workers in virtual time, and check that no tensor is left over.

    Without `engines` tasks give empty tensors; without `program` they are told nothing. What the controller computes
    takes no time. Unneeded work stops between two of its `chunks`.
    """
    ranks = sorted({rank for places in plan.ranks.values() for rank in places} - {CONTROLLER})
    network = FakeNetwork(durations)

    async def main() -> StepResult:
        clock = asyncio.get_running_loop().time
        ends = {rank: MemoryLink.pair() for rank in ranks}
        workers = []
        for rank, (_, end) in ends.items():
            device = FakeDevice(rank, network, engines[rank] if engines else None, chunks)
            workers.append(Worker(rank, end, device, FakeTransport(rank, network), clock))
            end.send(Hello(rank, 0))
            end.send(Ready())
        controller = Controller({rank: end for rank, (end, _) in ends.items()}, clock)
        serving = [asyncio.create_task(worker.run()) for worker in workers]
        try:
            await controller.ready()
            result = await controller.run(graph, plan, program or NoProgram())
        finally:
            await controller.close()
            await asyncio.gather(*serving)
        left = [worker.rank for worker in workers if len(worker.store)]
        assert not left, f"ranks {left} still hold tensors"
        return result

    return VirtualLoop.run(main())


class HashedDurations:
    """Durations that look random but depend only on `seed` and on what takes them; the controller takes no time.

    `choices` are the seconds to choose from: a few small integers make many events fall on one moment.
    """

    def __init__(self, seed: int, choices: Sequence[float]) -> None:
        self._seed, self._choices = seed, choices

    def run(self, tasks: Sequence[Task], rank: int) -> float:
        """See `Durations`."""
        return 0.0 if rank == CONTROLLER else self._choose(rank, *(task.id for task in tasks))

    def move(self, tensor: str, source: int, target: int) -> float:
        """See `Durations`."""
        return self._choose(tensor, source, target)

    def _choose(self, *what: object) -> float:
        return Random(f"{self._seed} {what}").choice(self._choices)


QUALITY = {"quality": False}
"""A judge, which is not apart."""


def rl_step(groups: int, batches: int, mini_batches: int = 1, *, judges: Mapping[str, bool] = QUALITY) -> Graph:
    """A step's dataflow: `groups` groups of `batches` micro-batches of two candidates, each scored on its own.

    `judges` says by the name of each whether it is apart.
    """
    tasks: list[Task] = []
    for mini_batch in range(mini_batches):
        replays: list[Task] = []
        for group in range(mini_batch, groups, mini_batches):
            judged: list[str] = []
            for batch in range(batches):
                at = f"{group}.{batch}"
                both = (2 * batch, 2 * batch + 1)
                one: dict[str, Any] = {"group": group, "mini_batch": mini_batch, "candidates": both}
                path, frames = f"rollout/{at}.path", f"decode/{at}.frames"
                tasks.append(Task(f"rollout/{at}", Kind.ROLLOUT, **one))
                tasks.append(Task(f"decode/{at}", Kind.DECODE, inputs=(path,), **one))
                for candidate, (judge, apart) in product(both, judges.items()):
                    judged.append(f"score/{judge}/{at}.{candidate}")
                    alone = {**one, "candidates": (candidate,), "judge": judge, "apart": apart}
                    tasks.append(Task(judged[-1], Kind.SCORE, inputs=(frames,), **alone))
                before = (f"update/{mini_batch - 1}",) if mini_batch else ()
                replays.append(Task(f"replay/{at}", Kind.REPLAY, inputs=(path,), after=before, **one))
            tasks.append(Task(f"reward/{group}", Kind.REWARD, values=tuple(judged), group=group))
            tasks.append(Task(f"advantage/{group}", Kind.ADVANTAGE, values=(f"reward/{group}",), group=group))
        tasks += replays
        gradients = tuple(f"{task.id}.gradients" for task in replays)
        values = (*(task.id for task in replays), *(f"advantage/{task.group}" for task in replays))
        tasks.append(Task(f"update/{mini_batch}", Kind.UPDATE, inputs=gradients, values=values, mini_batch=mini_batch))
    return Graph(tasks)


def random_step(random: Random, ranks: int, size: int) -> tuple[Graph, Plan]:
    """A graph of `size` tasks and a plan for it, with every sort of task, edge and placement by lot."""
    kinds = [kind for kind in Kind if kind is not Kind.UPDATE]
    apart = random.choice(("", "x", "xy"))
    tasks: list[Task] = []
    places: dict[str, tuple[int, ...]] = {}
    for position in range(size):
        kind = Kind.UPDATE if random.random() < 0.1 else random.choice(kinds)
        name = f"{kind}/{position}"
        gang = tuple(range(random.randint(1, ranks)))
        here = (CONTROLLER,) if kind in LOCAL_KINDS else gang if kind is Kind.UPDATE else (random.randrange(ranks),)
        makers = [task.id for task in tasks if task.kind not in LOCAL_KINDS]
        if kind is Kind.UPDATE:
            makers = [maker for maker in makers if places[maker][0] in gang]
        read = 0 if kind in LOCAL_KINDS else min(len(makers), random.randint(0, 3))
        inputs = tuple(f"{maker}.{random.choice('ab')}" for maker in random.sample(makers, read))
        ids = [task.id for task in tasks]
        values = tuple(random.sample(ids, min(len(ids), random.randint(0, 2))))
        after = tuple(random.sample(ids, min(len(ids), random.randint(0, 1))))
        judge = random.choice("xy") if kind in JUDGE_KINDS else ""
        is_apart = bool(judge) and judge in apart
        tasks.append(Task(name, kind, inputs=inputs, values=values, after=after, judge=judge, apart=is_apart))
        places[name] = here
    graph = Graph(tasks)
    return graph, Plan(
        places, tuple(random.sample(list(graph.tasks), size)), random.randint(1, 3), random.randint(1, 3)
    )
