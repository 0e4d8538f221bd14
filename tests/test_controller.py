"""The controller and its workers carry out what the dispatcher decides, and one error ends what cannot go on."""

import asyncio
import gc
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from asyncflow.controller import Controller
from asyncflow.core.graph import DEVICE, Graph, Kind, Task
from asyncflow.core.plan import CONTROLLER, Plan
from asyncflow.core.trace import SUM, TRANSFER
from asyncflow.engine import Invalid, Result, Work
from asyncflow.errors import RankLost, TaskFailed, TrainingError
from asyncflow.testing import (
    FakeDevice,
    FakeNetwork,
    FakeTransport,
    HashedDurations,
    MemoryLink,
    NoProgram,
    VirtualLoop,
    run_virtually,
    until,
)
from asyncflow.wire import (
    Forget,
    Header,
    Hello,
    Message,
    Ready,
    Receive,
    RunTask,
    Send,
    Stop,
    TaskDone,
    WorkerFailed,
)
from asyncflow.worker import Worker

ONE_SECOND = HashedDurations(0, (1.0,))
TASKS = [
    Task("rollout/0", Kind.ROLLOUT),
    Task("decode/0", Kind.DECODE, inputs=("rollout/0.path",)),
    Task("reward/0", Kind.REWARD, values=("decode/0",)),
    Task("replay/0", Kind.REPLAY, inputs=("rollout/0.path",), values=("rollout/0",), after=("reward/0",)),
    Task("update/0", Kind.UPDATE, inputs=("replay/0.gradients",), values=("replay/0", "reward/0")),
]
GRAPH = Graph(TASKS)
PLACES = {"rollout/0": (0,), "decode/0": (1,), "reward/0": (CONTROLLER,), "replay/0": (1,), "update/0": (0, 1)}
PLAN = Plan(PLACES, tuple(PLACES))


class Recorder:
    """An engine that adds 1 to what it reads and notes what it was given; it breaks at the task `fails`."""

    def __init__(self, rank: int, fails: str = "", error: Exception | None = None) -> None:
        self.rank, self.fails, self.error = rank, fails, error
        self.works: list[Work] = []

    def run(self, work: Work) -> Result:
        self.works.append(work)
        names = [task.id for task in work.tasks]
        if self.fails in names:
            raise self.error or ValueError("it broke")
        total = sum(work.tensors.values(), torch.zeros(2)) + 1
        parts = {"rollout": ("path",), "decode": ("frames",), "replay": ("gradients",)}
        tensors = {f"{name}.{part}": total for name in names for part in parts.get(name.split("/")[0], ())}
        return Result(tensors, {name: total.tolist() for name in names})


class Program(NoProgram):
    """Notes what each task was given; gives a reward, after which `unneeded` are not needed."""

    def __init__(self, unneeded: Sequence[str] = ()) -> None:
        self.unneeded = unneeded
        self.given: dict[tuple[str, ...], dict[str, Any]] = {}

    def payload(self, tasks: Sequence[Task], values: Mapping[str, Any]) -> Any:
        self.given[tuple(task.id for task in tasks)] = dict(values)
        return {"tasks": tuple(task.id for task in tasks)}

    def local(self, task: Task, values: Mapping[str, Any]) -> tuple[Any, Sequence[str]]:
        self.given[task.id,] = dict(values)
        return "a reward", self.unneeded


def both(**break_down: Any) -> dict[int, Recorder]:
    return {rank: Recorder(rank, **break_down) for rank in (0, 1)}


def test_tensors_and_values_get_where_they_are_needed():
    engines, program = both(), Program()
    result = run_virtually(GRAPH, PLAN, ONE_SECOND, program, engines)
    assert result.values == {
        "rollout/0": [1.0, 1.0],
        "decode/0": [2.0, 2.0],
        "reward/0": "a reward",
        "replay/0": [2.0, 2.0],
        "update/0": {0: [1.0, 1.0], 1: [3.0, 3.0]},
    }
    assert program.given == {
        ("rollout/0",): {},
        ("decode/0",): {},
        ("reward/0",): {"decode/0": [2.0, 2.0]},
        ("replay/0",): {"rollout/0": [1.0, 1.0]},
        ("update/0",): {"replay/0": [2.0, 2.0], "reward/0": "a reward"},
    }


