"""UnifiedReward-Flex (CodeGoat24, arXiv 2602.02380): compares two videos category by category and answers in JSON."""

import json
from collections.abc import Iterator
from typing import Any

from engines.rewards.base import Outcome
from engines.rewards.chat.base import Reply
from engines.rewards.protocols.base import SingleTurn, blend, invalid, winner

CATEGORIES = 3
"""Those that every answer must have; the model may add one, which does not count."""

_SIDE = {"enum": ["Video 1", "Video 2"]}
_TEXT = {"type": "string"}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_DIMENSION = _object(name=_TEXT, reason_1=_TEXT, reason_2=_TEXT, score_1={"type": "number"}, score_2={"type": "number"})
_CATEGORY = _object(
    name=_TEXT,
    dims={"type": "array", "items": _DIMENSION, "minItems": 1, "maxItems": 5},
    cat_reason=_TEXT,
    cat_winner=_SIDE,
)


class UnifiedRewardFlex(SingleTurn):
    """See the module."""

    videos = 2
    schema = _object(
        prompt=_TEXT,
        categories={"type": "array", "items": _CATEGORY, "minItems": CATEGORIES, "maxItems": CATEGORIES + 1},
        reason=_TEXT,
        winner=_SIDE,
    )

    def read(self, reply: Reply) -> Outcome:
        """See `SingleTurn`."""
        return parse(reply.text)


def parse(text: str) -> Outcome:
    """The first video's points: those of the overall winner, blended with those of the first three categories.

    Categories count by position, since their names drift from answer to answer.
    """
    answers = [found for found in _objects(text) if "winner" in found]
    if len(answers) != 1:
        return invalid("parse", f"expected one JSON object with a winner, found {len(answers)}")
    (answer,) = answers
    overall = winner(str(answer["winner"]))
    if overall is None:
        return invalid("parse", f'the winner is "{answer["winner"]}", neither of the videos')
    categories = answer.get("categories")
    if not isinstance(categories, list) or len(categories) < CATEGORIES:
        return invalid("parse", f"expected at least {CATEGORIES} categories")
    points = []
    for place, category in enumerate(categories[:CATEGORIES], 1):
        won = winner(str(category.get("cat_winner", ""))) if isinstance(category, dict) else None
        if won is None:
            return invalid("parse", f"category {place} has no winner")
        points.append(won)
    return blend(overall, points)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects that stand in a text, whatever is around them."""
    decoder = json.JSONDecoder()
    place = text.find("{")
    while place >= 0:
        try:
            found, end = decoder.raw_decode(text, place)
            yield found
        except (ValueError, RecursionError):
            end = place + 1
        place = text.find("{", end)
