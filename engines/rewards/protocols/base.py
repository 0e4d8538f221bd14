"""What a protocol is: a pure function from a case and the replies so far to the next ask, or to the outcome.

Invariant: an outcome is a number in [0, 1] or `Invalid` with a reason that begins with its class; whatever a model
writes, nothing else comes out. `judging` calls `proceed` again with one more reply until there is an outcome.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from asyncflow.engine import Invalid
from asyncflow.errors import ConfigError
from engines.rewards.base import Outcome
from engines.rewards.chat.base import Ask, Message, Reply

TEMPLATES = Path(__file__).parent
OVERALL = 0.3
"""Weight of the overall verdict beside the mean of the dimensions': Pref-GRPO's recipe for Wan2.1."""

ReasonClass = Literal["timeout", "parse", "length", "repetition", "client", "engine"]


def invalid(reason_class: ReasonClass, reason: str) -> Invalid:
    """An outcome that failed; `reason_class` is what metrics count it under."""
    return Invalid(f"{reason_class}: {reason}")


@dataclass(frozen=True, eq=False)
class Case:
    """What is judged: one video, or two in the order in which they are shown, uint8 [T, H, W, 3], and their prompt."""

    videos: tuple[Tensor, ...]
    prompt: str


class ChatProtocol(ABC):
    """How a judge is asked about one video, or about two (`videos`): 1 where the first is better, 0.5 for a tie."""

    videos: ClassVar[Literal[1, 2]]
    schema: ClassVar[Mapping[str, Any] | None] = None
    """What a good answer looks like, for the second attempt after one that could not be read."""
    images: int
    """The most that one conversation shows."""
    turns: int = 1
    """The most replies of a conversation."""
    max_tokens: int
    """Of a reply."""
    top_logprobs: int = 0
    """See `Ask`."""

    def shown(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the largest image that it shows of a video of this size, in pixels."""
        return height, width

    @abstractmethod
    def proceed(self, case: Case, replies: Sequence[Reply]) -> Ask | Outcome:
        """What to ask next, or the outcome. An invalid one is the last reply's fault."""


class SingleTurn(ChatProtocol):
    """Frames of each video in order, then a text; one reply."""

    def __init__(self, template: str, frames: int, max_tokens: int) -> None:
        self._template = template
        self._frames = frames
        self.images = self.videos * frames
        self.max_tokens = max_tokens

    def proceed(self, case: Case, replies: Sequence[Reply]) -> Ask | Outcome:
        """See `ChatProtocol`."""
        if replies:
            return cut_short(replies[-1]) or self.read(replies[-1])
        images = [image for video in case.videos for image in evenly(video, self._frames)]
        message = Message("user", (*images, fill(self._template, prompt=case.prompt)))
        return Ask((message,), self.max_tokens, top_logprobs=self.top_logprobs)

    @abstractmethod
    def read(self, reply: Reply) -> Outcome:
        """The outcome that a reply states."""


def cut_short(reply: Reply) -> Invalid | None:
    """Why a reply that did not end by itself is no verdict, whatever it says so far."""
    match reply.finish:
        case "length":
            return invalid("length", f"the answer was cut off after {reply.tokens} tokens")
        case "repetition":
            return invalid("repetition", "the answer repeats itself")
    return None


def evenly(video: Tensor, count: int) -> list[Tensor]:
    """At most `count` frames [H, W, 3] of a video [T, H, W, 3], evenly spaced, the first and the last among them."""
    places = np.linspace(0, len(video) - 1, min(count, len(video))).astype(int)
    return [video[int(place)] for place in places]


def fill(template: str, **values: object) -> str:
    """The template with each {name} replaced; other braces stay, and what is filled in is not looked at again."""
    pattern = "|".join(re.escape(f"{{{name}}}") for name in values)
    return re.sub(pattern, lambda found: str(values[found.group()[1:-1]]), template)


def read_template(path: Path) -> str:
    """The text of a template file. Raises ConfigError unless it can be read and names the {prompt}."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"template: cannot read {path}: {error}") from None
    if "{prompt}" not in text:
        raise ConfigError(f"template: {path} does not say where the prompt stands; write {{prompt}} there")
    return text.strip()


def winner(text: str) -> float | None:
    """The first one's points in a text such as "Video 2 is better"; None if it does not plainly name one, or a tie."""
    named = set(re.findall(r"\b(?:video|image)\s*([12])\b", text, re.IGNORECASE))
    if len(named) > 1 or re.search(r"\b(not|worse)\b|n't\b", text, re.IGNORECASE):
        return None
    if named:
        return 1.0 if named == {"1"} else 0.0
    return 0.5 if re.search(r"\b(tie|tied|equal|equally|same|draw|neither)\b", text, re.IGNORECASE) else None


def blend(overall: float, dimensions: Sequence[float]) -> float:
    """Points of a comparison from those of the overall verdict and of its dimensions.

    A win rate is linear in points, so this is Pref-GRPO's blend of an overall win rate and those of the dimensions.
    """
    return OVERALL * overall + (1 - OVERALL) * sum(dimensions) / len(dimensions)
