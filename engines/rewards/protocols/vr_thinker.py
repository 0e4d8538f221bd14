"""VR-Thinker (arXiv 2510.10518): compares two videos in several turns, asking for further frames where it needs them.

A pool of frames is numbered from 1, first video first. Each turn shows the first frames and those of the last
selection; earlier selections leave the conversation. A turn ends with a call of `select_frames` or with the answer.
Where the last turn still asks, its recommended answer counts, if there is one.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from asyncflow.engine import Invalid
from engines.rewards.base import Outcome
from engines.rewards.chat.base import Ask, Message, Reply
from engines.rewards.protocols.base import Case, ChatProtocol, blend, cut_short, evenly, fill, invalid

ANSWER = re.compile(r"<\s*(?:final\s+)?answer\s*>(.*?)(?:<\s*/|\Z)", re.IGNORECASE | re.DOTALL)
RECOMMENDED = re.compile(r"<\s*recommend(?:ed)?\s+answer\s*>(.*?)(?:<\s*/|\Z)", re.IGNORECASE | re.DOTALL)
CALL = re.compile(r"<\s*tool_call\s*>(.*?)(?:<\s*/|\Z)", re.IGNORECASE | re.DOTALL)  # engines may keep the stop
LABEL = re.compile(r"\b(TA|MQ|VQ|OA)\s*=\s*(-?\d+)\b", re.IGNORECASE)
END_OF_CALL = "</tool_call>"
OVERALL, DIMENSIONS = "OA", ("TA", "MQ", "VQ")
POINTS = {0: 0.5, 1: 1.0, 2: 0.0}
"""What a label means for the first video."""

TOOL = {
    "type": "function",
    "function": {
        "name": "select_frames",
        "description": "Shows the frames with these numbers.",
        "parameters": {
            "type": "object",
            "properties": {"target_frames": {"type": "array", "items": {"type": "integer"}}},
            "required": ["target_frames"],
        },
    },
}
SYSTEM = (
    "You are a helpful assistant.\n\n# Tools\n\nYou may call a function to help with the user's request. Functions are "
    f"described within <tools></tools>:\n<tools>\n{json.dumps(TOOL)}\n</tools>\n\n"
    "To call one, write a JSON object with its name and arguments within <tool_call></tool_call>:\n"
    '<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
)


@dataclass(frozen=True)
class Variant:
    """Sizes of a released checkpoint: frames a video in the pool and at first, frames a call, turns, pixels a frame."""

    pool: int
    first: int
    selected: int
    turns: int
    first_pixels: int
    selected_pixels: int
    confidence: bool
    """Whether labels come with how sure it is; it counts for nothing, but is asked for."""

    def changed(self, *, first: int | None, turns: int | None) -> "Variant":
        """The same but for what is given."""
        return replace(self, first=first or self.first, turns=turns or self.turns)


PAPER = Variant(48, 4, 8, 4, 1280 * 28**2, 400 * 28**2, confidence=True)
"""qunwang13/vr-thinker, of October 2025."""

CARD_2026 = Variant(128, 4, 12, 6, 448**2, 448**2, confidence=False)
"""qunwang13/vrthinker, of 2026."""


class VRThinker(ChatProtocol):
    """See the module."""

    videos = 2

    def __init__(self, template: str, variant: Variant, max_tokens: int) -> None:
        self._template = template
        self._variant = variant
        self.images = self.videos * variant.first + variant.selected
        self.turns = variant.turns
        self.max_tokens = max_tokens

    def shown(self, height: int, width: int) -> tuple[int, int]:
        """See `ChatProtocol`."""
        return fitted_size(height, width, max(self._variant.first_pixels, self._variant.selected_pixels))

    def proceed(self, case: Case, replies: Sequence[Reply]) -> Ask | Outcome:
        """See `ChatProtocol`."""
        if replies and (outcome := self._outcome(replies)) is not None:
            return outcome
        pools = [evenly(video, self._variant.pool) for video in case.videos]
        frames = [frame for pool in pools for frame in pool]
        messages = [Message("system", (SYSTEM,)), self._question(case.prompt, pools)]
        for turn, reply in enumerate(replies):
            selected = self._select(reply.text, frames, shown=turn == len(replies) - 1)
            called = reply.text if END_OF_CALL in reply.text else reply.text + END_OF_CALL
            messages += [Message("assistant", (called,)), Message("user", selected)]
        return Ask(tuple(messages), self.max_tokens, stop=(END_OF_CALL,))

    def _outcome(self, replies: Sequence[Reply]) -> Outcome | None:
        """What the last reply decides; None if it asks for frames and there is a turn left."""
        text = replies[-1].text
        if cut := cut_short(replies[-1]):
            return cut
        if answers := ANSWER.findall(text):
            return parse(answers)
        if not CALL.search(text):
            return invalid("parse", "there is neither an answer nor a call of select_frames")
        if len(replies) < self._variant.turns:
            return None
        recommended = RECOMMENDED.findall(text)
        return parse(recommended) if recommended else invalid("parse", f"no answer after {len(replies)} turns")

    def _question(self, prompt: str, pools: Sequence[Sequence[Tensor]]) -> Message:
        shown: list[int] = []
        before = 0
        for pool in pools:
            first = min(self._variant.first, len(pool))
            shown += [before + (place + 1) * len(pool) // first for place in range(first)]
            before += len(pool)
        frames = [frame for pool in pools for frame in pool]
        confidence = "CF from 1 (sure) to 3 (unsure)" if self._variant.confidence else ""
        text = fill(
            self._template,
            prompt=prompt,
            total=before,
            half=len(pools[0]),
            shown=", ".join(map(str, shown)),
            most=self._variant.selected,
            confidence=f", and {confidence}" if confidence else "",
            example="TA=1, MQ=0, VQ=2, OA=1" + (", CF=2" if confidence else ""),
        )
        images = [fitted(frames[number - 1], self._variant.first_pixels) for number in shown]
        return Message("user", (*images, text))

    def _select(self, text: str, frames: Sequence[Tensor], *, shown: bool) -> tuple[str | Tensor, ...]:
        """What a call gives: the frames if they are still `shown`, or what is wrong with it."""
        numbers = selection(text, len(frames), self._variant.selected)
        if isinstance(numbers, Invalid):
            return (numbers.reason,)
        images = [fitted(frames[number - 1], self._variant.selected_pixels) for number in numbers] if shown else []
        return ("These are the selected frames.", *images)


def selection(text: str, total: int, most: int) -> list[int] | Invalid:
    """The frame numbers that a reply calls for, or a sentence to the model about what is wrong with its call."""
    try:
        numbers: Any = json.loads(CALL.findall(text)[-1])["arguments"]["target_frames"]
    except (ValueError, KeyError, TypeError, RecursionError):
        numbers = None
    if not isinstance(numbers, list) or not numbers or not all(type(number) is int for number in numbers):
        return Invalid('The call failed: "arguments" must be {"target_frames": [numbers]}.')
    if len(numbers) > most:
        return Invalid(f"At most {most} frames can be selected at once.")
    if not all(1 <= number <= total for number in numbers):
        return Invalid(f"The frames are numbered from 1 to {total}. Your selection is out of range.")
    return numbers


def parse(answers: Sequence[str]) -> Outcome:
    """The first video's points from the answers of a reply: those of OA, blended with those of TA, MQ and VQ."""
    labels: dict[str, set[int]] = {}
    for name, value in LABEL.findall(" ".join(answers)):
        labels.setdefault(name.upper(), set()).add(int(value))
    points = {}
    for name in (OVERALL, *DIMENSIONS):
        values = labels.get(name, set())
        if len(values) != 1:
            return invalid("parse", f"the answer gives {len(values) or 'no'} values of {name}")
        (value,) = values
        if value not in POINTS:
            return invalid("parse", f"{name}={value} is none of 0, 1 and 2")
        points[name] = POINTS[value]
    return blend(points[OVERALL], [points[name] for name in DIMENSIONS])


def fitted(frame: Tensor, pixels: int) -> Tensor:
    """The frame [H, W, 3], made smaller where it has more than so many pixels."""
    height, width = fitted_size(*frame.shape[:2], pixels)
    if (height, width) == frame.shape[:2]:
        return frame
    picture = Image.fromarray(frame.numpy()).resize((width, height), Image.Resampling.BICUBIC)
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(height, width, 3)


def fitted_size(height: int, width: int, pixels: int) -> tuple[int, int]:
    """Height and width of a frame that was made smaller where it has more than so many pixels."""
    scale = min(1.0, (pixels / (height * width)) ** 0.5)
    return max(1, int(height * scale)), max(1, int(width * scale))
