"""Whatever goes wrong, and whenever, a run ends: with one error that names it, and with no completed step lost.

Each seed is a whole run in virtual time, of the real controller, workers and links: some steps of a random graph, saves
between them, messages that are late, work that is cancelled, and one fault. A seed that fails does so every time.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NoReturn

import pytest
import torch

from asyncflow.controller import Controller
from asyncflow.core.graph import Graph, Kind, Task
from asyncflow.core.plan import Plan
from asyncflow.engine import Result, Work
from asyncflow.errors import AsyncflowError, Interrupted, RankLost, TaskFailed
from asyncflow.liveness import Limits, LivingLink
from asyncflow.testing import (
    FakeDevice,
    FakeNetwork,
    FakeTransport,
    HashedDurations,
    MemoryLink,
    VirtualLoop,
    random_step,
    until,
)
from asyncflow.wire import Hello, Ready, Stop
from asyncflow.worker import Worker

RUNS = 1000
RANKS, STEPS = 3, 3
LIMITS = Limits(beat=2.0, silence=12.0, unknown=40.0)
AN_AGE_S = 2000.0
SAVE = Task("checkpoint/save", Kind.CHECKPOINT)


class LateLink(MemoryLink):
    """A link whose messages take up to `lateness` seconds, in order; from `frozen` on nothing comes until `thawed`."""

    def __init__(self) -> None:
        super().__init__()
        self.random, self.lateness = Random(0), 0.0
        self.frozen = self.thawed = 0.0
        self._due = 0.0

    def _deliver(self, body: bytes) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + self.random.choice((0.0, self.lateness))
        if due >= self.frozen:
            due = max(due, self.thawed)
        self._due = max(self._due, due)
        loop.call_at(self._due, self._other._inbox.put_nowait, body)


@dataclass
class Fault:
    """What happens to `rank` at second `when`, or in the engine's work of that number."""

    what: str
    rank: int
    when: float
    work: int


class Engine:
    """What a task makes depends on what it reads alone, and a gang's, which takes what there is, on nothing.

    It counts updates, and breaks down at the fault's work.
    """

    def __init__(self, rank: int, fault: Fault) -> None:
        self.fault = fault if fault.rank == rank else None
        self.works = self.updates = 0

    def run(self, work: Work) -> Result:
        self.works += 1
        if self.fault and self.fault.what == "raise" and self.works >= self.fault.work:
            raise ValueError("it broke")
        (kind,) = {task.kind for task in work.tasks}
        self.updates += kind is Kind.UPDATE
        if kind is Kind.CHECKPOINT and work.tasks == (SAVE,):
            return Result(values={SAVE.id: self.updates})
        tensors, values = {}, {}
        for task in work.tasks:
            read = [] if kind is Kind.UPDATE else [work.tensors[name] for name in task.inputs]
            made = torch.stack([torch.tensor(float(len(task.id))), *read]).sum()
            tensors |= {f"{task.id}.{part}": made for part in "ab"}
            values[task.id] = made.item()
        return Result(tensors, values)


class Device(FakeDevice):
    """A device whose engine may hang."""

    def __init__(self, rank: int, network: FakeNetwork, engine: Engine) -> None:
        super().__init__(rank, network, engine, chunks=3)
        self.engine = engine

    async def run(self, work: Work) -> Result:
        fault = self.engine.fault
        if fault and fault.what == "hang" and self.engine.works + 1 >= fault.work:
            await asyncio.Event().wait()
        return await super().run(work)


@dataclass
class Program:
    """Finds by lot that tasks are not needed, but no update."""

    random: Random
    graph: Graph

    def payload(self, tasks: Sequence[Task], values: Mapping[str, Any]) -> None:
        return None

    def local(self, task: Task, values: Mapping[str, Any]) -> tuple[None, tuple[str, ...]]:
        others = [task.id for task in self.graph if task.kind is not Kind.UPDATE]
        return None, tuple(self.random.sample(others, self.random.choice((0, 0, 1, 3))))


@dataclass
class Story:
    """What became of a run."""

    fault: Fault
    error: AsyncflowError | None = None
    completed: list[dict[str, Any]] = field(default_factory=list)
    saved: list[tuple[int, int]] = field(default_factory=list)
    """After so many completed steps a save held so many updates."""
    words: list[Stop | BaseException | None] = field(default_factory=list)
    seconds: float = 0.0


def story_of(seed: int) -> Story:
    random = Random(seed)
    graph, plan = random_step(random, RANKS, random.randint(5, 12))
    whats = ("nothing", "die", "freeze", "pause", "raise", "hang", "interrupt")
    fault = Fault(random.choice(whats), random.randrange(RANKS), random.uniform(0.0, 25.0), random.randint(1, 12))
    if fault.what in {"die", "freeze", "pause"}:
        fault.rank = random.randrange(1, RANKS)  # rank 0 has the controller
    story = Story(fault)
    durations = HashedDurations(seed, (0.0, 0.5, 1.0, 2.0))
    VirtualLoop.run(_play(random, graph, plan, durations, story))
    return story


