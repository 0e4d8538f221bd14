"""What a reward is: a judge of one video, or of two, and how its outcomes become one number a candidate.

Invariant: a judge answers with a finite number or with `Invalid` and a reason; a failed judgement is never a silent
zero. Judging runs on reward ranks (`load`, then `score` or `compare`); `pairs` and `rewards` are pure and run on the
controller. Advantages belong to the algorithm.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from asyncflow.engine import Invalid
from asyncflow.errors import RewardError

Outcome: TypeAlias = float | Invalid


class Reward(ABC):
    """A reward; subclass `PointwiseReward` or `PairwiseReward`."""

    name: ClassVar[str]

    def load(self, device: torch.device) -> None:  # noqa: B027 - a rule has nothing to load
        """Load what judging needs; called once, on the ranks that judge."""

    @abstractmethod
    def rewards(self, outcomes: Mapping[tuple[int, ...], Outcome], group_size: int) -> list[Outcome]:
        """One reward for each candidate of a group, from the outcomes by candidate or by pair."""


class PointwiseReward(Reward):
    """A reward that judges each video by itself."""

    @abstractmethod
    def score(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Outcome]:
        """A score for each video, uint8 [T, H, W, 3], and its prompt."""

    def rewards(self, outcomes: Mapping[tuple[int, ...], Outcome], group_size: int) -> list[Outcome]:
        """The scores themselves."""
        return [outcomes[candidate,] for candidate in range(group_size)]


class PairwiseReward(Reward):
    """A reward that compares two candidates of a group; a candidate's reward is its win rate.

    The win rate is that of Pref-GRPO (CodeGoat24/Pref-GRPO): points over comparisons, a tie half a point. Since the
    rates of a group always average one half, such a reward says nothing about a group as a whole.
    """

    def pairs(self, group_size: int) -> list[tuple[int, int]]:
        """Who meets whom: by default everyone, the lower position shown first."""
        return list(combinations(range(group_size), 2))

    @abstractmethod
    def compare(self, videos: Sequence[tuple[Tensor, Tensor]], prompts: Sequence[str]) -> list[Outcome]:
        """For each pair of videos, uint8 [T, H, W, 3], the first one's points: 1 it wins, 0.5 a tie, 0 it loses."""

    def rewards(self, outcomes: Mapping[tuple[int, ...], Outcome], group_size: int) -> list[Outcome]:
        """Each candidate's points over its valid comparisons; invalid if it has none."""
        points: list[list[float]] = [[] for _ in range(group_size)]
        reasons = [""] * group_size
        for (first, second), outcome in outcomes.items():
            if isinstance(outcome, Invalid):
                reasons[first] = reasons[second] = outcome.reason
            else:
                points[first].append(outcome)
                points[second].append(1.0 - outcome)
        return [
            sum(won) / len(won) if won else Invalid(f"no comparison is valid, the last because {reason}")
            for won, reason in zip(points, reasons, strict=True)
        ]


def checked(outcomes: Sequence[Outcome], expected: int, reward: str, prompts: Sequence[str]) -> list[Outcome]:
    """`outcomes` as they are. Raises RewardError if one is neither finite nor invalid, or if their number is wrong."""
    if not isinstance(outcomes, Sequence):  # a reward may be anybody's code
        raise RewardError(f"reward {reward} gave a {type(outcomes).__name__}; return a list with an outcome for each")
    if len(outcomes) != expected:
        raise RewardError(f"reward {reward} gave {len(outcomes)} outcomes for {expected} judgements; return one each")
    for outcome, prompt in zip(outcomes, prompts, strict=True):
        if not isinstance(outcome, Invalid) and not (isinstance(outcome, int | float) and math.isfinite(outcome)):
            raise RewardError(
                f"reward {reward} gave {outcome!r} for the prompt {prompt!r}; "
                "return a finite number, or Invalid(reason) if the video cannot be judged"
            )
    return [outcome if isinstance(outcome, Invalid) else float(outcome) for outcome in outcomes]
