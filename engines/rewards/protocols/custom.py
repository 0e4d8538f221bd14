"""A judge of one's own: a template says what to ask, and a regular expression where the answer stands in the reply."""

import math
import re

from engines.rewards.base import Outcome
from engines.rewards.chat.base import Reply
from engines.rewards.protocols.base import SingleTurn, invalid

FIRST, SECOND = ("1", "a", "first", "video 1", "video a"), ("2", "b", "second", "video 2", "video b")
EVEN = ("0", "tie", "equal", "same", "both", "draw")
POINTS = {**dict.fromkeys(FIRST, 1.0), **dict.fromkeys(SECOND, 0.0), **dict.fromkeys(EVEN, 0.5)}


class CustomScore(SingleTurn):
    """Scores a video: the answer is a number within `scale`."""

    videos = 1

    def __init__(
        self, template: str, frames: int, max_tokens: int, *, answer: re.Pattern[str], scale: tuple[float, float]
    ) -> None:
        super().__init__(template, frames, max_tokens)
        self._answer = answer
        self._scale = scale

    def read(self, reply: Reply) -> Outcome:
        """See `SingleTurn`."""
        return parse_score(reply.text, self._answer, self._scale)


class CustomCompare(SingleTurn):
    """Compares two videos: the answer is 1, A, first or Video 1, or the like of the second, or tie."""

    videos = 2

    def __init__(self, template: str, frames: int, max_tokens: int, *, answer: re.Pattern[str]) -> None:
        super().__init__(template, frames, max_tokens)
        self._answer = answer

    def read(self, reply: Reply) -> Outcome:
        """See `SingleTurn`."""
        return parse_winner(reply.text, self._answer)


def parse_score(text: str, answer: re.Pattern[str], scale: tuple[float, float]) -> Outcome:
    """The number that the pattern's one group finds, from 0 at the lower end of the scale to 1 at the upper."""
    found = _one(text, answer)
    if not isinstance(found, str):
        return found
    lowest, highest = scale
    try:
        score = float(found)
    except ValueError:
        score = math.nan
    if not lowest <= score <= highest:
        return invalid("parse", f'"{found}" is no number from {lowest:g} to {highest:g}')
    return (score - lowest) / (highest - lowest)


def parse_winner(text: str, answer: re.Pattern[str]) -> Outcome:
    """The first video's points, by the word that the pattern's one group finds."""
    found = _one(text, answer)
    if not isinstance(found, str):
        return found
    points = POINTS.get(" ".join(found.casefold().split()))
    return invalid("parse", f'"{found}" names neither video') if points is None else points


def _one(text: str, answer: re.Pattern[str]) -> str | Outcome:
    """The answer, if it is there and always the same."""
    found: set[str] = {match.strip() for match in answer.findall(text)}
    if len(found) != 1:
        return invalid("parse", f"the pattern finds {len(found) or 'no'} answers")
    return found.pop()
