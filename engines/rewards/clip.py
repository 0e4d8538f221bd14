"""`hpsv2` and `pickscore`: how well a frame fits the prompt, by CLIP models that learned from people's choices.

Both are ViT-H/14 models that judge pictures; a video has the mean of a few frames. They load on transformers from a
folder that the user names, as `hpsv2@FOLDER`; the packages `hpsv2` and `open_clip` are not needed.
"""

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad
from transformers import AutoImageProcessor, AutoTokenizer, CLIPConfig, CLIPModel
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from asyncflow.errors import ConfigError, RewardError
from engines.rewards.base import Needs, Outcome, PointwiseReward
from engines.rewards.protocols.base import evenly

FRAMES = 8
TOKENIZER = ("vocab.json", "tokenizer.json")
"""Of these a folder has at least one."""


class ClipReward(PointwiseReward):
    """The cosine between the prompt and the frames of a video, times `scale`."""

    files: ClassVar[tuple[str, ...]] = ("config.json",)
    hint: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if `folder` does not hold what the reward needs."""
        missing = [name for name in self.files if not (folder / name).is_file()]
        if not any((folder / name).is_file() for name in TOKENIZER):
            missing.append(TOKENIZER[0])
        if missing:
            raise ConfigError(f"{folder} has no {', '.join(missing)}; give {self.hint}")
        self._folder = folder

    def needs(self, height: int, width: int, device: torch.device) -> Needs:
        """See `Reward`. The weights; a forward takes far less. Raises ConfigError."""
        try:
            config = CLIPConfig.from_pretrained(self._folder, local_files_only=True)
            with torch.device("meta"):
                model = CLIPModel(config)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{self._folder / 'config.json'} describes no CLIP model: {error}") from error
        return Needs({"judge weights": sum(p.numel() * p.itemsize for p in model.parameters())})

    def load(self, device: torch.device) -> None:
        """See `Reward`. Computes in float32, since scores differ in the third digit."""
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
            self._model = self._load_model().eval().requires_grad_(False).to(device)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise RewardError(f"{self._folder} holds no {self.name} that can be loaded: {error}") from error

    @torch.inference_mode()
    def score(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Outcome]:
        """See `PointwiseReward`."""
        return [self._score(video, prompt) for video, prompt in zip(videos, prompts, strict=True)]

    def _score(self, video: Tensor, prompt: str) -> float:
        length = self._model.config.text_config.max_position_embeddings
        words = self._tokenizer(prompt, truncation=True, max_length=length, return_tensors="pt")["input_ids"]
        pixels = self._pixels(evenly(video, FRAMES))
        seen = self._model(input_ids=words.to(self._model.device), pixel_values=pixels.to(self._model.device))
        return (seen.image_embeds @ seen.text_embeds[0]).mean().item() * self._scale()

    @abstractmethod
    def _load_model(self) -> CLIPModel:
        """The model, on the host."""

    @abstractmethod
    def _pixels(self, frames: Sequence[Tensor]) -> Tensor:
        """What the model sees of frames, uint8 [H, W, 3]: float32 [N, 3, side, side]."""

    def _scale(self) -> float:
        return 1.0


class HPSv2(ClipReward):
    """HPSv2.1 (tgxs002/HPSv2): a cosine, about 0.2 to 0.3."""

    name = "hpsv2"
    weights = "HPS_v2.1_compressed.pt"
    files = ("config.json", weights)
    hint = f"the folder of laion/CLIP-ViT-H-14-laion2B-s32B-b79K with {weights} of xswu/HPSv2 in it"

    def _load_model(self) -> CLIPModel:
        state = torch.load(self._folder / self.weights, weights_only=True, map_location="cpu")
        model = CLIPModel(CLIPConfig.from_pretrained(self._folder, local_files_only=True))
        model.load_state_dict(from_open_clip(state["state_dict"]))
        return model

    def _pixels(self, frames: Sequence[Tensor]) -> Tensor:
        return torch.stack([letterbox(frame, self._model.config.vision_config.image_size) for frame in frames])


class PickScore(ClipReward):
    """PickScore (yuvalkirstain/PickScore): a scaled cosine, divided by 26 as is usual, about 0.7 to 0.9."""

    name = "pickscore"
    files = ("config.json", "preprocessor_config.json")
    hint = (
        "the folder of yuvalkirstain/PickScore_v1 with the tokenizer and preprocessor_config.json of "
        "laion/CLIP-ViT-H-14-laion2B-s32B-b79K in it"
    )

    def _load_model(self) -> CLIPModel:
        self._images: Any = AutoImageProcessor.from_pretrained(self._folder, local_files_only=True)
        return CLIPModel.from_pretrained(self._folder, dtype=torch.float32, local_files_only=True)

    def _pixels(self, frames: Sequence[Tensor]) -> Tensor:
        pixels: Tensor = self._images([Image.fromarray(f.numpy()) for f in frames], return_tensors="pt")["pixel_values"]
        return pixels

    def _scale(self) -> float:
        return self._model.logit_scale.exp().item() / 26


def letterbox(frame: Tensor, side: int) -> Tensor:
    """A frame, uint8 [H, W, 3], as HPSv2 shows it to CLIP: within a black square, normalised [3, side, side]."""
    pixels = frame.permute(2, 0, 1).float() / 255
    height, width = (round(size * side / max(pixels.shape[1:])) for size in pixels.shape[1:])
    if (height, width) != tuple(pixels.shape[1:]):
        pixels = interpolate(pixels[None], (height, width), mode="bicubic", antialias=True)[0]
    left, above = (side - width) // 2, (side - height) // 2
    pixels = pad(pixels, (left, side - width - left, above, side - height - above))
    return (pixels - torch.tensor(OPENAI_CLIP_MEAN)[:, None, None]) / torch.tensor(OPENAI_CLIP_STD)[:, None, None]


RENAMED = [
    (r"^positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^ln_final\.", "text_model.final_layer_norm."),
    (r"^text_projection$", "text_projection.weight"),
    (r"^transformer\.resblocks\.", "text_model.encoder.layers."),
    (r"^visual\.class_embedding$", "vision_model.embeddings.class_embedding"),
    (r"^visual\.positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
    (r"^visual\.conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"^visual\.ln_pre\.", "vision_model.pre_layrnorm."),
    (r"^visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"^visual\.proj$", "visual_projection.weight"),
    (r"^visual\.transformer\.resblocks\.", "vision_model.encoder.layers."),
    (r"\.ln_([12])\.", r".layer_norm\1."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
    (r"\.attn\.out_proj\.", ".self_attn.out_proj."),
]
"""Names of weights in open_clip, and in transformers."""


def from_open_clip(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of an open_clip ViT, as transformers' `CLIPModel` names and shapes them."""
    made = {}
    for name, tensor in state.items():
        for pattern, replacement in RENAMED:
            name = re.sub(pattern, replacement, name)
        if found := re.fullmatch(r"(.*)\.attn\.in_proj_(weight|bias)", name):
            layer, kind = found.groups()
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                made[f"{layer}.self_attn.{part}_proj.{kind}"] = rows
        else:
            made[name] = tensor.T if name.endswith("_projection.weight") else tensor
    return made
