"""The judges of a rank: the rewards that it loads, and what becomes of a batch of judgements.

Invariant: a reward is asked for one thing at a time, whichever thread asks: judgements of one that is apart come from
a thread of its own. `rank` routes to it.
"""

from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from msgspec import convert
from torch import Tensor

from asyncflow.engine import Invalid, Result, Work
from engines.orders import JudgeOrder
from engines.rewards.base import Outcome, PairwiseReward, PointwiseReward, Reward, checked


class JudgeEngine:
    """Scores and compares."""

    def __init__(self, rewards: Sequence[Reward], device: str) -> None:
        self._judges = {reward.name: _Judge(reward) for reward in rewards}
        for reward in rewards:
            reward.load(torch.device(device))

    def judge(self, work: Work) -> Result:
        """The outcome of each task of a judge batch, as value or as invalid with its reason.

        What a judgement took, where the reward says so, is the value `effort/<task id>`.
        """
        return self._judges[work.tasks[0].judge].judge(work)

    def rest(self) -> None:
        """Let the rewards that are not judging rest until their next judgement."""
        for judge in self._judges.values():
            judge.rest()

    def close(self) -> None:
        """Close the rewards; called once, after the last judgement."""
        for judge in self._judges.values():
            judge.reward.close()


class _Judge:
    """A reward, who is asking it, and whether it rests."""

    def __init__(self, reward: Reward) -> None:
        self.reward = reward
        self._asked = Lock()
        self._rests = False

    def judge(self, work: Work) -> Result:
        order = convert(work.payload, JudgeOrder)
        videos: list[list[Tensor]] = []
        for task, places in zip(work.tasks, order.places, strict=True):
            names = task.inputs if len(task.inputs) == len(places) else task.inputs * len(places)
            videos.append([work.tensors[name][place] for name, place in zip(names, places, strict=True)])
        with self._asked:
            self._rests = False
            self.reward.progress = work.is_unneeded
            outcomes = self._outcomes(videos, order.prompts)
            efforts = self.reward.efforts
        by_task = dict(zip([task.id for task in work.tasks], outcomes, strict=True))
        invalid = {name: outcome.reason for name, outcome in by_task.items() if isinstance(outcome, Invalid)}
        values: dict[str, Any] = {name: made for name, made in by_task.items() if not isinstance(made, Invalid)}
        values |= {f"effort/{name}": effort for name, effort in zip(by_task, efforts, strict=False)}
        return Result(values=values, invalid=invalid)

    def rest(self) -> None:
        if self._rests or not self._asked.acquire(blocking=False):
            return
        try:
            self.reward.rest()
            self._rests = True
        finally:
            self._asked.release()

    def _outcomes(self, videos: Sequence[Sequence[Tensor]], prompts: Sequence[str]) -> list[Outcome]:
        reward = self.reward
        if isinstance(reward, PairwiseReward):
            outcomes = reward.compare([(first, second) for first, second in videos], prompts)
        else:
            assert isinstance(reward, PointwiseReward)
            outcomes = reward.score([video for (video,) in videos], prompts)
        return checked(outcomes, len(videos), reward.name, prompts)