async def _play(random: Random, graph: Graph, plan: Plan, durations: HashedDurations, story: Story) -> None:
    loop, fault = asyncio.get_running_loop(), story.fault
    network, lateness = FakeNetwork(durations), random.choice((0.0, 0.3, 2.0))
    links, workers, serving = {}, [], []
    for rank in range(RANKS):
        ends = LateLink.pair()
        for end in ends:
            assert isinstance(end, LateLink)
            end.random, end.lateness = random, lateness
            if fault.rank == rank and fault.what in {"freeze", "pause"}:
                end.frozen, end.thawed = fault.when, fault.when + (9 * AN_AGE_S if fault.what == "freeze" else 2.0)
        links[rank], there = LivingLink(ends[0], LIMITS), LivingLink(ends[1], LIMITS)
        engine = Engine(rank, fault)
        worker = Worker(rank, there, Device(rank, network, engine), FakeTransport(rank, network), loop.time)
        there.send(Hello(rank, 100 + rank))
        there.send(Ready())
        workers.append((worker, there))
        serving.append(asyncio.create_task(worker.run()))
    controller = Controller(links, loop.time, LIMITS)

    async def strike() -> None:
        await until(fault.when)
        if fault.what == "interrupt":
            controller.interrupt()
        elif fault.what == "die":
            serving[fault.rank].cancel()
            await workers[fault.rank][1].close()

    async def save() -> None:
        result = await controller.run(Graph([SAVE]), Plan({SAVE.id: (0,)}, (SAVE.id,)), program)
        story.saved.append((len(story.completed), result.values[SAVE.id]))

    program = Program(random, graph)
    striking = asyncio.create_task(strike())
    async with asyncio.timeout(AN_AGE_S):
        try:
            await controller.ready()
            try:
                for step in range(STEPS):
                    result = await controller.run(graph, plan, program)
                    story.completed.append(result.values)
                    if step % 2 == 0:
                        await save()
            except Interrupted:
                if story.completed and (not story.saved or story.saved[-1][0] < len(story.completed)):
                    await save()
                raise
        except AsyncflowError as error:
            story.error = error
        story.seconds = loop.time()
        await controller.close(str(story.error or ""))
        story.words = await asyncio.gather(*serving, return_exceptions=True)
        striking.cancel()
        await asyncio.gather(striking, *(there.close() for _, there in workers), return_exceptions=True)
    if story.words == [Stop()] * RANKS:
        assert not [worker.rank for worker, _ in workers if len(worker.store)], "tensors are left"
    check(story, graph)


def check(story: Story, graph: Graph) -> None:
    fault, error = story.fault, story.error
    match error:
        case None:
            assert len(story.completed) == STEPS
        case Interrupted():
            assert fault.what == "interrupt"
            assert not story.completed or story.saved[-1][0] == len(story.completed), "a completed step is lost"
        case RankLost():
            assert fault.what in {"die", "freeze"}
            assert str(error).startswith(f"rank {fault.rank} (process ")
        case TaskFailed():
            assert fault.what in {"raise", "hang"}
            reason = "ValueError: it broke" if fault.what == "raise" else "its engine gave no sign of progress for 40"
            assert f" on rank {fault.rank} failed: {reason}" in str(error)
        case _:
            unexpected(error)
    for word in story.words:  # every rank has heard of the end, or had none to hear
        assert isinstance(word, Stop | EOFError | asyncio.CancelledError), word
    updates = len(graph.of(Kind.UPDATE))
    assert story.saved == [(steps, steps * updates) for steps, _ in story.saved], "a save holds a part of a step"
    for values in story.completed:  # what two steps have both made is the same
        for name, value in values.items():
            if graph[name].kind is not Kind.UPDATE:
                assert value == story.completed[0].get(name, value)


def unexpected(error: AsyncflowError) -> NoReturn:
    raise AssertionError(f"nobody expects {error!r}") from error


@pytest.mark.parametrize("seed", range(RUNS))
def test_a_run_with_a_fault_ends_and_loses_no_completed_step(seed: int):
    story_of(seed)


def test_the_faults_cover_all_ends_and_a_seed_is_the_same_every_time():
    stories = [story_of(seed) for seed in range(60)]
    assert {type(story.error) for story in stories} == {type(None), Interrupted, RankLost, TaskFailed}
    for seed in range(10):
        again = story_of(seed)
        assert (repr(again.error), again.completed, again.saved, again.seconds) == (
            repr(stories[seed].error), stories[seed].completed, stories[seed].saved, stories[seed].seconds
        )  # fmt: skip
