"""The controller, on rank 0: drives the dispatcher with what the ranks report, and tells them what it decides.

Invariant: it orders nothing itself; every command comes from the dispatcher and leaves in the order given, so that each
rank sees its share of the one sequence in increasing order. Tensors never pass through it. `launch` makes one for a
run; the training loop calls `run` for every step.
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from asyncflow.core.cost import Durations
from asyncflow.core.dispatch import (
    Abort,
    Begin,
    Cancel,
    Command,
    Dispatcher,
    Done,
    Drop,
    Event,
    Failed,
    Move,
    Moved,
    RankLost,
    Run,
    Unneeded,
)
from asyncflow.core.graph import Graph, Kind, Task
from asyncflow.core.plan import CONTROLLER, Plan
from asyncflow.core.trace import Trace
from asyncflow.engine import Invalid
from asyncflow.errors import AsyncflowError, Interrupted, TaskFailed
from asyncflow.errors import RankLost as RankLostError
from asyncflow.liveness import Limits
from asyncflow.wire import (
    Beat,
    CancelTask,
    Forget,
    Header,
    Hello,
    Link,
    Message,
    Ready,
    Receive,
    RunTask,
    Send,
    Stop,
    TaskDone,
    TensorMoved,
    ToRank,
    WorkerFailed,
)

_LASTING = {Kind.UPDATE, Kind.CHECKPOINT}
"""Kinds that change what stays: a step of which one has started is not given up."""


class Program(Protocol):
    """What an algorithm says during a step; called on rank 0 only, with the values a task declared as its needs."""

    def payload(self, tasks: Sequence[Task], values: Mapping[str, Any]) -> Any:
        """What the engine must know to run `tasks`: anything msgspec can encode."""

    def local(self, task: Task, values: Mapping[str, Any]) -> tuple[Any, Sequence[str]]:
        """The value of a reward or advantage task, and the ids of tasks that are not needed now that it is known."""


@dataclass(frozen=True, slots=True)
class LocalDone:
    """The controller itself ended a task, and now knows that `unneeded` tasks are not needed."""

    ticket: int
    unneeded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gone:
    """A rank's link is at its end, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Somebody wants the run to end."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step leaves: its trace, the value of every task, and the largest lag of each rank's event loop in seconds.

    A gang task's value is a dict by rank. A lag is known if the rank gave a sign of life during the step.
    """

    trace: Trace
    values: dict[str, Any]
    log: list[tuple[Event, tuple[Command, ...]]]
    lags: dict[int, float] = field(default_factory=dict)


FromRank = Message | Gone
FromHere = LocalDone | Interrupt


class Controller:
    """One end of a link to every rank. Without `limits` every task may take for ever."""

    def __init__(self, links: Mapping[int, Link], clock: Callable[[], float], limits: Limits | None = None) -> None:
        self.clock = clock
        self.limits = limits
        self.inbox: asyncio.Queue[tuple[int, FromRank | FromHere]] = asyncio.Queue()
        self.pids: dict[int, int] = {}
        self.transfers = 0
        """How many numbers of the one sequence earlier steps have used."""
        self._links = links
        self._interrupted = False
        self._readers = [asyncio.create_task(self._read(rank, link)) for rank, link in sorted(links.items())]

    async def ready(self) -> None:
        """Wait until every rank has loaded what it needs. Raises TaskFailed, RankLost or Interrupted if that fails."""
        waiting = set(self._links)
        while waiting:
            match await self.inbox.get():
                case rank, Hello(pid=pid):
                    self.pids[rank] = pid
                case rank, Ready():
                    waiting.discard(rank)
                case _, Beat():
                    pass
                case _, Interrupt():
                    raise Interrupted("the run was interrupted before it began")
                case rank, WorkerFailed(error=error, details=details):
                    raise _failed(f"rank {rank} could not start: {error}", details)
                case rank, Gone(reason):
                    raise RankLostError(f"{self.name(rank)} was lost before it was ready: {reason}")
                case rank, message:
                    raise AssertionError(f"rank {rank} sent {message} before it was ready")

    async def run(self, graph: Graph, plan: Plan, program: Program, expected: Durations | None = None) -> StepResult:
        """Execute one step, whose tasks take, as a rule, what is `expected`.

        Raises TaskFailed if a task raised or hangs, and RankLost if a rank is gone, with one sentence. Raises
        Interrupted if the step was given up, in order: nothing became of it, and another one may be run.
        """
        if self._interrupted:
            self._interrupted = False
            raise Interrupted("the run was interrupted between two steps")
        step = _Step(self, graph, plan, program, expected)
        await step.run()
        self.transfers += step.dispatcher.sequence
        if step.given_up:
            self._interrupted = False
            raise Interrupted("the run was interrupted in a step")
        return StepResult(step.trace, step.values, step.dispatcher.log, step.lags)

    def interrupt(self) -> None:
        """Have `run` raise Interrupted once: soon, or when called next if the step under way cannot be given up."""
        self._interrupted = True
        self.inbox.put_nowait((CONTROLLER, Interrupt()))

    @property
    def interrupted(self) -> bool:
        """Whether somebody wants the run to end and has not been obeyed yet."""
        return self._interrupted

    def name(self, rank: int) -> str:
        """A rank with its process, for an error."""
        return f"rank {rank} (process {self.pids.get(rank, '?')})"

    def send(self, rank: int, message: ToRank) -> None:
        """Queue a message to a rank."""
        self._links[rank].send(message)

    async def close(self, error: str = "", code: int = 1) -> None:
        """Tell every rank to stop, in order or because of `error` and with an exit code, and hang up."""
        for link in self._links.values():
            link.send(Stop(error, code))
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for link in self._links.values():
            await link.close()

    async def _read(self, rank: int, link: Link) -> None:
        try:
            while True:
                self.inbox.put_nowait((rank, await link.receive()))
        except EOFError as error:
            self.inbox.put_nowait((rank, Gone(str(error))))


def _failed(sentence: str, details: str) -> TaskFailed:
    error = TaskFailed(sentence)
    if details:
        error.add_note(details)
    return error


class _Step:
    """One step under way."""

    def __init__(
        self, controller: Controller, graph: Graph, plan: Plan, program: Program, expected: Durations | None
    ) -> None:
        self.controller = controller
        self.graph = graph
        self.program = program
        self.expected = expected
        self.given_up = False
        self.lags: dict[int, float] = {}
        self.dispatcher = Dispatcher(graph, plan)
        self.trace = Trace()
        self.values: dict[str, Any] = {}
        self.began = controller.clock()
        self._runs: dict[int, Run] = {}
        self._moves: dict[int, Move] = {}
        self._made: dict[str, tuple[int, Header]] = {}  # by tensor: the rank that made it, and what it looks like
        self._failure: AsyncflowError | None = None

    async def run(self) -> None:
        self._handle(Begin())
        while not self.dispatcher.finished:
            for event in self._events(*await self.controller.inbox.get()):
                self._handle(event)
            if self._failure:
                raise self._failure
        self.trace.sort()

    def _handle(self, event: Event) -> None:
        for command in self.dispatcher.on(event):
            match command:
                case Run(ranks=(rank,)) if rank == CONTROLLER:
                    self._compute(command)
                case Run():
                    self._run(command)
                case Move():
                    self._move(command)
                case Drop(tensor, rank):
                    self.controller.send(rank, Forget(tensor))
                case Cancel(ticket, rank):
                    self.controller.send(rank, CancelTask(ticket))
                case Abort():
                    pass  # whoever fed the failure raises it, and `close` tells the ranks

    def _events(self, rank: int, message: FromRank | FromHere) -> Iterator[Event]:
        """What a message means to the dispatcher; its values, headers and times are noted on the way."""
        match message:
            case LocalDone(ticket, unneeded):
                if unneeded:  # first, so that none of them starts now that this task has ended
                    yield Unneeded(unneeded)
                yield Done(ticket, CONTROLLER)
            case TaskDone(ticket, start, end, values, invalid, headers, cancelled, summed):
                run = self._runs[ticket]
                self.trace.ran(run, self.graph, rank, start - self.began, end - self.began, cancelled=cancelled)
                if summed:
                    self.trace.summed(run, rank, summed[0] - self.began, summed[1] - self.began)
                self.trace.invalid.update(invalid)
                for name, value in values.items():
                    if run.sequence:
                        self.values.setdefault(name, {})[rank] = value
                    else:
                        self.values[name] = value
                for name, reason in invalid.items():
                    self.values[name] = Invalid(reason)
                self._made.update((name, (rank, header)) for name, header in headers.items())
                yield Done(ticket, rank, invalid, cancelled)
            case TensorMoved(sequence, start, end):
                sequence -= self.controller.transfers
                self.trace.moved(self._moves[sequence], start - self.began, end - self.began)
                yield Moved(sequence)
            case WorkerFailed(ticket, error, details):
                what = f"{', '.join(self._runs[ticket].tasks)} on rank {rank}" if ticket else f"rank {rank}"
                self._failure = _failed(f"{what} failed: {error}", details)
                yield Failed(ticket, rank, error)
            case Gone(reason):
                doing = [
                    ", ".join(run.tasks)
                    for ticket, run in self._runs.items()
                    if rank in run.ranks and not self.dispatcher.has_ended(ticket)
                ]
                where = f" in {doing[0]}" if doing else ""
                self._failure = RankLostError(f"{self.controller.name(rank)} was lost{where}: {reason}")
                yield RankLost(rank, str(self._failure))
            case Beat(lag):
                self.lags[rank] = max(self.lags.get(rank, 0.0), lag)
            case Interrupt():
                started = {self.graph[run.tasks[0]].kind for run in self._runs.values()}
                if self.controller.interrupted and not started & _LASTING:
                    self.given_up = True
                    yield Unneeded(tuple(self.graph.tasks))
            case _:
                raise AssertionError(f"rank {rank} sent {message} during a step")

    def _needs(self, tasks: Sequence[Task]) -> dict[str, Any]:
        return {name: self.values[name] for task in tasks for name in task.values if name in self.values}

    def _compute(self, run: Run) -> None:
        """A scalar task: done on the spot, and reported behind what has already arrived."""
        task = self.graph[run.tasks[0]]
        start = self.controller.clock() - self.began
        unneeded: Sequence[str] = ()
        if task.kind is not Kind.BARRIER:
            self.values[task.id], unneeded = self.program.local(task, self._needs([task]))
        self.trace.ran(run, self.graph, CONTROLLER, start, self.controller.clock() - self.began)
        self.controller.inbox.put_nowait((CONTROLLER, LocalDone(run.ticket, tuple(unneeded))))

    def _run(self, run: Run) -> None:
        self._runs[run.ticket] = run
        tasks = tuple(self.graph[name] for name in run.tasks)
        payload = self.program.payload(tasks, self._needs(tasks))
        gang = run.ranks if run.sequence else ()
        sequence = run.sequence + self.controller.transfers if run.sequence else 0
        for rank in run.ranks:
            here = tuple(self._reading_here(task, rank) for task in tasks) if gang else tasks
            limits = self.controller.limits
            patience = limits.patience(self.expected, tasks, rank) if limits else math.inf
            keep = run.keep if rank == run.ranks[0] else ()
            self.controller.send(rank, RunTask(run.ticket, here, keep, payload, gang, sequence, patience))

    def _reading_here(self, task: Task, rank: int) -> Task:
        """A gang's task for one of its ranks, whose share of the inputs is what was made there."""
        made_here = [tensor for tensor in task.inputs if tensor in self._made and self._made[tensor][0] == rank]
        return msgspec.structs.replace(task, inputs=tuple(made_here))

    def _move(self, move: Move) -> None:
        self._moves[move.sequence] = move
        sequence = move.sequence + self.controller.transfers
        _, header = self._made[move.tensor]
        self.controller.send(move.source, Send(sequence, move.tensor, move.target))
        self.controller.send(move.target, Receive(sequence, move.tensor, move.source, header))
