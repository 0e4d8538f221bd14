"""What turns out to be unneeded while it runs stops between two chunks, and is as if it had never been begun."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from asyncflow.core.cost import CostTable, StatedCosts
from asyncflow.core.dispatch import Cancel
from asyncflow.core.graph import Graph, Kind, Task
from asyncflow.core.plan import CONTROLLER, Plan
from asyncflow.core.trace import Trace
from asyncflow.engine import Cancelled, Device, Engine, Result, Work
from asyncflow.errors import TaskFailed
from asyncflow.gantt import draw
from asyncflow.launch import EngineDevice
from asyncflow.testing import FakeDevice, FakeNetwork, FakeTransport, MemoryLink, NoProgram, VirtualLoop, run_virtually
from asyncflow.wire import CancelTask, Forget, RunTask, Stop, TaskDone
from asyncflow.worker import Worker

GRAPH = Graph(
    [
        Task("rollout/0", Kind.ROLLOUT),
        Task("score/0", Kind.SCORE, after=("rollout/0",)),
        Task("advantage/0", Kind.ADVANTAGE, values=("score/0",)),
        Task("replay/0", Kind.REPLAY, inputs=("rollout/0.path",)),
        Task("update/0", Kind.UPDATE, inputs=("replay/0.gradients",), values=("replay/0", "advantage/0")),
    ]
)
PLACES = {"rollout/0": (0,), "score/0": (1,), "advantage/0": (CONTROLLER,), "replay/0": (0,), "update/0": (0, 1)}
PLAN = Plan(PLACES, tuple(PLACES))
REPLAY = RunTask(1, (GRAPH["replay/0"],), ("replay/0.gradients",), None)
NETWORK = FakeNetwork(StatedCosts({"replay": 4}))


class Unneeding(NoProgram):
    """A program that needs no replay once it knows the advantage."""

    def local(self, task: Task, values: Mapping[str, Any]) -> tuple[None, tuple[str, ...]]:
        return None, ("replay/0",)


class Summing(Engine):
    """An engine that adds 1 to what it reads."""

    def run(self, work: Work) -> Result:
        total = sum(work.tensors.values(), torch.zeros(())) + 1
        names = [f"{work.tasks[0].id}.{part}" for part in ("path", "gradients")]
        return Result(dict.fromkeys(names, total), {task.id: total.item() for task in work.tasks})


class Persistent(Summing):
    """The same, but that it goes on until it is told to stop, or has waited in vain."""

    def run(self, work: Work) -> Result:
        given_up = time.monotonic() + 10
        while time.monotonic() < given_up:
            if work.is_unneeded():
                raise Cancelled
        return super().run(work)


class Deserter:
    """An engine that stops although nobody told it to."""

    def run(self, work: Work) -> Result:
        raise Cancelled("enough")


@pytest.mark.parametrize(
    ("score", "replay_ends", "cancelled"),
    [(0.5, 2.0, True), (2.5, 4.0, True), (3.5, 5.0, False), (4.0, 5.0, False), (6.0, 5.0, False)],
    ids=["in the first chunk", "in the third chunk", "in the last chunk", "as it ends", "after it has ended"],
)
def test_a_replay_stops_at_the_next_chunk_or_has_made_what_it_was_to_make(
    score: float, replay_ends: float, cancelled: bool
):
    """It runs from second 1, for four seconds in four chunks; `run_virtually` checks that what it made is dropped."""
    costs = StatedCosts({"rollout": 1, "replay": 4, "score": score, "update": 1})
    result = run_virtually(GRAPH, PLAN, costs, Unneeding(), {0: Summing(), 1: Summing()}, chunks=4)
    (span,) = [span for span in result.trace.on(0) if span.name == "replay"]
    assert (span.start, span.end, span.cancelled) == (1.0, replay_ends, cancelled)
    assert [s.name for s in result.trace.spans if s.cancelled] == ["replay"] * cancelled
    assert result.trace.seconds == max(1 + score, replay_ends) + 1
    assert ("replay/0" in result.values) is not cancelled
    assert result.values["update/0"][0] == (1.0 if cancelled else 3.0)
    told = [command for _, commands in result.log for command in commands if isinstance(command, Cancel)]
    assert len(told) == (score < 4.0)


def test_what_was_cancelled_teaches_no_cost_and_is_drawn_as_such(tmp_path: Path):
    costs = StatedCosts({"rollout": 1, "replay": 4, "score": 1, "update": 1})
    cancelled = run_virtually(GRAPH, PLAN, costs, Unneeding(), chunks=4).trace
    whole = Trace([replace(span, cancelled=False) for span in cancelled.spans], cancelled.seconds)
    learned, pictures = [], []
    for trace in (cancelled, whole):
        table = CostTable()
        table.observe(trace, GRAPH)
        learned.append(table.runs.keys())
        draw(trace, tmp_path / "step.png")
        pictures.append((tmp_path / "step.png").read_bytes())
    assert learned[1] - learned[0] == {"0|replay|||1"}
    assert pictures[0] != pictures[1]


def test_an_engine_that_stops_untold_has_failed():
    costs = StatedCosts({"rollout": 1, "replay": 1, "score": 1, "update": 1})
    with pytest.raises(TaskFailed, match="rollout/0 on rank 0 failed: Cancelled: enough"):
        run_virtually(GRAPH, PLAN, costs, Unneeding(), {0: Deserter(), 1: Deserter()})


@asynccontextmanager
async def serving(device: Device) -> AsyncIterator[tuple[MemoryLink, Worker]]:
    """The link to a worker, and the worker."""
    here, there = MemoryLink.pair()
    worker = Worker(0, there, device, FakeTransport(0, NETWORK), lambda: 0.0)
    worker.store.put("rollout/0.path", torch.ones(()))
    served = asyncio.create_task(worker.run())
    yield here, worker
    here.send(Stop())
    await served


def test_a_worker_tells_its_engine_and_then_keeps_and_reports_nothing():
    """The engine works in a thread of its own, as it does in a run."""

    async def main() -> None:
        device = EngineDevice()
        await device.load(Persistent)
        async with serving(device) as (link, worker):
            link.send(REPLAY)
            link.send(CancelTask(1))
            assert await link.receive() == TaskDone(1, 0.0, 0.0, cancelled=True)
            assert len(worker.store) == 1
        await device.close()

    asyncio.run(main())


def test_a_word_that_comes_too_late_stops_neither_that_task_nor_the_next_of_its_number():
    async def main() -> None:
        async with serving(FakeDevice(0, NETWORK, Summing(), chunks=2)) as (link, _):
            for _ in range(2):
                link.send(REPLAY)
                done = await link.receive()
                assert isinstance(done, TaskDone) and done.headers and not done.cancelled
                link.send(CancelTask(1))
                link.send(Forget("replay/0.gradients"))

    VirtualLoop.run(main())
