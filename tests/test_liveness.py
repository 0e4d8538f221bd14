"""Who gives no sign of life, or of progress, for too long is noticed, in turns of one's own loop; who does is not."""

import asyncio
import math
import signal
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from asyncflow.controller import Controller
from asyncflow.core.cost import StatedCosts
from asyncflow.core.graph import Graph, Kind, Task
from asyncflow.core.plan import Plan
from asyncflow.engine import Result, Work
from asyncflow.errors import Interrupted, RankLost, TaskFailed
from asyncflow.liveness import Limits, LivingLink, outlive, stacks, stalled
from asyncflow.testing import FakeDevice, FakeNetwork, FakeTransport, MemoryLink, NoProgram, VirtualLoop, until
from asyncflow.wire import Beat, Hello, Ready, RunTask
from asyncflow.worker import Worker

LIMITS = Limits(beat=1.0, silence=5.0, unknown=20.0)
ROLLOUT = Task("rollout/0", Kind.ROLLOUT)
GRAPH, PLAN = Graph([ROLLOUT]), Plan({"rollout/0": (0,)}, ("rollout/0",))


def test_a_silent_end_is_at_its_end_and_one_that_beats_is_not():
    """Even after hours in which there was nothing to say."""

    async def main() -> None:
        ends = MemoryLink.pair()
        one, other = (LivingLink(end, LIMITS) for end in ends)
        await until(7200.0)
        one.send(Ready())
        heard = [await other.receive() for _ in range(7200)]
        assert set(map(type, heard)) == {Beat, Ready}
        for task in other._tasks:
            task.cancel()  # it says nothing any more, but has not hung up
        heard = [await one.receive() for _ in range(7200)]
        assert set(map(type, heard)) == {Beat}
        for _ in range(2):
            with pytest.raises(EOFError, match="no sign of life for 5 seconds; its process is stopped or blocked"):
                await one.receive()
        assert 7205.0 <= asyncio.get_running_loop().time() <= 7208.0
        await one.close()

    VirtualLoop.run(main())


def test_a_beat_tells_how_late_it_was():
    async def main() -> None:
        ends = MemoryLink.pair()
        link = LivingLink(ends[0], LIMITS)
        loop = asyncio.get_running_loop()
        loop.call_later(0.5, lambda: setattr(loop, "now", 3.25))  # something blocks the loop meanwhile
        assert [await ends[1].receive() for _ in range(2)] == [Beat(2.25), Beat(0.0)]
        await link.close()

    VirtualLoop.run(main())


def test_what_stands_still_is_noticed_and_each_sign_begins_anew():
    async def main() -> float:
        signs = [0]
        for when in (3.0, 6.5, 10.0):
            asyncio.get_running_loop().call_at(when, signs.append, 0)
        await stalled(lambda: len(signs), 4.0)
        return asyncio.get_running_loop().time()

    assert 14.0 <= VirtualLoop.run(main()) <= 15.0


def test_patience_follows_what_tasks_take():
    costs = StatedCosts({"rollout": 30.0, "decode": 1.0})
    limits = Limits(slowness=10.0, least=60.0, unknown=3600.0)
    kinds = (Kind.ROLLOUT, Kind.DECODE, Kind.REPLAY)
    assert [limits.patience(costs, [Task(f"{kind}/0", kind)], 0) for kind in kinds] == [300.0, 60.0, 3600.0]
    assert limits.patience(None, [ROLLOUT], 0) == 3600.0


class Hanging(FakeDevice):
    """A device that goes on to ask whether its work is needed until second `until`, and then hangs."""

    last = 0.0

    async def run(self, work: Work) -> Result:
        while asyncio.get_running_loop().time() < self.last:
            work.is_unneeded()
            await asyncio.sleep(1.0)
        await asyncio.Event().wait()
        return Result()


@asynccontextmanager
async def running(device: FakeDevice, limits: Limits | None = LIMITS) -> AsyncIterator[Controller]:
    """A controller of one rank over links that know whether it lives."""
    clock = asyncio.get_running_loop().time
    here, there = (LivingLink(end, LIMITS) for end in MemoryLink.pair())
    worker = Worker(0, there, device, FakeTransport(0, FakeNetwork(StatedCosts({}))), clock)
    there.send(Hello(0, 100))
    there.send(Ready())
    controller = Controller({0: here}, clock, limits)
    serving = asyncio.create_task(worker.run())
    await controller.ready()
    yield controller
    await controller.close()
    await serving
    await there.close()


