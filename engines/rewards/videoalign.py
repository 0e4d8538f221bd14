"""VideoAlign's VideoReward: what people would think of a video's quality, its motion, and its fit to the prompt.

A Qwen2-VL with a LoRA and a linear head, which reads a score at each of three tokens of its own (arXiv 2501.13918).
It loads from the folder of KwaiVGI/VideoReward as it is, with the base's config.json in it; the package is not needed.
Frames, prompt and positions are those it was trained with (KwaiVGI/VideoAlign 219ab9d, on transformers 4.45.2).
`build` makes it.
"""

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.nn.functional import interpolate
from transformers import AutoConfig, AutoTokenizer, Qwen2VLConfig, Qwen2VLModel
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from asyncflow.engine import Invalid
from asyncflow.errors import ModelError
from engines.policy.original import check_names
from engines.rewards.base import Needs, Outcome, PointwiseReward
from engines.rewards.protocols.base import TEMPLATES, fill

DIMENSIONS = ("VQ", "MQ", "TA")
"""Visual quality, motion quality, text alignment."""
VARIANTS = {"videoalign": DIMENSIONS, "videoalign-vq": ("VQ",), "videoalign-mq": ("MQ",), "videoalign-ta": ("TA",)}
"""Of each name, the dimensions that are summed."""

TOKENS = [f"<|{dimension}_reward|>" for dimension in DIMENSIONS]
PROMPT = (TEMPLATES / "videoalign.txt").read_text(encoding="utf-8")
"""The authors' words, to the last space, since the weights were trained with them."""
LEAST_FRAMES, MOST_FRAMES, LEAST_PIXELS = 4, 768, 128 * 28 * 28

WRAPPER = "base_model.model."
"""What PEFT puts before the names of a checkpoint."""
HEAD, UNUSED = f"{WRAPPER}rm_head.weight", f"{WRAPPER}lm_head.weight"
HINT = "give the folder of KwaiVGI/VideoReward with config.json of Qwen/Qwen2-VL-2B-Instruct in it"


class _Data(msgspec.Struct):
    fps: float
    max_frame_pixels: int
    prompt_template_type: Literal["detailed_special"]
    sample_type: Literal["uniform"]
    num_frames: None = None


class _Lora(msgspec.Struct):
    lora_r: int
    lora_alpha: float
    use_rslora: bool = False

    @property
    def scale(self) -> float:
        return self.lora_alpha / (self.lora_r**0.5 if self.use_rslora else self.lora_r)


class _Norms(msgspec.Struct):
    VQ_mean: float
    VQ_std: float
    MQ_mean: float
    MQ_std: float
    TA_mean: float
    TA_std: float


class _Settings(msgspec.Struct):
    """What the scores depend on in model_config.json."""

    data_config: _Data
    peft_lora_config: _Lora
    inference_config: _Norms


