"""Judges for tests, given as `engines.rewards.testing:Class`: quick, and wrong on demand."""

import math
from collections.abc import Sequence

from torch import Tensor

from asyncflow.engine import Invalid
from engines.rewards.base import Outcome, PairwiseReward, PointwiseReward


class Brightness(PointwiseReward):
    """The mean of all pixels, over 255: it differs from video to video, and is the same on every rank."""

    name = "brightness"

    def score(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Outcome]:
        """See `PointwiseReward`."""
        return [video.double().mean().item() / 255 for video in videos]


class BrightnessDuel(PairwiseReward):
    """The brighter video wins."""

    name = "brightness-duel"

    def compare(self, videos: Sequence[tuple[Tensor, Tensor]], prompts: Sequence[str]) -> list[Outcome]:
        """See `PairwiseReward`."""
        return [float(first.double().mean() > second.double().mean()) for first, second in videos]


class NotANumber(Brightness):
    """Forgets that a score must be finite."""

    name = "not-a-number"

    def score(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Outcome]:
        """See `PointwiseReward`."""
        return [math.nan for _ in videos]


class Blind(Brightness):
    """Cannot judge what moves left."""

    name = "blind"

    def score(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Outcome]:
        """See `PointwiseReward`."""
        scores = super().score(videos, prompts)
        return [
            Invalid("it moves left") if "left" in prompt.split() else score
            for score, prompt in zip(scores, prompts, strict=True)
        ]
