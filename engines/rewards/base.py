"""What a reward is: a judge of one video, or of two, and how its outcomes become one number a candidate.

Invariant: a judge answers with a finite number or with `Invalid` and a reason; a failed judgement is never a silent
zero. Judging runs on reward ranks (`load`, then `score` or `compare`, at last `close`); `pairs` and `rewards` are pure
and run on the controller. Advantages belong to the algorithm.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from asyncflow.engine import Invalid
from asyncflow.errors import RewardError

Outcome: TypeAlias = float | Invalid
OnInvalid: TypeAlias = Literal["drop-candidate", "drop-group", "abort"]


@dataclass(frozen=True)
class Effort:
    """What a judgement took of a judge that writes: seconds, tokens written, and turns of its conversation."""

    seconds: float
    tokens: int
    turns: int


@dataclass(frozen=True)
class Needs:
    """Bytes that a reward will take on its device: `held` by what for, and for its KV cache at least and at most."""

    held: Mapping[str, int] = field(default_factory=dict)
    least_cache: int = 0
    most_cache: int = 0


class Reward(ABC):
    """A reward; subclass `PointwiseReward` or `PairwiseReward`."""

    name: str
    on_invalid: OnInvalid = "drop-candidate"
    """What one candidate without a reward means: it alone is left out, or its group is, or the run ends."""
    apart: bool = False
    """Whether its judgements leave the rank's device alone, since a server, other processes or the CPU compute them.

    It is then called from a thread of its own, one batch at a time, while the device goes on with other work.
    """
    max_invalid: float = 1.0
    """The share of its judgements over some steps that may be invalid; more ends the run."""
    efforts: Sequence[Effort] = ()
    """What each judgement of the last batch took, where the reward knows."""
    progress: Callable[[], object] = staticmethod(lambda: None)
    """What a reward that judges for long calls meanwhile, now and then, as a sign that it does not hang."""
    cache_bytes: int = 0
    """What it may take for its KV cache, between the bounds that it `needs`; set before it is loaded."""
    fps: float = 16.0
    """Frames a second of the videos that it judges; set before it is loaded."""

    def needs(self, height: int, width: int, device: torch.device) -> Needs:
        """What it will take there to judge videos of that many pixels; asked before anything is loaded."""
        return Needs()

    def load(self, device: torch.device) -> None:  # noqa: B027 - a rule has nothing to load
        """Load what judging needs; called once, on the ranks that judge."""

    def rest(self) -> None:  # noqa: B027
        """Give back what memory it can until the next judgement; called where its rank goes on to train.

        Once after a judgement, and never during one.
        """

    def close(self) -> None:  # noqa: B027 - nor to give back
        """Give back what was loaded, processes and connections above all; called once, after the last judgement."""

    def rewards(self, outcomes: Mapping[tuple[int, ...], Outcome], group_size: int) -> list[Outcome]:
        """One reward for each candidate of a group, from the outcomes by candidate or by pair, after `on_invalid`.

        Raises RewardError for an invalid one where that ends the run.
        """
        rewards = self.combine(outcomes, group_size)
        failed = [reward.reason for reward in rewards if isinstance(reward, Invalid)]
        if failed and self.on_invalid == "abort":
            raise RewardError(f"reward {self.name} could not judge a candidate, which is to end the run: {failed[0]}")
        if failed and self.on_invalid == "drop-group":
            return [r if isinstance(r, Invalid) else Invalid(f"dropped with its group: {failed[0]}") for r in rewards]
        return rewards

    @abstractmethod
    def combine(self, outcomes: Mapping[tuple[int, ...], Outcome], group_size: int) -> list[Outcome]:
        """One reward for each candidate of a group, from the outcomes by candidate or by pair."""


class PointwiseReward(Reward):
    """A reward that judges each video by itself."""

    @abstractmethod
    def score(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Outcome]:
        """A score for each video, uint8 [T, H, W, 3], and its prompt."""

    def combine(self, outcomes: Mapping[tuple[int, ...], Outcome], group_size: int) -> list[Outcome]:
        """The scores themselves."""
        return [outcomes[candidate,] for candidate in range(group_size)]


class PairwiseReward(Reward):
    """A reward that compares two videos of one prompt; a candidate's reward is its win rate.

    The win rate is that of Pref-GRPO (CodeGoat24/Pref-GRPO): points over comparisons, a tie half a point. Where
    candidates meet each other, the rates of a group average one half, which says nothing about the group as a whole.
    That of videos against the base model's does; an evaluation always compares with it.
    """

    def pairs(self, group_size: int) -> list[tuple[int, int]]:
        """Who meets whom, the first of a pair shown first: by default all candidates, the lower position first.

        Position `group_size` is a video of the base model: the same prompt, noise as a further candidate would have,
        and no adapter, not even one that the run started from. It is sampled if a pair names it.
        """
        return list(combinations(range(group_size), 2))

    @abstractmethod
    def compare(self, videos: Sequence[tuple[Tensor, Tensor]], prompts: Sequence[str]) -> list[Outcome]:
        """For each pair of videos, uint8 [T, H, W, 3], the first one's points: 1 it wins, 0.5 a tie, 0 it loses."""

    def combine(self, outcomes: Mapping[tuple[int, ...], Outcome], group_size: int) -> list[Outcome]:
        """Each candidate's points over its valid comparisons; invalid if it has none. The base model has no reward."""
        points: list[list[float]] = [[] for _ in range(group_size + 1)]
        reasons = [""] * (group_size + 1)
        for (first, second), outcome in outcomes.items():
            if isinstance(outcome, Invalid):
                reasons[first] = reasons[second] = outcome.reason
            else:
                points[first].append(outcome)
                points[second].append(1.0 - outcome)
        return [
            sum(won) / len(won) if won else Invalid(f"no comparison is valid, the last because {reason}")
            for won, reason in zip(points[:-1], reasons[:-1], strict=True)
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
