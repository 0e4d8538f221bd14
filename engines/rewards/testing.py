"""Judges for tests, given as `engines.rewards.testing:Class`, quick and wrong on demand, and a tiny one that writes."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from asyncflow.engine import Invalid
from asyncflow.errors import RewardError
from engines.rewards.base import Outcome, PairwiseReward, PointwiseReward
from engines.rewards.pairs import REFERENCE, scheme


class Brightness(PointwiseReward):
    """The mean of all pixels, over 255: it differs from video to video, and is the same on every rank."""

    name = "brightness"

    def score(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Outcome]:
        """See `PointwiseReward`."""
        return [video.double().mean().item() / 255 for video in videos]


class BrightnessDuel(PairwiseReward):
    """The brighter video wins."""

    name = "brightness-duel"

    def compare(self, videos: Sequence[tuple[Tensor, Tensor]], prompts: Sequence[str]) -> list[Outcome]:
        """See `PairwiseReward`."""
        return [float(first.double().mean() > second.double().mean()) for first, second in videos]


class BaseDuel(BrightnessDuel):
    """The same, of each candidate and the base model's video."""

    name = "base-duel"

    def pairs(self, group_size: int) -> list[tuple[int, int]]:
        """See `PairwiseReward`."""
        return scheme(REFERENCE, group_size, both_orders=True)


class _Meeting:
    """Where those that are apart meet: each goes on once both are judging."""

    patience_s = 30.0

    def __init__(self) -> None:
        self._begun = {"brightness": Event(), "brightness-duel": Event()}

    def wait(self, name: str) -> None:
        """Raises RewardError if the other one does not come."""
        self._begun[name].set()
        if not all(begun.wait(self.patience_s) for begun in self._begun.values()):
            raise RewardError(f"{name} judges alone")


_MEETING = _Meeting()


class ApartBrightness(Brightness):
    """The same, apart, and not before `ApartBrightnessDuel` is judging, too."""

    apart = True

    def score(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Outcome]:
        """See `PointwiseReward`."""
        _MEETING.wait(self.name)
        return super().score(videos, prompts)


class ApartBrightnessDuel(BrightnessDuel):
    """The same, apart, and not before `ApartBrightness` is judging, too."""

    apart = True

    def compare(self, videos: Sequence[tuple[Tensor, Tensor]], prompts: Sequence[str]) -> list[Outcome]:
        """See `PairwiseReward`."""
        _MEETING.wait(self.name)
        return super().compare(videos, prompts)


class NotANumber(Brightness):
    """Forgets that a score must be finite."""

    name = "not-a-number"

    def score(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Outcome]:
        """See `PointwiseReward`."""
        return [math.nan for _ in videos]


class Blind(Brightness):
    """Cannot judge what moves left."""

    name = "blind"

    def score(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Outcome]:
        """See `PointwiseReward`."""
        scores = super().score(videos, prompts)
        return [
            Invalid("it moves left") if "left" in prompt.split() else score
            for score, prompt in zip(scores, prompts, strict=True)
        ]


class Unfit(Blind):
    """The same, where that is not to happen often."""

    name = "unfit"
    max_invalid = 0.3


class Level(Brightness):
    """Finds all videos alike."""

    name = "level"

    def score(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Outcome]:
        """See `PointwiseReward`."""
        return [0.5 for _ in videos]


class Mortal(Brightness):
    """Like an engine that is gone after 40 videos."""

    name = "mortal"
    videos = 40

    def score(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Outcome]:
        """See `PointwiseReward`."""
        self.videos -= len(videos)
        if self.videos < 0:
            raise RewardError("the endpoint does not answer, and went on so")
        return super().score(videos, prompts)


SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>")  # fmt: skip
CHAT = """{% for message in messages %}<|im_start|>{{ message.role }}
{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}\
{{ part.text }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def save_tiny_judge(folder: Path, seed: int = 0, *, layers: int = 2, width: int = 64, pixels: int = 4096) -> None:
    """Write a Qwen2.5-VL folder of random weights, whose tokens are ASCII letters; it writes nonsense.

    `width` is a multiple of 64, and `pixels` are those of the largest image.
    """
    letters = ["Ċ", "Ġ", *map(chr, range(33, 127))]  # as ByteLevel spells newline and space
    made = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=SPECIAL[0], eos_token=SPECIAL[2], chat_template=CHAT
    )
    tokenizer.save_pretrained(folder)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    text = {
        "vocab_size": len(tokenizer), "hidden_size": width, "intermediate_size": width, "num_hidden_layers": layers,
        "num_attention_heads": width // 32, "num_key_value_heads": width // 64, "max_position_embeddings": 8192,
        "bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    vision = {
        "depth": 1, "fullatt_block_indexes": [0], "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
        "out_hidden_size": width, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 32,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    sizes = {"shortest_edge": 256, "longest_edge": pixels}
    images = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "temporal_patch_size": 2, "merge_size": 2,
        "size": sizes,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