def test_an_engine_is_given_its_tasks_inputs_and_payload_and_a_gang_its_sum():
    engines = both()
    run_virtually(GRAPH, PLAN, ONE_SECOND, Program(), engines)
    (rollout, update), (_, replay, _) = engines[0].works, engines[1].works
    assert rollout.tasks == (TASKS[0],)
    assert (rollout.tensors, rollout.payload) == ({}, {"tasks": ["rollout/0"]})  # as msgpack gives it back
    assert rollout.sum_over_ranks is None
    assert replay.tensors["rollout/0.path"].tolist() == [1.0, 1.0]
    assert update.sum_over_ranks is not None


def test_the_trace_shows_the_sum_of_a_gang_that_sums():
    """On the transfer lane of each of its ranks, under its number in the sequence."""

    class Summing(Recorder):
        def run(self, work: Work) -> Result:
            if work.sum_over_ranks:
                work.sum_over_ranks(torch.ones(1))
            return super().run(work)

    result = run_virtually(GRAPH, PLAN, ONE_SECOND, Program(), {rank: Summing(rank) for rank in (0, 1)})
    sums = [(s.rank, s.lane, s.tasks) for s in result.trace.spans if s.name == SUM]
    assert sums == [(0, TRANSFER, ("update/0",)), (1, TRANSFER, ("update/0",))]


def test_a_gang_reads_on_each_rank_what_was_made_there():
    """A copy that another task was sent is not read twice, although it may be there."""
    tasks = [
        Task("rollout/0", Kind.ROLLOUT),
        Task("update/0", Kind.UPDATE, inputs=("rollout/0.path",), after=("reward/0",)),
        Task("decode/0", Kind.DECODE, inputs=("rollout/0.path",), after=("update/0",)),
        Task("reward/0", Kind.REWARD, values=("score/0",)),
        Task("score/0", Kind.SCORE, after=("rollout/0",)),
    ]
    places = {"rollout/0": (0,), "update/0": (0, 1), "decode/0": (1,), "reward/0": (CONTROLLER,), "score/0": (1,)}
    engines = both()
    result = run_virtually(Graph(tasks), Plan(places, tuple(places)), ONE_SECOND, Program(), engines)
    assert [s.end for s in result.trace.spans if s.lane == TRANSFER] == [2.0, 2.0], "the copy was there in time"
    assert result.values["update/0"] == {0: [2.0, 2.0], 1: [1.0, 1.0]}


def test_an_invalid_outcome_has_its_reason_in_values_and_trace():
    class Silent(Recorder):
        def run(self, work: Work) -> Result:
            return Result(invalid={work.tasks[0].id: "the judge gave no answer"})

    tasks = [Task("score/0", Kind.SCORE), Task("reward/0", Kind.REWARD, values=("score/0",))]
    plan = Plan({"score/0": (0,), "reward/0": (CONTROLLER,)}, ("score/0", "reward/0"))
    program = Program()
    result = run_virtually(Graph(tasks), plan, ONE_SECOND, program, {0: Silent(0)})
    assert program.given["reward/0",] == {"score/0": Invalid("the judge gave no answer")}
    assert result.values["score/0"] == Invalid("the judge gave no answer")
    assert result.trace.invalid == {"score/0": "the judge gave no answer"}


def test_what_a_reward_makes_unneeded_is_never_run():
    engines = both()
    result = run_virtually(GRAPH, PLAN, ONE_SECOND, Program(unneeded=["replay/0"]), engines)
    ran = {name for span in result.trace.spans if span.lane == DEVICE for name in span.tasks}
    assert ran == {"rollout/0", "decode/0", "reward/0", "update/0"}
    assert "replay/0" not in result.values
    assert result.values["update/0"] == {0: [1.0, 1.0], 1: [1.0, 1.0]}