@pytest.mark.parametrize("last", [0.0, 100.0])
def test_an_engine_that_hangs_ends_the_step_and_one_that_goes_on_does_not(last: float):
    """Its questions between chunks are signs of progress."""

    async def main() -> float:
        device = Hanging(0, FakeNetwork(StatedCosts({})))
        device.last = last
        async with running(device) as controller:
            with pytest.raises(TaskFailed) as caught:
                await controller.run(GRAPH, PLAN, NoProgram())
        sentence = "rollout/0 on rank 0 failed: its engine gave no sign of progress for 20 seconds"
        assert str(caught.value) == sentence
        (note,) = caught.value.__notes__
        assert "test_liveness.py" in note
        return asyncio.get_running_loop().time()

    assert last + 19.0 <= VirtualLoop.run(main()) <= last + 23.0


def test_a_step_knows_the_largest_lag_of_each_rank():
    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(2.5, lambda: setattr(loop, "now", 4.0))
        async with running(FakeDevice(0, FakeNetwork(StatedCosts({"rollout": 10.0})))) as controller:
            result = await controller.run(GRAPH, PLAN, NoProgram())
        assert result.lags == {0: 1.0}

    VirtualLoop.run(main())


def test_without_limits_a_task_may_take_for_ever():
    """Nothing is sent but what is finite on the wire."""

    async def main() -> None:
        here, there = MemoryLink.pair()
        controller = Controller({0: here}, asyncio.get_running_loop().time)
        step = asyncio.create_task(controller.run(GRAPH, PLAN, NoProgram()))
        message = await there.receive()
        assert isinstance(message, RunTask) and message.patience == math.inf
        await there.close()
        with pytest.raises(RankLost):
            await step
        await controller.close()

    VirtualLoop.run(main())


def test_a_run_interrupted_between_two_steps_may_still_run_one():
    async def main() -> None:
        async with running(FakeDevice(0, FakeNetwork(StatedCosts({"rollout": 10.0})))) as controller:
            controller.interrupt()
            with pytest.raises(Interrupted):
                await controller.run(GRAPH, PLAN, NoProgram())
            assert (await controller.run(GRAPH, PLAN, NoProgram())).trace.seconds == 10.0

    VirtualLoop.run(main())


def test_a_step_that_changes_what_stays_is_not_given_up():
    """An update that has begun is done, and all of its step; the next one is not begun."""
    graph = Graph([Task("update/0", Kind.UPDATE), Task("decode/0", Kind.DECODE, after=("update/0",))])
    plan = Plan({"update/0": (0,), "decode/0": (0,)}, ("update/0", "decode/0"))

    async def main() -> None:
        costs = StatedCosts({"update": 2.0, "decode": 3.0})
        async with running(FakeDevice(0, FakeNetwork(costs))) as controller:
            asyncio.get_running_loop().call_later(1.0, controller.interrupt)
            assert (await controller.run(graph, plan, NoProgram())).trace.seconds == 5.0
            with pytest.raises(Interrupted):
                await controller.run(graph, plan, NoProgram())

    VirtualLoop.run(main())


def test_stacks_show_every_thread():
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    shown = stacks()
    end.set()
    thread.join()
    assert shown.count("thread 0x") + shown.count("Thread 0x") >= 2
    assert "in test_stacks_show_every_thread" in shown


def test_a_stopped_process_is_killed_and_one_that_ends_is_waited_for():
    with (
        subprocess.Popen(["sleep", "60"]) as stopped,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as ending,
    ):
        stopped.send_signal(signal.SIGSTOP)
        assert ending.stdin
        ending.stdin.close()
        outlive([ending.pid], 10.0)
        outlive([stopped.pid], 0.05)
        assert (ending.wait(10), stopped.wait(10)) == (0, -signal.SIGKILL)
    outlive([stopped.pid], 0.0)  # it is gone
