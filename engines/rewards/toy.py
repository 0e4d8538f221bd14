"""The toy's rewards: the pixel judge as `colour` and `motion`, and `colour-duel`, which compares two videos."""

from collections.abc import Sequence

from torch import Tensor

from engines.rewards.base import Outcome, PairwiseReward, PointwiseReward
from engines.rewards.pixels import colour_score, motion_score


class Colour(PointwiseReward):
    """Is the colour that the prompt names kept over the whole video? In [0, 1]."""

    name = "colour"

    def score(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Outcome]:
        """See `PointwiseReward`."""
        return [colour_score(video, prompt) for video, prompt in zip(videos, prompts, strict=True)]


class Motion(PointwiseReward):
    """Does the object move as the prompt says? In [0, 1]."""

    name = "motion"

    def score(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Outcome]:
        """See `PointwiseReward`."""
        return [motion_score(video, prompt) for video, prompt in zip(videos, prompts, strict=True)]


class ColourDuel(PairwiseReward):
    """Which of two videos keeps the colour better? A tie where their colour scores differ by less than 0.01."""

    name = "colour-duel"

    def compare(self, videos: Sequence[tuple[Tensor, Tensor]], prompts: Sequence[str]) -> list[Outcome]:
        """See `PairwiseReward`."""
        points: list[Outcome] = []
        for (first, second), prompt in zip(videos, prompts, strict=True):
            lead = colour_score(first, prompt) - colour_score(second, prompt)
            points.append(0.5 if abs(lead) < 0.01 else float(lead > 0))
        return points