def test_a_task_that_raises_is_named_with_its_rank_and_its_traceback():
    with pytest.raises(TaskFailed) as caught:
        run_virtually(GRAPH, PLAN, ONE_SECOND, Program(), both(fails="replay/0"))
    assert str(caught.value) == "replay/0 on rank 1 failed: ValueError: it broke"
    (note,) = caught.value.__notes__
    assert note.startswith("Traceback") and note.endswith("ValueError: it broke")


def test_an_error_raised_on_purpose_needs_no_traceback():
    with pytest.raises(TaskFailed) as caught:
        run_virtually(GRAPH, PLAN, ONE_SECOND, Program(), both(fails="update/0", error=TrainingError("no hope")))
    assert str(caught.value).startswith("update/0 on rank ")
    assert str(caught.value).endswith(" failed: no hope")
    assert not hasattr(caught.value, "__notes__")


def test_a_value_that_cannot_be_sent_is_an_error_of_its_task():
    class Careless(Recorder):
        def run(self, work: Work) -> Result:
            return Result(values={work.tasks[0].id: torch.zeros(1)})

    plan = Plan({"score/0": (0,)}, ("score/0",))
    with pytest.raises(TaskFailed, match="score/0 on rank 0 failed: TypeError: .* type Tensor"):
        run_virtually(Graph([Task("score/0", Kind.SCORE)]), plan, ONE_SECOND, Program(), {0: Careless(0)})


async def two_workers() -> tuple[Controller, list[MemoryLink], list[asyncio.Task[Stop]]]:
    """A controller and the workers of ranks 0 and 1, whose links are the last but one."""
    network, clock = FakeNetwork(ONE_SECOND), asyncio.get_running_loop().time
    ends = {rank: MemoryLink.pair() for rank in (0, 1)}
    controller = Controller({rank: end for rank, (end, _) in ends.items()}, clock)
    serving = []
    for rank, (_, end) in ends.items():
        worker = Worker(rank, end, FakeDevice(rank, network, Recorder(rank)), FakeTransport(rank, network), clock)
        end.send(Hello(rank, 100 + rank))
        end.send(Ready())
        serving.append(asyncio.create_task(worker.run()))
    return controller, [end for _, end in ends.values()], serving


def test_steps_share_one_sequence_and_each_has_a_trace_of_its_own():
    """The fake transports refuse a number that does not grow."""

    async def main() -> None:
        controller, _, serving = await two_workers()
        await controller.ready()
        assert controller.pids == {0: 100, 1: 101}
        results = [await controller.run(GRAPH, PLAN, Program()) for _ in range(3)]
        assert controller.transfers == 3 * 2  # a path and a sum
        assert results[0].trace == results[1].trace == results[2].trace
        assert results[0].trace.seconds > 0
        await controller.close()
        assert await asyncio.gather(*serving) == [Stop(), Stop()]

    VirtualLoop.run(main())


def test_a_rank_that_hangs_up_is_lost_and_what_it_did_is_named():
    async def main() -> None:
        controller, (_, link), serving = await two_workers()
        await controller.ready()
        step = asyncio.create_task(controller.run(GRAPH, PLAN, Program()))
        await until(3.5)
        await link.close()
        with pytest.raises(RankLost) as caught:
            await step
        assert str(caught.value) == "rank 1 (process 101) was lost in replay/0: its process ended or hung up"
        await controller.close(str(caught.value))
        assert await asyncio.gather(*serving) == [Stop(str(caught.value))] * 2

    VirtualLoop.run(main())


