"""UnifiedReward-Think (CodeGoat24): reasons about two videos, then says in a tag which one is better."""

import re

from engines.rewards.base import Outcome
from engines.rewards.chat.base import Reply
from engines.rewards.protocols.base import SingleTurn, invalid, winner

ANSWER = re.compile(r"<\s*answer\s*>(.*?)<\s*/\s*answer\s*>", re.IGNORECASE | re.DOTALL)


class UnifiedRewardThink(SingleTurn):
    """See the module."""

    videos = 2

    def read(self, reply: Reply) -> Outcome:
        """See `SingleTurn`."""
        return parse(reply.text)


def parse(text: str) -> Outcome:
    """The first video's points."""
    answers = {winner(answer) for answer in ANSWER.findall(text)}
    if not answers:
        return invalid("parse", "there is no <answer>")
    if len(answers) > 1:
        return invalid("parse", "the answers contradict each other")
    (points,) = answers
    return invalid("parse", "the answer names neither video, or both") if points is None else points
