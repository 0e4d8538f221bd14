"""The reward that reads: real text, drawn into frames, against what the prompt quotes."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from asyncflow.errors import ConfigError, RewardError
from engines.rewards import ocr
from engines.rewards.ocr import Ocr, closeness, edits, quoted
from engines.rewards.registry import parse_rewards

PROMPT = 'a shop sign that says "HELLO WORLD" at night'


def written(*texts: str) -> torch.Tensor:
    """A video with a frame for each text, [T, 48, 160, 3]."""
    frames = []
    for text in texts:
        picture = Image.new("RGB", (160, 48), (30, 60, 90))
        ImageDraw.Draw(picture).text((8, 10), text, font=ImageFont.load_default(20), fill=(255, 220, 180))
        frames.append(torch.from_numpy(np.asarray(picture).copy()))
    return torch.stack(frames)


@pytest.fixture(scope="module")
def reward() -> Iterator[Ocr]:
    (made,) = parse_rewards(["ocr"])
    assert isinstance(made.reward, Ocr)
    made.reward.load(torch.device("cpu"))
    made.reward.score([written("warm")], [PROMPT])
    yield made.reward
    made.reward.close()


def test_it_reads(reward):
    """The quoted text, in part, another one, none; a video has the mean of its frames."""
    videos = [written("HELLO WORLD"), written("HELLO"), written("GOODBYE"), written(""), written("HELLO WORLD", "")]
    right, half, wrong, none, fading = reward.score(videos, [PROMPT] * 5)
    assert (right, none, fading) == (1.0, 0.0, 0.5)
    assert right > half > wrong >= 0
    assert half == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("read", "wanted", "expected"),
    [
        ("Hello  world", "HELLOWORLD", 1.0), ("say hello world!", "Hello World", 1.0), ("", "hello", 0.0),
        ("helo world", "hello world", 0.9), ("something else entirely", "xyz", 0.0),
    ],
)  # fmt: skip
def test_closeness(read, wanted, expected):
    assert closeness(read, wanted) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("first", "second", "number"), [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3), ("ab", "ba", 2)]
)
def test_edits(first, second, number):
    assert edits(first, second) == edits(second, first) == number


def test_a_prompt_without_a_quote_ends_the_run():
    assert quoted('first "one" then "two"') == "one" and quoted("a “curly” one") == "curly"
    for prompt in ("a dog", 'a dog called "', 'a sign with ""', 'a sign with "  "'):
        with pytest.raises(RewardError, match="the ocr reward needs a text in double quotes in each prompt, but"):
            quoted(prompt)


def test_missing_packages_are_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr(ocr.importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else True)
    with pytest.raises(ConfigError, match=r"^--reward ocr: .* pip install 'asyncflow\[ocr\]'$"):
        parse_rewards(["ocr"])