@pytest.mark.parametrize(
    ("last", "error", "sentence"),
    [
        (WorkerFailed(0, "no model", ""), TaskFailed, "rank 1 could not start: no model"),
        (None, RankLost, r"rank 1 \(process 101\) was lost before it was ready: its process ended or hung up"),
    ],
)
def test_a_rank_that_cannot_start_is_named(last: WorkerFailed | None, error: type[Exception], sentence: str):
    async def main() -> None:
        ends = {rank: MemoryLink.pair() for rank in (0, 1)}
        controller = Controller({rank: end for rank, (end, _) in ends.items()}, asyncio.get_running_loop().time)
        for rank, (_, end) in ends.items():
            end.send(Hello(rank, 100 + rank))
        ends[0][1].send(Ready())
        if last:
            ends[1][1].send(last)
        else:
            await ends[1][1].close()
        with pytest.raises(error, match=sentence):
            await controller.ready()
        await controller.close()

    VirtualLoop.run(main())


def test_a_worker_that_loses_the_controller_ends():
    async def main() -> None:
        controller, _, serving = await two_workers()
        await controller._links[0].close()
        with pytest.raises(EOFError):
            await serving[0]
        await controller.close()
        await serving[1]

    VirtualLoop.run(main())


@asynccontextmanager
async def lone_worker(network: FakeNetwork, *waiting: Message) -> AsyncIterator[tuple[Worker, MemoryLink]]:
    """A worker of rank 0 that begins to serve when the messages `waiting` have all arrived, and the link to it."""
    here, there = MemoryLink.pair()
    device, transport = FakeDevice(0, network, Recorder(0)), FakeTransport(0, network)
    worker = Worker(0, there, device, transport, asyncio.get_running_loop().time)
    worker.store.put("rollout/0.path", torch.ones(2))
    for message in waiting:
        here.send(message)
    await until(0.0)
    serving = asyncio.create_task(worker.run())
    yield worker, here
    here.send(Stop())
    await serving


def test_what_moves_takes_its_place_before_a_gang_that_was_ordered_later():
    async def main() -> None:
        network = FakeNetwork(ONE_SECOND)
        gang = RunTask(1, (Task("update/0", Kind.UPDATE),), (), None, gang=(0, 1), sequence=2)
        async with lone_worker(network, Send(1, "rollout/0.path", 1), gang) as (_, link):
            assert isinstance(await link.receive(), TaskDone)
            assert network.sent.keys() == {1}

    VirtualLoop.run(main())


def test_a_worker_that_is_stopped_at_once_drops_what_it_was_to_begin():
    async def main() -> None:
        gang = RunTask(1, (Task("update/0", Kind.UPDATE),), (), None, gang=(0, 1), sequence=2)
        order = Receive(3, "rollout/1.path", 1, Header("float32", (2,)))
        async with lone_worker(FakeNetwork(ONE_SECOND), Send(1, "rollout/0.path", 1), gang, order, Stop("failed")):
            pass
        gc.collect()  # a coroutine that was never awaited would warn now

    VirtualLoop.run(main())


def test_a_rank_that_misses_another_leaves_it_to_that_ranks_link_to_say_so_first():
    class Torn(HashedDurations):
        def move(self, tensor: str, source: int, target: int) -> float:
            raise RankLost("rank 1 is gone")

    async def main() -> None:
        order = Receive(1, "rollout/1.path", 1, Header("float32", (2,)))
        async with lone_worker(FakeNetwork(Torn(0, (1.0,))), order) as (_, link):
            assert await link.receive() == WorkerFailed(0, "rank 1 is gone", "")
            assert asyncio.get_running_loop().time() == 1.0

    VirtualLoop.run(main())


def test_a_worker_keeps_a_tensor_until_it_is_told_to_forget_it():
    async def main() -> None:
        decode = RunTask(1, (TASKS[1],), ("decode/0.frames",), None)
        async with lone_worker(FakeNetwork(ONE_SECOND), decode) as (worker, link):
            headers = {"decode/0.frames": Header("float32", (2,))}
            assert await link.receive() == TaskDone(1, 0.0, 1.0, {"decode/0": [2.0, 2.0]}, {}, headers)
            assert worker.store["decode/0.frames"].tolist() == [2.0, 2.0]
            link.send(Forget("rollout/0.path"))
            link.send(Forget("decode/0.frames"))
            await asyncio.sleep(1)
            assert len(worker.store) == 0

    VirtualLoop.run(main())
