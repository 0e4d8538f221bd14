"""The pixel judge: does the toy's object keep the colour, and move the way, that the prompt names?

Pure and deterministic functions of a uint8 video [T, H, W, 3] and its prompt. Each score is a finite number in [0, 1]
with a slope to climb; each `*_right` is the yes or no that accuracies count. A video without a visible object scores 0.
Called by the reward classes of this package and by `engines.toy.assess`.
"""

import math
import re
from collections.abc import Iterable

import torch
from torch import Tensor

from asyncflow.errors import RewardError
from engines.toy.videos import BACKGROUND, COLOURS, DIRECTIONS

FULL_AREA = 0.09  # share of the frame from which an object counts as wholly visible; the smallest real one has 0.14
FULL_CONTRAST = 0.3  # first Fourier coefficient over mass, from which that is one object; the least compact has 0.6
WIDEST_ANGLE = math.radians(60)  # a colour this far from the named one, seen from the background, scores 0
LAG = 4  # frames between the two that a displacement compares, one latent frame apart
FULL_SPEED = 0.4 / 32  # frame widths a frame from which motion scores 1; real videos move at 0.5/32 to 1/32
LEAST_SPEED = 0.2 / 32  # slower than this an object stands
NEARLY_ALL, MOST = 0.9, 0.8  # shares of the frames, of the displacements, that must be right


def colour_score(video: Tensor, prompt: str) -> float:
    """How well the whole video keeps the named colour: the mean of all its frames' and of its worst quarter's scores.

    A frame's score is its object pixels' mean closeness to the named colour (1 the same hue, 0 at 60 degrees or more),
    times how much of an object there is. Raises RewardError if the prompt does not name exactly one known colour.
    """
    named = _named(prompt, COLOURS, "colour")
    return colour_scores(video)[named]


def colour_scores(video: Tensor) -> dict[str, float]:
    """The video's `colour_score` for each known colour."""
    closeness, visible = colours(video)
    scores = {}
    for index, name in enumerate(COLOURS):
        frames = closeness[:, index] * visible
        worst = frames.sort().values[: max(1, len(frames) // 4)]
        scores[name] = (0.5 * (frames.mean() + worst.mean())).item()
    return scores


def colour_right(video: Tensor, prompt: str) -> bool:
    """Whether an object is visible and of the colours the named one is nearest, in at least 90 % of the frames."""
    index = list(COLOURS).index(_named(prompt, COLOURS, "colour"))
    closeness, visible = colours(video)
    right = (closeness.argmax(dim=1) == index) & (visible >= 0.5)
    return right.float().mean().item() >= NEARLY_ALL


def motion_score(video: Tensor, prompt: str) -> float:
    """How steadily the object moves in the named direction: the mean over all displacements of four frames.

    One scores its speed in the named direction less its speed across, 1 from 0.4/32 of the frame a frame on, and 0 if
    it stands, turns round or is not visible. Raises RewardError if the prompt does not name exactly one direction.
    """
    forward, sideways, visible = _motion(video, prompt)
    return (((forward - sideways) / FULL_SPEED).clamp(0, 1) * visible).mean().item()


def motion_right(video: Tensor, prompt: str) -> bool:
    """Whether at least 80 % of the displacements go mainly in the named direction, and the object does not stand."""
    forward, sideways, visible = _motion(video, prompt)
    right = (forward > sideways) & (forward > LEAST_SPEED) & (visible >= 0.5)
    return right.float().mean().item() >= MOST


def _named(prompt: str, known: Iterable[str], kind: str) -> str:
    """The one word of `known` in the prompt."""
    words: set[str] = set(re.findall(r"[a-z]+", prompt.lower()))
    found = words & set(known)
    if len(found) != 1:
        raise RewardError(
            f"the pixel judge needs exactly one {kind} ({', '.join(known)}) in each prompt, but {prompt!r} names "
            f"{' and '.join(sorted(found)) or 'none'}: change the prompt or choose another reward"
        )
    return found.pop()


def _foreground(video: Tensor) -> tuple[Tensor, Tensor]:
    """How much each pixel belongs to an object, [T, H, W] in [0, 1], and how visible it is in each frame, [T]."""
    assert video.dtype == torch.uint8, video.dtype
    assert video.ndim == 4, video.shape
    assert video.shape[-1] == 3, video.shape
    weight = ((video.float().amax(dim=-1) - 60) / 60).clamp(0, 1)
    return weight, (weight.mean(dim=(1, 2)) / FULL_AREA).clamp(max=1)


def colours(video: Tensor) -> tuple[Tensor, Tensor]:
    """The object's mean closeness to each known colour, [T, colours] in [0, 1], and its visibility, [T].

    Pixels are compared as angles seen from the background, so that soft edges count as the colour they fade from.
    """
    weight, visible = _foreground(video)
    background = torch.tensor(BACKGROUND, dtype=torch.float32)
    known = torch.nn.functional.normalize(torch.tensor(list(COLOURS.values())) - background, dim=-1)
    pixels = torch.nn.functional.normalize(video.float() - background, dim=-1)
    closeness = (1 - (pixels @ known.T).clamp(-1, 1).acos() / WIDEST_ANGLE).clamp(min=0)
    total = (weight[..., None] * closeness).sum(dim=(1, 2))
    return total / weight.sum(dim=(1, 2)).clamp(min=1e-6)[:, None], visible


def _motion(video: Tensor, prompt: str) -> tuple[Tensor, Tensor, Tensor]:
    """Speeds along and across the named direction, and the visibility, of `displacements`: each [pairs]."""
    along = torch.tensor(DIRECTIONS[_named(prompt, DIRECTIONS, "direction")], dtype=torch.float32)
    moved, visible = displacements(video)
    return moved @ along, (moved @ along.flip(0)).abs(), visible


def displacements(video: Tensor) -> tuple[Tensor, Tensor]:
    """Speed (x, y) from a frame to the one `LAG` later, in frame widths a frame [pairs, 2], and visibility [pairs]."""
    wave, visible = places(video)
    lag = max(1, min(LAG, len(video) - 1))
    turns = -(wave[lag:] * wave[:-lag].conj()).angle() / (2 * math.pi * lag)  # [pairs, xy]
    if len(turns) == 0:  # a single frame shows no motion
        turns, visible = torch.zeros(1, 2), torch.zeros(1 + lag)
    return turns, torch.minimum(visible[lag:], visible[:-lag])


def places(video: Tensor) -> tuple[Tensor, Tensor]:
    """Where the object is in each frame, complex [T, 2], and its visibility [T].

    On a torus a place (x, y) is a phase: that of the foreground's first Fourier coefficient along each axis. Where that
    is small, as with a frame filled with colour or with scattered specks, there is no one object to follow.
    """
    weight, visible = _foreground(video)
    spectra = torch.stack([torch.fft.fft(weight.sum(dim=axis), dim=-1)[:, :2] for axis in (1, 2)], dim=1)  # [T, xy, 2]
    mass, wave = spectra[..., 0].abs(), spectra[..., 1]
    compact = (wave.abs() / (FULL_CONTRAST * mass.clamp(min=1e-6))).amin(dim=1).clamp(max=1)
    return wave, visible * compact
