"""The pixel judge against videos whose colour and motion are known by construction."""

import pytest
import torch

from asyncflow.errors import RewardError
from engines.rewards.pixels import colour_right, colour_score, motion_right, motion_score
from engines.toy.videos import BACKGROUND, COLOURS, DIRECTIONS, all_prompts, prompt_of, render

PROMPT = prompt_of("red", "circle", "left")
OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}


def draw(prompts: list[str], seed: int = 0, frames: int = 33) -> torch.Tensor:
    return render(prompts, torch.Generator().manual_seed(seed), frames)


def empty() -> torch.Tensor:
    return torch.tensor(BACKGROUND, dtype=torch.uint8).expand(33, 32, 32, 3).clone()


def noisy(video: torch.Tensor, deviation: float) -> torch.Tensor:
    noise = deviation * torch.randn(video.shape, generator=torch.Generator().manual_seed(0))
    return (video + noise).clamp(0, 255).to(torch.uint8)


def test_real_videos_are_all_right() -> None:
    """Every prompt's real videos are right in both ways and score nearly 1."""
    prompts = all_prompts()
    for video, prompt in zip(draw(prompts), prompts, strict=True):
        assert colour_right(video, prompt)
        assert motion_right(video, prompt)
        assert colour_score(video, prompt) > 0.99
        assert motion_score(video, prompt) > 0.99


def test_other_colours_are_wrong() -> None:
    """A red object is red and nothing else, and scores less the further its hue is from the named one."""
    video = draw([PROMPT])[0]
    scores = {colour: colour_score(video, prompt_of(colour, "circle", "left")) for colour in COLOURS}
    assert [colour for colour in COLOURS if colour_right(video, prompt_of(colour, "circle", "left"))] == ["red"]
    assert scores["red"] > 0.99
    assert 0.1 < scores["yellow"] < 0.6
    assert scores["cyan"] == 0


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_other_directions_are_wrong(direction: str) -> None:
    """A motion is right for one direction only; the others score 0."""
    video = draw([prompt_of("red", "square", direction)])[0]
    for other in DIRECTIONS:
        prompt = prompt_of("red", "square", other)
        assert motion_right(video, prompt) == (other == direction)
        assert motion_score(video, prompt) == pytest.approx(float(other == direction), abs=0.01)


def test_reversed_motion_is_wrong() -> None:
    """A video played backwards moves the other way."""
    video = draw([PROMPT])[0].flip(0)
    assert not motion_right(video, PROMPT)
    assert motion_right(video, prompt_of("red", "circle", OPPOSITE["left"]))


def test_drift_of_colour_costs_by_its_length() -> None:
    """An object that turns green scores less the earlier it turns, and is wrong unless it does so at the very end."""
    red, green = draw([PROMPT])[0], draw([PROMPT.replace("red", "green")])[0]
    turned = [torch.cat([red[:at], green[at:]]) for at in (0, 11, 22, 31, 33)]
    scores = [colour_score(video, PROMPT) for video in turned]
    assert scores == sorted(scores)
    assert scores[1] + 0.1 < scores[2] < scores[3] - 0.1
    assert [colour_right(video, PROMPT) for video in turned] == [False, False, False, True, True]


def test_a_gradual_fade_of_hue_is_graded() -> None:
    """A video that is somewhat off in hue lies between the right and the wrong one: there is a slope to climb."""
    red, yellow = draw([PROMPT])[0].float(), draw([PROMPT.replace("red", "yellow")])[0].float()
    mixed = [(red + share * (yellow - red)).round().to(torch.uint8) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    scores = [colour_score(video, PROMPT) for video in mixed]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == 5


def test_an_object_that_vanishes_late_costs() -> None:
    """Once the object is gone neither colour nor motion is right."""
    video = draw([PROMPT])[0]
    video[20:] = empty()[20:]
    assert 0.1 < colour_score(video, PROMPT) < 0.5
    assert 0.1 < motion_score(video, PROMPT) < 0.8
    assert not colour_right(video, PROMPT)
    assert not motion_right(video, PROMPT)


@pytest.mark.parametrize("video", [empty(), torch.zeros(33, 32, 32, 3, dtype=torch.uint8)], ids=["background", "black"])
def test_without_an_object_all_is_zero(video: torch.Tensor) -> None:
    """An empty video scores exactly 0, not NaN."""
    assert colour_score(video, PROMPT) == 0
    assert motion_score(video, PROMPT) == 0
    assert not colour_right(video, PROMPT)
    assert not motion_right(video, PROMPT)


def test_a_standing_object_does_not_move() -> None:
    """A still video keeps its colour but scores 0 for motion in any direction."""
    video = draw([PROMPT])[0][:1].expand(33, -1, -1, -1)
    for direction in DIRECTIONS:
        assert motion_score(video, prompt_of("red", "circle", direction)) == pytest.approx(0, abs=1e-6)
        assert not motion_right(video, prompt_of("red", "circle", direction))
    assert colour_right(video, PROMPT)


def test_a_flooded_frame_is_no_moving_object() -> None:
    """A frame filled with the colour shows no motion, even if a faint pattern drifts over it."""
    red = torch.tensor(COLOURS["red"], dtype=torch.uint8).expand(33, 32, 32, 3)
    drifting = noisy(red[:1], 16).expand(33, -1, -1, -1)
    drifting = torch.stack([frame.roll(-i, dims=1) for i, frame in enumerate(drifting)])
    for video in (red, drifting):
        assert not motion_right(video, PROMPT)
        assert motion_score(video, PROMPT) < 0.1


def test_noise_does_not_change_the_verdict() -> None:
    """Pixel noise of 16 grey levels leaves every verdict right."""
    prompts = all_prompts()[::5]
    for video, prompt in zip(draw(prompts, seed=3), prompts, strict=True):
        assert colour_right(noisy(video, 16), prompt)
        assert motion_right(noisy(video, 16), prompt)


@pytest.mark.parametrize("frames", [1, 2, 5])
def test_short_videos_are_judged(frames: int) -> None:
    """A clip shorter than the displacement's four frames is compared with what there is; one frame does not move."""
    video = draw([PROMPT], frames=frames)[0]
    assert colour_right(video, PROMPT)
    assert motion_right(video, PROMPT) == (frames > 1)


def test_prompts_are_read_as_words() -> None:
    """Case and punctuation do not matter."""
    video = draw([PROMPT])[0]
    assert colour_right(video, "A RED circle, moving left.")
    assert motion_right(video, "A RED circle, moving left.")


@pytest.mark.parametrize("prompt", ["a dog that runs", "a red or green circle moving left or right"])
def test_a_prompt_without_one_known_word_is_refused(prompt: str) -> None:
    """The error names the kind of word, those that are known, and the prompt."""
    video = empty()
    with pytest.raises(RewardError, match="exactly one colour .*red, green.* in each prompt, but"):
        colour_score(video, prompt)
    with pytest.raises(RewardError, match="exactly one direction .*left, right.* in each prompt, but"):
        motion_right(video, prompt)
