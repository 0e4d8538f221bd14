"""From a reward's specification to the reward, before anything loads, so that a wrong name ends a run at once.

It is `NAME` of a built-in one, `NAME@PLACE` or `FILE.toml` of a judge with a model (see `build`), or `module:Class` or
`module:function` of your own, each with `=WEIGHT` if not 1. Called by the commands.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from asyncflow.config import suggestion
from asyncflow.errors import ConfigError
from engines.rewards.base import OnInvalid, Outcome, PairwiseReward, PointwiseReward, Reward
from engines.rewards.build import KNOWN, SHIPPED, is_judge, make_judge
from engines.rewards.ocr import Ocr
from engines.rewards.toy import Colour, ColourDuel, Motion

BUILT_IN: dict[str, type[Reward]] = {reward.name: reward for reward in (Colour, Motion, ColourDuel, Ocr)}
NAMES = (*BUILT_IN, *SHIPPED)
SETTINGS = {"apart", "on_invalid", "max_invalid"}
"""What a reward of one's own may say of itself, by these attributes of its class or function."""


@dataclass(frozen=True)
class WeightedReward:
    """A reward and its weight in the loss."""

    reward: Reward
    weight: float

    @property
    def name(self) -> str:
        """The reward's name."""
        return self.reward.name


def parse_rewards(specifications: Sequence[str]) -> list[WeightedReward]:
    """The rewards that `--reward` names. Raises ConfigError for an unknown, repeated or malformed one, or for none."""
    rewards = [_parse(specification) for specification in specifications]
    names = [reward.name for reward in rewards]
    if not rewards:
        raise ConfigError(f"--reward: expected at least one reward; built in are {', '.join(sorted(NAMES))}")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--reward: {name} is given twice; give it once, with =WEIGHT")
    if not any(reward.weight for reward in rewards):
        raise ConfigError("--reward: all weights are 0, so there is nothing to train; make one positive")
    return rewards


def _parse(specification: str) -> WeightedReward:
    name, _, weight_text = specification.rpartition("=") if "=" in specification else (specification, "", "1")
    try:
        weight = float(weight_text)
    except ValueError:
        weight = math.nan
    if is_judge(specification) and "?" in specification:
        make_judge(specification)  # which says what to do instead
    if not math.isfinite(weight) or weight < 0:
        raise ConfigError(f"--reward: expected {name}=WEIGHT with a number of at least 0, got {specification}")
    if is_judge(name):
        return WeightedReward(make_judge(name), weight)
    if ":" in name:
        return WeightedReward(_import(name.removeprefix("python:")), weight)
    if name not in BUILT_IN:
        known = [*NAMES, *(f"{judge}@PLACE" for judge in KNOWN if not judge.startswith("custom"))]
        raise ConfigError(f'--reward: unknown reward "{name}"{suggestion(name, known)}; or give module:function')
    return WeightedReward(BUILT_IN[name](), weight)


class Scored(PointwiseReward):
    """A function of a video, uint8 [T, H, W, 3], and its prompt, that gives its score, or Invalid with a reason.

    What it has of a reward's settings, as attributes, is the reward's.
    """

    def __init__(self, function: Callable[[Tensor, str], Outcome]) -> None:
        self.name = function.__name__
        for setting in SETTINGS & vars(function).keys():
            setattr(self, setting, getattr(function, setting))
        self._function = function

    def score(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Outcome]:
        """See `PointwiseReward`."""
        return [self._function(video, prompt) for video, prompt in zip(videos, prompts, strict=True)]


def _import(name: str) -> Reward:
    module_name, _, own = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), own)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"--reward: cannot import {name}: {error}") from None
    policy = getattr(found, "on_invalid", Reward.on_invalid)
    if policy not in get_args(OnInvalid):
        raise ConfigError(
            f"--reward: {name}: on_invalid: expected one of {', '.join(get_args(OnInvalid))}, got {policy!r}"
        )
    if inspect.isfunction(found):
        return Scored(found)
    is_reward = inspect.isclass(found) and issubclass(found, PointwiseReward | PairwiseReward)
    if not is_reward or inspect.isabstract(found):
        raise ConfigError(
            f"--reward: {name} must be a function of a video and its prompt, or a subclass of "
            "PointwiseReward or PairwiseReward, with its method"
        )
    if not isinstance(getattr(found, "name", None), str) or not found.name:
        raise ConfigError(f"--reward: {name} has no name; give the class an attribute `name`")
    return found()
