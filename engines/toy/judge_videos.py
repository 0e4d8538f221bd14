"""What the toy's judge learns from: videos with faults, painted or made by the toy itself, and prompts for them.

Invariant: no held-out prompt is ever drawn, and the toy is asked for none. Called by `engines.toy.make_judge`, and by
`engines.toy.assess_judge` for videos that the judge has not seen.
"""

from pathlib import Path

import torch
from torch import Tensor

from engines.policy import load_policy
from engines.text import load_text_encoder
from engines.toy.assess import BATCH, generate
from engines.toy.videos import BACKGROUND, COLOURS, DIRECTIONS, FRAMES, SHAPES, SIZE, paint, prompt_of, split_prompts
from engines.vae import StreamingDecoder, load_vae

RADIUS = (5.0, 10.0)  # pixels; wider than that of the toy's own training videos
SPEED = (0.4, 1.1)  # pixels a frame
SLOWEST, LONGEST = 0.5, 20.0  # frames that a change takes
NOISE = 6.0  # the most, of 255
AS_SEEN = 0.5  # share of the prompts that name the colour, and of those that name the direction, most often seen
CHATTY = 0.3  # share of the prompts with words that mean nothing to the judge
LETTERS = "".join(map(chr, range(33, 127))) + "äéñßøπшж漢字🙂"  # of such words


def paint_faulty(prompts: list[str], generator: torch.Generator) -> Tensor:
    """A video of each prompt of the grammar, uint8 [N, 33, 32, 32, 3], some of them faultless.

    In others the colour changes, at once or slowly, or lies between two; the object fades; it turns, goes askew, slows
    down or stands; and there is noise.
    """
    n, words = len(prompts), [prompt.split() for prompt in prompts]

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(n, *shape).uniform_(low, high, generator=generator)

    def happens(share: float) -> Tensor:
        return torch.rand(n, 1, 1, generator=generator) < share

    def change() -> Tensor:
        """From 0 to 1 in the course of a video: [n, T, 1]."""
        return ((time - uniform(0, FRAMES, 1, 1)) / uniform(SLOWEST, LONGEST, 1, 1)).clamp(0, 1)

    time = torch.arange(FRAMES)[:, None]
    palette, ways = (torch.tensor(list(known.values())).float() for known in (COLOURS, DIRECTIONS))
    colour = torch.tensor([COLOURS[word[1]] for word in words])[:, None].float()
    other = palette[torch.randint(len(palette), (n, 1), generator=generator)]
    mixed = torch.where(happens(0.15), uniform(0, 1, 1, 1), change()) * happens(0.55)
    colour = colour + mixed * (other - colour)
    fading = torch.where(happens(0.5), change(), change().flip(1)) * uniform(0.3, 1, 1, 1) * happens(0.25)
    colour = colour + fading * (torch.tensor(BACKGROUND) - colour)

    way = torch.tensor([DIRECTIONS[word[4]] for word in words])[:, None].float()
    other = ways[torch.randint(len(ways), (n, 1), generator=generator)]
    turned = (time >= uniform(0, FRAMES, 1, 1)) & happens(0.25)
    askew = uniform(-1, 1, 1, 1) * happens(0.1)
    slowed = (time >= uniform(-FRAMES, FRAMES, 1, 1)) & happens(0.25)
    speed = torch.where(slowed, uniform(-0.5, 0.7, 1, 1).clamp(min=0), 1) * uniform(*SPEED, 1, 1)
    velocity = (torch.where(turned, other, way) + askew * other) * speed
    centre = uniform(0, SIZE, 1, 2) + velocity.cumsum(dim=1)

    shape = torch.tensor([SHAPES.index(word[2]) for word in words])
    clean = paint(centre, colour, shape, uniform(*RADIUS))
    deviation = (uniform(0, NOISE, 1, 1) * happens(0.5))[..., None, None]
    noise = deviation * torch.randn(clean.shape, generator=generator)
    return (clean + noise).round().clamp(0, 255).to(torch.uint8)


@torch.no_grad()
def generate_videos(model: Path, prompts: list[str], generator: torch.Generator) -> Tensor:
    """A video of each prompt by the toy in `model`, uint8 [N, 33, 32, 32, 3]."""
    policy, vae = load_policy(model), load_vae(model)
    settings = policy.settings
    size = settings.height // 8, settings.width // 8
    texts = load_text_encoder(model, settings.text_length).encode(prompts).split(BATCH)
    return torch.cat([StreamingDecoder(vae).decode(generate(policy, text, size, generator)) for text in texts])


def vary(videos: Tensor, generator: torch.Generator) -> Tensor:
    """Each of [N, T, 32, 32, 3] in another place, and now and then in other colours, turned, mirrored or backwards."""

    def one(video: Tensor) -> Tensor:
        dice = torch.rand(5, generator=generator).tolist()
        if dice[0] < 0.5:
            video = video[..., torch.randperm(3, generator=generator)]
        if dice[1] < 0.5:
            video = video.transpose(1, 2)
        video = video.flip([axis for axis, share in enumerate((0.25, 0.5, 0.5)) if dice[2 + axis] < share])
        return video.roll(torch.randint(SIZE, (2,), generator=generator).tolist(), (1, 2))

    return torch.stack([one(video) for video in videos])


def draw_prompt(colours: list[str], steps: list[str], generator: torch.Generator) -> str:
    """A training prompt for a video in which these are seen: it names each of them, or any other."""

    def integer(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    def happens(share: float) -> bool:
        return bool(torch.rand((), generator=generator) < share)

    def name(known: list[str], seen: list[str]) -> str:
        seen = [word for word in seen if word in known]
        return max(seen, key=seen.count) if seen and happens(AS_SEEN) else known[integer(len(known))]

    colour, way = name(list(COLOURS), colours), name(list(DIRECTIONS), steps)
    training, _ = split_prompts()
    possible = [prompt for shape in SHAPES if (prompt := prompt_of(colour, shape, way)) in training]
    prompt = possible[integer(len(possible))]
    if not happens(CHATTY):
        return prompt
    words = ["".join(LETTERS[integer(len(LETTERS))] for _ in range(1 + integer(8))) for _ in range(1 + integer(4))]
    words = [word for word in words if word not in COLOURS and word not in DIRECTIONS]
    return " ".join([prompt, *words] if happens(0.5) else [*words, prompt])
