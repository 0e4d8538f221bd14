"""UnifiedReward-2.0 (CodeGoat24): scores one video from 1 to 5 for alignment, physics and style.

Integers from 1 to 5 tie often, up to whole groups. With `expectation` a score is the mean of the digits 1 to 5 weighted
by the probability that the model gave each of them, which seldom ties.
"""

import math
import re
from collections.abc import Mapping
from itertools import accumulate

from asyncflow.engine import Invalid
from engines.rewards.base import Outcome
from engines.rewards.chat.base import Reply
from engines.rewards.protocols.base import SingleTurn, invalid

DIMENSIONS = ("Alignment", "Physics", "Style")
LOWEST, HIGHEST = 1, 5
ALTERNATIVES = 20
"""Log-probabilities asked for each token, the most that an endpoint gives."""


class UnifiedRewardScore(SingleTurn):
    """See the module."""

    videos = 1

    def __init__(self, template: str, frames: int, max_tokens: int, *, expectation: bool = False) -> None:
        super().__init__(template, frames, max_tokens)
        self.top_logprobs = ALTERNATIVES if expectation else 0

    def read(self, reply: Reply) -> Outcome:
        """See `SingleTurn`."""
        return expect(reply) if self.top_logprobs else parse(reply.text)


def parse(text: str) -> Outcome:
    """The mean score, from 0 for all 1 to 1 for all 5."""
    found = _find(text)
    return found if isinstance(found, Invalid) else _scaled([float(match["score"]) for match in found])


def expect(reply: Reply) -> Outcome:
    """The same of the scores that the model's probabilities expect where each score stands."""
    found = _find(reply.text)
    if isinstance(found, Invalid):
        return found
    if "".join(token for token, _ in reply.logprobs) != reply.text:
        return invalid("client", "the engine gave no log-probabilities for the text; set expectation = false")
    scores = []
    for match in found:
        token, alternatives = _token_at(reply, match.start("score"))
        digits = [(int(text), math.exp(p)) for text, p in alternatives.items() if text.strip() in set("12345")]
        if token.strip() != match["score"] or not digits:
            return invalid("parse", f'the score {match["score"]} is no token of its own, but part of "{token}"')
        total = sum(weight for _, weight in digits)
        scores.append(sum(digit * weight for digit, weight in digits) / total)
    return _scaled(scores)


def _token_at(reply: Reply, place: int) -> tuple[str, Mapping[str, float]]:
    """The token that holds the character at `place` of the text, and its alternatives."""
    ends = accumulate(len(token) for token, _ in reply.logprobs)
    return next(item for item, end in zip(reply.logprobs, ends, strict=True) if end > place)


def _find(text: str) -> list[re.Match[str]] | Invalid:
    """Where each dimension's score stands."""
    found = []
    for name in DIMENSIONS:
        pattern = rf"\b{name}\s+Score[\s*]*(?:\(\s*1\s*-\s*5\s*\))?[\s:=*]*(?P<score>-?\d+(?:\.\d+)?)(?!\w)"
        matches = list(re.finditer(pattern, text, re.IGNORECASE))
        if not matches:
            return invalid("parse", f"there is no {name} Score")
        if len({float(match["score"]) for match in matches}) > 1:
            return invalid("parse", f"there are several {name} Scores")
        if not LOWEST <= float(matches[0]["score"]) <= HIGHEST:
            return invalid("parse", f"the {name} Score {matches[0]['score']} is not from {LOWEST} to {HIGHEST}")
        found.append(matches[0])
    return found


def _scaled(scores: list[float]) -> float:
    return (sum(scores) / len(scores) - LOWEST) / (HIGHEST - LOWEST)