class VideoAlign(PointwiseReward):
    """The sum of a variant's dimensions, each less the mean of the authors' videos and over their deviation."""

    def __init__(self, folder: Path, name: str = "videoalign") -> None:
        """Raises ModelError if `folder` does not hold what the reward needs, before any weights are read."""
        self.name = name
        self._dimensions = VARIANTS[name]
        self._settings = _read_settings(folder / "model_config.json")
        checkpoints = sorted(folder.glob("checkpoint-*/model.pth"), key=lambda path: (len(str(path)), path))
        if not checkpoints or not (folder / "config.json").is_file():
            missing = "config.json" if checkpoints else "checkpoint-*/model.pth"
            raise ModelError(f"{folder} has no {missing}; {HINT}")
        self._file = checkpoints[-1]
        self._tokenizer = _read_tokenizer(self._file.parent / "tokenizer")
        self._tokens: list[int] = self._tokenizer.convert_tokens_to_ids(TOKENS)
        self._config = _read_config(folder, len(self._tokenizer))
        self._check(_read_weights(self._file), self._empty_model())

    def needs(self, height: int, width: int, device: torch.device) -> Needs:
        """See `Reward`. The weights; what a forward takes beside them depends on how long a video is."""
        itemsize = _dtype(device).itemsize
        return Needs({"judge weights": itemsize * sum(p.numel() for p in self._empty_model().parameters())})

    def load(self, device: torch.device) -> None:
        """See `Reward`. The LoRA is merged in float32; on a GPU the model, but not its head, is bfloat16."""
        model, state, scale = self._empty_model(), _read_weights(self._file), self._settings.peft_lora_config.scale
        factors = _factors(model)
        weights = {}
        for name, released in _released(model).items():
            weight = state[released].float()
            if released in factors:
                down, up = (state[factor].float() for factor in factors[released])
                weight = weight + scale * (up @ down)
            weights[name] = weight.to(device, _dtype(device), copy=True)
        model.load_state_dict(weights, assign=True)
        self._model = model.eval().requires_grad_(False).to(device)
        self._head = state[HEAD].to(device, torch.float32, copy=True)

    def score(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Outcome]:
        """See `PointwiseReward`. One by one, so that a score does not depend on who is judged beside."""
        outcomes = []
        for video, prompt in zip(videos, prompts, strict=True):
            outcomes.append(self._score(video, prompt))
            self.progress()
        return outcomes

    def _score(self, video: Tensor, prompt: str) -> Outcome:
        if len(video) < 2:
            return Invalid("the video has one frame, and VideoReward judges two or more")
        if {self._config.video_token_id, *self._tokens} & set(self._tokenizer(prompt)["input_ids"]):
            return Invalid("the prompt holds a token that means something to VideoReward")
        norms = self._settings.inference_config
        scores = zip(DIMENSIONS, self._forward(video, prompt).tolist(), strict=True)
        return sum(
            (score - getattr(norms, f"{dimension}_mean")) / getattr(norms, f"{dimension}_std")
            for dimension, score in scores
            if dimension in self._dimensions
        )

    @torch.inference_mode()
    def _forward(self, video: Tensor, prompt: str) -> Tensor:
        """The raw scores [3].

        Tokens are numbered one after another, those of the video too: the authors' forward never asked for Qwen2-VL's
        positions in time, height and width.
        """
        data, vision, device = self._settings.data_config, self._config.vision_config, self._model.device
        frames = sampled(video, self.fps, data.fps)
        pixels, grid = patches(frames, data.max_frame_pixels, vision.patch_size, vision.spatial_merge_size)
        ids = self._ids(prompt, int(grid.prod()) // vision.spatial_merge_size**2)
        hidden = self._model(
            input_ids=ids[None].to(device),
            position_ids=torch.arange(len(ids), device=device)[None],
            pixel_values_videos=pixels.to(device),
            video_grid_thw=grid[None].to(device),
            use_cache=False,
        ).last_hidden_state[0]
        places = (ids == torch.tensor(self._tokens)[:, None]).int().argmax(dim=1)
        scores: Tensor = (hidden[places.to(device)].float() * self._head).sum(dim=1)
        return scores

    def _ids(self, prompt: str, seen: int) -> Tensor:
        """The conversation's tokens, `seen` of which stand for the video."""
        parts = [{"type": "video"}, {"type": "text", "text": fill(PROMPT, prompt=prompt)}]
        chat = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        placeholder = self._tokenizer.convert_ids_to_tokens(self._config.video_token_id)
        ids: Tensor = self._tokenizer(chat.replace(placeholder, placeholder * seen), return_tensors="pt")["input_ids"]
        return ids[0]

    def _empty_model(self) -> Qwen2VLModel:
        """The model that the folder describes, its parameters on the meta device."""
        with init_empty_weights():
            return Qwen2VLModel(self._config)

    def _check(self, state: Mapping[str, Tensor], model: Qwen2VLModel) -> None:
        """Raises ModelError unless a checkpoint has the tensors of that model, its LoRA and head, and no others."""
        factors = _factors(model)
        names = {*_released(model).values(), *(name for pair in factors.values() for name in pair), HEAD, UNUSED}
        check_names(self._file, "a VideoReward", names - state.keys(), state.keys() - names)
        rank, width = self._settings.peft_lora_config.lora_r, self._config.text_config.hidden_size
        expected = {released: model.get_parameter(name).shape for name, released in _released(model).items()}
        for name, (down, up) in factors.items():
            rows, columns = expected[name]
            expected |= {down: torch.Size((rank, columns)), up: torch.Size((rows, rank))}
        expected[HEAD] = torch.Size((len(DIMENSIONS) if len(state[HEAD]) > 1 else 1, width))
        for name, shape in expected.items():
            if state[name].shape != shape:
                raise ModelError(
                    f"{self._file}: {name} is {list(state[name].shape)}, and by the configurations and the tokenizer "
                    f"beside it should be {list(shape)}; {HINT}"
                )


def sampled(video: Tensor, fps: float, wanted: float) -> Tensor:
    """Frames of a video [T, ...] with `fps` frames a second, about `wanted` a second: an even number, first to last."""
    most = min(MOST_FRAMES, len(video)) // 2 * 2
    count = round(min(max(len(video) / fps * wanted, LEAST_FRAMES), most) / 2) * 2
    return video[torch.linspace(0, len(video) - 1, count).round().long()]


def patches(frames: Tensor, most_pixels: int, patch: int, merge: int) -> tuple[Tensor, Tensor]:
    """Frames, uint8 [T, H, W, 3] with an even T, as Qwen2-VL takes a video: patches [N, D], and the grid [3] of them.

    Two frames make a patch. Each is fitted to at most so many pixels, in whole tokens of `merge` x `merge` patches.
    The order is that of transformers' Qwen2VLVideoProcessor, which would need torchvision.
    """
    factor = patch * merge
    height, width = smart_resize(*frames.shape[1:3], factor, LEAST_PIXELS, most_pixels)
    pixels = frames.permute(0, 3, 1, 2).float()
    if (height, width) != tuple(pixels.shape[2:]):
        pixels = interpolate(pixels, (height, width), mode="bicubic", antialias=True).clamp(0, 255).round()
    mean, std = (torch.tensor(values)[:, None, None] for values in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
    pixels = (pixels / 255 - mean) / std
    times, rows, columns = len(frames) // 2, height // patch, width // patch
    blocks = pixels.reshape(times, 2, 3, rows // merge, merge, patch, columns // merge, merge, patch)
    flat = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(times * rows * columns, 3 * 2 * patch**2)
    return flat, torch.tensor([times, rows, columns])


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _linears(model: Qwen2VLModel) -> set[str]:
    """Those with a LoRA: all of the language model, none of the vision model."""
    return {f"language_model.{n}" for n, m in model.language_model.named_modules() if isinstance(m, nn.Linear)}


def _released(model: Qwen2VLModel) -> dict[str, str]:
    """Of each of the model's weights, the name in the checkpoint: as transformers 4.45.2 and PEFT named it."""
    linears, names = _linears(model), {}
    for name in model.state_dict():
        module, _, kind = name.rpartition(".")
        base = ".base_layer" if module in linears else ""
        names[name] = f"{WRAPPER}{module.removeprefix('language_')}{base}.{kind}"
    return names


def _factors(model: Qwen2VLModel) -> dict[str, tuple[str, str]]:
    """Of each weight in the checkpoint that has a LoRA, the names of its factors A and B."""
    modules = [f"{WRAPPER}{name.removeprefix('language_')}" for name in _linears(model)]
    return {
        f"{module}.base_layer.weight": (f"{module}.lora_A.default.weight", f"{module}.lora_B.default.weight")
        for module in modules
    }


def _read_settings(path: Path) -> _Settings:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Settings)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{path} does not describe a VideoReward: {error}; {HINT}") from None


def _read_tokenizer(folder: Path) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder} holds no tokenizer that can be loaded: {_first_line(error)}; {HINT}") from None
    if missing := set(TOKENS) - tokenizer.get_vocab().keys():
        raise ModelError(f"{folder} has no {', '.join(sorted(missing))}; give VideoReward's own tokenizer")
    return tokenizer


def _read_config(folder: Path, vocabulary: int) -> Qwen2VLConfig:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder / 'config.json'} cannot be read: {_first_line(error)}; {HINT}") from None
    if not isinstance(config, Qwen2VLConfig):
        raise ModelError(f"{folder / 'config.json'} describes a {config.model_type}; {HINT}")
    config.text_config.vocab_size = vocabulary  # the reward's tokens were added to it
    return config


def _read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, read when they are used."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ModelError(f"{path} cannot be read as a PyTorch checkpoint: {_first_line(error)}") from None
    return state if isinstance(state, dict) else {}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
