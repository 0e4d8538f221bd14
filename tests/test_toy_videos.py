"""The toy's procedural videos: what the grammar says is what is drawn, and the prompt files cover it."""

from pathlib import Path

import pytest
import torch

import engines.toy.videos as toy
from engines.toy.videos import BACKGROUND, COLOURS, DIRECTIONS, SHAPES, all_prompts, prompt_of, render, split_prompts


def draw(prompts: list[str], seed: int = 0, frames: int = 33) -> torch.Tensor:
    return render(prompts, torch.Generator().manual_seed(seed), frames)


def test_shape_and_type() -> None:
    """A video is uint8 [T, 32, 32, 3], and any number of frames can be drawn."""
    videos = draw(all_prompts()[:3], frames=9)
    assert videos.shape == (3, 9, 32, 32, 3)
    assert videos.dtype == torch.uint8


def test_same_seed_same_videos() -> None:
    """The generator alone decides size, speed and start."""
    prompts = all_prompts()[:4]
    assert torch.equal(draw(prompts, 1), draw(prompts, 1))
    assert not torch.equal(draw(prompts, 1), draw(prompts, 2))


@pytest.mark.parametrize("colour", COLOURS)
def test_only_the_named_colour_on_the_background(colour: str) -> None:
    """Every pixel lies between the background and the named colour, and both occur."""
    pixels = draw([prompt_of(colour, shape, "up") for shape in SHAPES]).float()
    background, target = torch.tensor(BACKGROUND).float(), torch.tensor(COLOURS[colour]).float()
    line = target - background
    cover = ((pixels - background) @ line) / line.square().sum()
    assert (pixels - background - cover[..., None] * line).abs().max() < 1
    assert cover.min() == 0
    assert cover.max() == pytest.approx(1)


@pytest.mark.parametrize(
    ("direction", "axis", "shift"), [("left", 3, -1), ("right", 3, 1), ("up", 2, -1), ("down", 2, 1)]
)
def test_the_object_is_carried_round_the_torus(
    monkeypatch: pytest.MonkeyPatch, direction: str, axis: int, shift: int
) -> None:
    """At one pixel a frame each frame is the one before, rolled by a pixel, across the border too."""
    monkeypatch.setattr(toy, "SPEED", (1.0, 1.0))
    video = draw([prompt_of("red", "triangle", direction)])
    difference = video[:, 1:].int() - video[:, :-1].roll(shift, dims=axis).int()
    assert difference.abs().max() <= 1  # rounding


def test_shapes_differ_by_more_than_their_size() -> None:
    """A square fills the corners of its bounding box, a circle hardly, a triangle half of the box."""
    filled = {}
    for shape in SHAPES:
        object_ = draw([prompt_of("red", shape, "up")] * 8, frames=1)[..., 0].float().sub(24).div(206)
        width = object_.amax(dim=2).sum(dim=-1)
        height = object_.amax(dim=3).sum(dim=-1)
        filled[shape] = (object_.sum(dim=(2, 3)) / (width * height)).mean().item()
    assert filled["square"] == pytest.approx(1.0, abs=0.05)
    assert filled["circle"] == pytest.approx(0.785, abs=0.05)
    assert filled["triangle"] == pytest.approx(0.5, abs=0.05)


def test_the_split_covers_the_grammar_without_overlap() -> None:
    """54 and 18 prompts make up all 72; each word is in both lists, each colour and shape is seen in training."""
    training, held_out = split_prompts()
    assert (len(training), len(held_out)) == (54, 18)
    assert sorted(training + held_out) == sorted(all_prompts())
    for prompts in (training, held_out):
        assert {prompt.split()[1] for prompt in prompts} == set(COLOURS)
        assert {prompt.split()[2] for prompt in prompts} == set(SHAPES)
        assert {prompt.split()[4] for prompt in prompts} == set(DIRECTIONS)
    assert len({tuple(prompt.split()[1:3]) for prompt in training}) == len(COLOURS) * len(SHAPES)


def test_the_prompt_files_hold_the_split(tmp_path: Path) -> None:
    """The files that ship are those the code writes."""
    toy.write_prompts(tmp_path)
    for name in ("prompts.txt", "eval_prompts.txt"):
        shipped = Path(toy.__file__).with_name(name)
        assert shipped.read_text(encoding="utf-8") == (tmp_path / name).read_text(encoding="utf-8")
    assert (tmp_path / "prompts.txt").read_text(encoding="utf-8").splitlines() == split_prompts()[0]
