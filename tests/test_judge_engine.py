"""Rewards that are apart judge at the same time, each one batch after another, and rest only when nobody asks them."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, current_thread

import pytest
import torch

from asyncflow.core.graph import Kind, Task
from asyncflow.engine import Result, Work
from asyncflow.launch import EngineDevice
from engines.judge import JudgeEngine
from engines.orders import JudgeOrder
from engines.rewards.base import Outcome, PointwiseReward

SOON_S = 30.0


class Slow(PointwiseReward):
    """Notes what it is asked for, and answers when it may."""

    apart = True

    def __init__(self, name: str = "slow") -> None:
        self.name = name
        self.notes: list[str] = []
        self.asked, self.may = Event(), Event()

    def score(self, videos: Sequence[torch.Tensor], prompts: Sequence[str]) -> list[Outcome]:
        self.notes.append("score")
        self.asked.set()
        assert self.may.wait(SOON_S)
        return [1.0 for _ in videos]

    def rest(self) -> None:
        self.notes.append("rest")


class Together(Slow):
    """Answers once all that share its barrier are judging."""

    def __init__(self, name: str, barrier: Barrier) -> None:
        super().__init__(name)
        self.barrier = barrier

    def score(self, videos: Sequence[torch.Tensor], prompts: Sequence[str]) -> list[Outcome]:
        self.notes.append(current_thread().name)
        self.barrier.wait(SOON_S)
        return [1.0 for _ in videos]


def work(judge: str) -> Work:
    task = Task(f"score/{judge}/0/0", Kind.SCORE, inputs=("decode/0.frames",), judge=judge, apart=True)
    return Work((task,), {"decode/0.frames": torch.zeros(1, 1, 1, 1, 3)}, JudgeOrder(("a cube",), ((0,),)))


def test_judges_that_are_apart_judge_at_once_beside_the_device():
    """Two of them, each in a thread of its own, and the engine's own work: all three are under way together."""
    barrier = Barrier(3)
    rewards = [Together("one", barrier), Together("two", barrier)]

    class Engine:
        def __init__(self) -> None:
            self.judges = JudgeEngine(rewards, "cpu")

        def run(self, work: Work) -> Result:
            if work.tasks[0].kind is Kind.SCORE:
                return self.judges.judge(work)
            barrier.wait(SOON_S)
            return Result(values={"thread": current_thread().name})

        def close(self) -> None:
            self.judges.close()

    async def main() -> None:
        device = EngineDevice()
        await device.load(Engine)
        own = Work((Task("replay/0", Kind.REPLAY),), {}, None)
        for _ in range(2):
            one, two, own_work = await asyncio.gather(*map(device.run, (work("one"), work("two"), own)))
            assert one.values == {"score/one/0/0": 1.0} and two.values == {"score/two/0/0": 1.0}
            assert own_work.values == {"thread": "asyncflow-engine"}
        await device.close()

    asyncio.run(main())
    assert [reward.notes for reward in rewards] == [["asyncflow-judge one"] * 2, ["asyncflow-judge two"] * 2]


def test_a_reward_rests_once_and_never_while_it_judges():
    """Where its rank trains on beside it, it is left in peace; then it rests until the next judgement."""
    slow = Slow()
    judges = JudgeEngine([slow], "cpu")
    judges.rest()
    judges.rest()
    with ThreadPoolExecutor(1) as apart:
        judging = apart.submit(judges.judge, work("slow"))
        assert slow.asked.wait(SOON_S)
        judges.rest()
        assert slow.notes == ["rest", "score"]
        slow.may.set()
        assert judging.result(SOON_S).values == {"score/slow/0/0": 1.0}
    judges.rest()
    judges.rest()
    assert slow.notes == ["rest", "score", "rest"]


def test_a_judgement_waits_for_the_rest_under_way():
    """Nobody else may ask it meanwhile; what came is judged afterwards."""
    resting, may = Event(), Event()

    class Resting(Slow):
        def rest(self) -> None:
            resting.set()
            assert may.wait(SOON_S)
            super().rest()

    slow = Resting()
    slow.may.set()
    judges = JudgeEngine([slow], "cpu")
    with ThreadPoolExecutor(2) as threads:
        rest = threads.submit(judges.rest)
        assert resting.wait(SOON_S)
        judging = threads.submit(judges.judge, work("slow"))
        assert judges._judges["slow"]._asked.locked() and not slow.notes
        may.set()
        rest.result(SOON_S)
        judging.result(SOON_S)
    assert slow.notes == ["rest", "score"]


def test_a_rest_that_fails_leaves_the_reward_free():
    class Failing(Slow):
        def rest(self) -> None:
            raise RuntimeError("it cannot rest")

    slow = Failing()
    slow.may.set()
    judges = JudgeEngine([slow], "cpu")
    with pytest.raises(RuntimeError, match="it cannot rest"):
        judges.rest()
    assert judges.judge(work("slow")).values == {"score/slow/0/0": 1.0}
