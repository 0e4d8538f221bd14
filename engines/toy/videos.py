"""Procedural videos: one coloured shape that moves over a dark torus, and the prompt grammar that names it.

A prompt such as "a red square moving left" is the whole description; size, speed and start are drawn at random.
Invariant: every video shows exactly one object in one constant colour, moving 0.5 to 1 pixel a frame along one axis.
Called by the toy's makers for training data, by the pixel judge for its vocabulary, and by tests.
"""

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

FRAMES, SIZE = 33, 32
BACKGROUND = (24, 24, 28)
COLOURS = {
    "red": (230, 40, 40),
    "green": (40, 200, 60),
    "blue": (50, 70, 235),
    "yellow": (235, 215, 40),
    "magenta": (225, 50, 210),
    "cyan": (40, 210, 225),
}
SHAPES = ("square", "circle", "triangle")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}  # (x, y), y grows downwards

RADIUS = (7.0, 9.0)  # pixels, of the circle; the other shapes have nearly its area
SPEED = (0.5, 1.0)  # pixels a frame


def prompt_of(colour: str, shape: str, direction: str) -> str:
    """The prompt that names one of the 72 kinds of video."""
    return f"a {colour} {shape} moving {direction}"


def all_prompts() -> list[str]:
    """All 6 x 3 x 4 prompts, in a fixed order."""
    return [prompt_of(*words) for words in product(COLOURS, SHAPES, DIRECTIONS)]


def split_prompts() -> tuple[list[str], list[str]]:
    """54 training and 18 held-out prompts. Each pair of colour and shape is held out in exactly one direction."""
    training: list[str] = []
    held_out: list[str] = []
    words = product(enumerate(COLOURS), enumerate(SHAPES), enumerate(DIRECTIONS))
    for (i, colour), (j, shape), (k, direction) in words:
        (held_out if (i + j + k) % 4 == 0 else training).append(prompt_of(colour, shape, direction))
    return training, held_out


def write_prompts(folder: Path) -> None:
    """Write `prompts.txt` (training) and `eval_prompts.txt` (held out), a prompt a line."""
    for name, prompts in zip(("prompts.txt", "eval_prompts.txt"), split_prompts(), strict=True):
        (folder / name).write_text("\n".join(prompts) + "\n", encoding="utf-8")


def render(prompts: Sequence[str], generator: torch.Generator, frames: int = FRAMES) -> Tensor:
    """Draw one video a prompt.

    `prompts` must follow the grammar of `all_prompts`. Returns uint8 [N, frames, 32, 32, 3], RGB.
    """
    words = [prompt.split() for prompt in prompts]
    colour = torch.tensor([COLOURS[w[1]] for w in words], dtype=torch.float32)
    shape = torch.tensor([SHAPES.index(w[2]) for w in words])
    direction = torch.tensor([DIRECTIONS[w[4]] for w in words], dtype=torch.float32)
    n = len(words)
    radius = torch.empty(n).uniform_(*RADIUS, generator=generator)
    speed = torch.empty(n, 1).uniform_(*SPEED, generator=generator)
    start = torch.empty(n, 2).uniform_(0, SIZE, generator=generator)

    centre = start[:, None] + (direction * speed)[:, None] * torch.arange(frames)[:, None]
    return paint(centre, colour[:, None].expand(-1, frames, -1), shape, radius)


def paint(centre: Tensor, colour: Tensor, shape: Tensor, radius: Tensor) -> Tensor:
    """Draw n objects along any path and in any colours: uint8 [N, T, 32, 32, 3].

    `centre` [N, T, 2] (x, y) and `radius` [N] in pixels, `colour` [N, T, 3] from 0 to 255, `shape` [N] in `SHAPES`.
    """
    axis = torch.arange(SIZE) + 0.5
    offset = torch.remainder(axis - centre[..., None] + SIZE / 2, SIZE) - SIZE / 2  # [N, T, 2, S], to the nearest copy
    x, y = offset[:, :, 0, None, :], offset[:, :, 1, :, None]
    distance = _distances(x, y, radius[:, None, None, None], shape)
    cover = (0.5 - distance).clamp(0, 1)[..., None]  # antialiased: a pixel half inside is half covered
    background = torch.tensor(BACKGROUND, dtype=torch.float32)
    pixels = background + cover * (colour[:, :, None, None] - background)
    return pixels.round().to(torch.uint8)


def _distances(x: Tensor, y: Tensor, radius: Tensor, shape: Tensor) -> Tensor:
    """Signed distance to the outline of each video's shape, in pixels: [N, T, S, S]."""
    square = torch.maximum(x.abs(), y.abs()) - 0.886 * radius
    circle = torch.hypot(x, y) - radius
    slope = x.abs() * (math.sqrt(3) / 2) - y / 2  # the two upper sides of a triangle that points up
    triangle = torch.maximum(slope, y.expand_as(slope)) - 0.75 * radius
    index = shape[:, None, None, None, None].expand(-1, *square.shape[1:], 1)
    return torch.stack((square, circle, triangle), dim=-1).gather(-1, index).squeeze(-1)
