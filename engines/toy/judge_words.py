"""What the tiny judge says: the answer that the pixel measure would give, in words, and the tokenizer for it.

Invariant: an answer states only what is in the frames shown, then what follows from it; each word and each digit is a
token, so answers to the toy's prompts are equally long. Called by `engines.toy.make_judge` and `assess_judge`.
"""

from dataclasses import dataclass
from itertools import product

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from engines.rewards.pixels import LEAST_SPEED, colour_scores, colours, displacements, motion_score
from engines.rewards.testing import CHAT, SPECIAL
from engines.toy.videos import COLOURS, DIRECTIONS, FRAMES, all_prompts

SHOWN = 9  # frames, four apart, as are those that the pixel measure compares
PLACES = list(range(0, FRAMES, (FRAMES - 1) // (SHOWN - 1)))
NONE = "none"  # no colour where nothing is visible, no direction where nothing moves
WAYS = {(0, False): "right", (0, True): "left", (1, False): "down", (1, True): "up"}  # by axis and sign


@dataclass(frozen=True)
class Seen:
    """What there is to say of a video: a word a frame shown and a word a step between two, and its scores in [0, 1]."""

    colours: list[str]
    steps: list[str]
    colour_scores: dict[str, float]
    motion_scores: dict[str, float]

    def answer(self, prompt: str) -> str:
        """The judge's whole answer, its scores from 0 to 10."""
        colour, way = named(prompt)
        colour_score, motion_score = 10 * self.colour_scores[colour], 10 * self.motion_scores[way]
        return (
            f"Colours: {_counted(self.colours)}, so {colour} in {self.colours.count(colour)} of {SHOWN}. "
            f"Steps: {_counted(self.steps)}, so {way} in {self.steps.count(way)} of {SHOWN - 1}. "
            f"Colour {colour_score:.1f}, motion {motion_score:.1f}: "
            f"<score>{(colour_score + motion_score) / 2:.1f}</score>"
        )


def _counted(words: list[str]) -> str:
    return " ".join(f"{number} {word}" for number, word in enumerate(words, 1))


def look(video: Tensor) -> Seen:
    """What there is to see in a video, uint8 [33, H, W, 3]."""
    closeness, visible = colours(video)
    names = list(COLOURS)
    nearest = [names[i] for i in closeness.argmax(dim=1).tolist()]
    moved, followed = displacements(video)
    axis = moved.abs().argmax(dim=1)
    speed = moved.gather(1, axis[:, None]).squeeze(1)
    steps = [
        WAYS[i, s < 0] if abs(s) > LEAST_SPEED and f >= 0.5 else NONE
        for i, s, f in zip(axis.tolist(), speed.tolist(), followed.tolist(), strict=True)
    ]
    return Seen(
        [nearest[place] if visible[place] >= 0.5 else NONE for place in PLACES],
        [steps[place] for place in PLACES[:-1]],
        colour_scores(video),
        {way: motion_score(video, way) for way in DIRECTIONS},
    )


def named(prompt: str) -> tuple[str, str]:
    """The colour and the direction that a prompt of the grammar names."""
    words = prompt.split()
    (colour,), (way,) = [w for w in words if w in COLOURS], [w for w in words if w in DIRECTIONS]
    return colour, way


def new_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as Qwen's, with a token for every word of the template and of the answers."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    words = " ".join([*COLOURS, *DIRECTIONS, NONE, *map(str, range(11))])
    scores = [f"{whole}.{tenth}" for whole, tenth in product(range(11), range(10))]
    texts = [f"Colours {template} Steps Colour motion: so in of. {words},", *all_prompts(), *scores]
    trainer = trainers.BpeTrainer(
        vocab_size=4096, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    made.train_from_iterator(texts * 2, trainer)
    made.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    made.add_tokens([AddedToken(name, normalized=False) for name in ("<score>", "</score>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=SPECIAL[0], eos_token=SPECIAL[2], chat_template=CHAT
    )
