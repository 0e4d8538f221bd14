"""`ocr`: can the text that the prompt quotes be read in the video? With rapidocr, whose models come in its package.

As in flow_grpo (yifan123/flow_grpo, reward `ocr`): 1 less the edits from what is read to what is quoted, over the
length of the quote, and 1 if it contains the quote; spaces and case do not count. The mean over a few frames.
"""

import importlib.util
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from asyncflow.errors import ConfigError, RewardError
from engines.rewards.base import Outcome, PointwiseReward
from engines.rewards.protocols.base import evenly

FRAMES = 4
LONGEST_SIDE = 960
"""Pixels of a frame as text is looked for."""
QUOTED = re.compile(r'"([^"]+)"|“([^”]+)”')


class Ocr(PointwiseReward):
    """See the module. Raises ConfigError where the packages are missing."""

    name = "ocr"
    apart = True

    def __init__(self) -> None:
        if any(importlib.util.find_spec(package) is None for package in ("rapidocr", "onnxruntime")):
            raise ConfigError("--reward ocr: it needs rapidocr and onnxruntime: pip install 'asyncflow[ocr]'")

    def load(self, device: torch.device) -> None:
        """See `Reward`; it runs on the CPU."""
        from rapidocr import RapidOCR

        threads = torch.get_num_threads()
        settings = {
            "Global.log_level": "critical",
            "Global.use_cls": False,  # text that stands on its head
            "Det.limit_type": "max",  # frames are made smaller, but never larger
            "Det.limit_side_len": LONGEST_SIDE,
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
        self._read: Callable[[Any], Any] = RapidOCR(params=settings)

    def score(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Outcome]:
        """See `PointwiseReward`; in [0, 1]. Raises RewardError for a prompt without a quoted text."""
        return [self._score(video, quoted(prompt)) for video, prompt in zip(videos, prompts, strict=True)]

    def _score(self, video: Tensor, wanted: str) -> float:
        frames = evenly(video, FRAMES)
        return sum(closeness(self._text(frame), wanted) for frame in frames) / len(frames)

    def _text(self, frame: Tensor) -> str:
        found = self._read(frame.numpy()[:, :, ::-1])  # it takes BGR
        return " ".join(found.txts or ())


def quoted(prompt: str) -> str:
    """The first text in double quotes of a prompt. Raises RewardError if there is none."""
    found = QUOTED.search(prompt)
    if not found or not _plain(found[0].strip('"“”')):
        raise RewardError(
            f"the ocr reward needs a text in double quotes in each prompt, but {prompt!r} has none: write the text to "
            "be read in quotes, or choose another reward"
        )
    return found[1] or found[2]


def closeness(read: str, wanted: str) -> float:
    """From 0, nothing of `wanted` is there, to 1, all of it is."""
    read, wanted = _plain(read), _plain(wanted)
    if wanted in read:
        return 1.0
    return 1 - min(edits(read, wanted), len(wanted)) / len(wanted)


def edits(first: str, second: str) -> int:
    """The Levenshtein distance: how many letters to insert, delete or replace to get from one text to the other."""
    row = list(range(len(second) + 1))
    for place, letter in enumerate(first, 1):
        before, row = row, [place]
        for column, other in enumerate(second, 1):
            row.append(min(before[column] + 1, row[-1] + 1, before[column - 1] + (letter != other)))
    return row[-1]


def _plain(text: str) -> str:
    return "".join(text.split()).casefold()
