"""What a judge with a Qwen-VL model takes of its device, from its folder's configurations and its weights' headers.

Weights, cache and the tokens of images are exact. Activations are a bound on what transformers makes of a prompt's
tokens at once, and are taken for vLLM's, too. Left out is what the device itself takes. `build` hands it to each judge,
which is asked before anything is loaded.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoImageProcessor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from asyncflow.errors import ConfigError
from engines.rewards.base import Needs
from engines.rewards.protocols.base import ChatProtocol

FLOAT32 = 4
WORDS = 2048
"""Tokens that a conversation's texts may take besides the replies: template, prompt, and what wraps them."""
BLOCK = 128
"""Tokens in whose multiples a cache is given: vLLM's blocks on a CPU, and a multiple of those on a GPU."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of a judge and of its longest conversation, of `prompt` tokens that it reads and `written` that it adds.

    `weights` are the model's; `cache` is a token's keys and values; while a prompt is read, `activations` are those of
    one of its `seen` tokens, of images, and `of_word` those of another; `logits` are those of one that is written. The
    largest image that its processor would ever show takes `largest_image` tokens.
    """

    weights: int
    cache: int
    activations: int
    of_word: int
    logits: int
    seen: int
    prompt: int
    written: int
    largest_image: int

    def needs(self, least: int, most: int, activations: int) -> Needs:
        """With caches for `least` to `most` conversations, and bytes of `activations` at most."""
        conversation = -(-(self.prompt + self.written) // BLOCK) * BLOCK * self.cache
        held = {"judge weights": self.weights, "judge activations": activations}
        return Needs(held, least * conversation, most * conversation)


def in_process_needs(
    folder: Path, protocol: ChatProtocol, rows: int, height: int, width: int, device: torch.device
) -> Needs:
    """Of a judge that answers `rows` conversations as one batch, videos of that many pixels. Raises ConfigError.

    All prompts are read at once, with a mask of a byte for each two tokens; log-probabilities, where they are asked
    for, are kept to a reply's end, and then copied twice.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    made = footprint(folder, protocol, height, width, dtype)
    words = made.prompt - made.seen
    reading = rows * (made.seen * made.activations + words * made.of_word + made.prompt**2)
    writing = 3 * rows * made.written * made.logits if protocol.top_logprobs else 0
    return made.needs(rows, rows, max(reading, writing))


def vllm_needs(
    folder: Path, protocol: ChatProtocol, concurrency: int, batched: int, height: int, width: int, device: torch.device
) -> Needs:
    """Of a judge that vLLM serves in 16 bits, on a CPU too. Raises ConfigError.

    It reads `batched` tokens at once; its vision tower as many as the largest image would take, where that is more.
    """
    made = footprint(folder, protocol, height, width, torch.bfloat16)
    return made.needs(1, concurrency, max(batched, made.largest_image) * made.activations)


def footprint(folder: Path, protocol: ChatProtocol, height: int, width: int, dtype: torch.dtype) -> Footprint:
    """Of the model in `folder`, loaded in `dtype`, and the protocol's longest conversation about videos of that size.

    Raises ConfigError where the folder does not tell.
    """
    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        processor: Any = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
        patches = processor.get_number_of_image_patches(*protocol.shown(height, width))
        image = patches // processor.merge_size**2
        text = config.text_config
        return Footprint(
            weights=elements(folder) * dtype.itemsize,
            cache=cache_bytes(text, dtype),
            activations=activation_bytes(text, config.vision_config, dtype),
            of_word=word_bytes(text, dtype),
            logits=FLOAT32 * text.vocab_size,
            seen=protocol.images * image,
            prompt=protocol.images * image + WORDS + (protocol.turns - 1) * protocol.max_tokens,
            written=protocol.max_tokens,
            largest_image=processor.size["longest_edge"] // (processor.patch_size * processor.merge_size) ** 2,
        )
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise ConfigError(
            f"model: {folder} does not tell what memory it needs ({error}); give the whole folder of a Qwen-VL model, "
            "or serve it and give its url"
        ) from error


def elements(folder: Path) -> int:
    """How many numbers the weights of `folder` are, in the files that transformers would load."""
    names, index = {SAFE_WEIGHTS_NAME}, folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file() and not (folder / SAFE_WEIGHTS_NAME).is_file():
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    total = 0
    for file in names:
        with safe_open(folder / file, "pt") as opened:
            total += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())
    return total


def cache_bytes(text: Any, dtype: torch.dtype) -> int:
    """Of a token: keys and values in every layer that attends to what was before."""
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    layers = sum(kind != "linear_attention" for kind in kinds)
    return 2 * layers * text.num_key_value_heads * _head_width(text) * dtype.itemsize


def activation_bytes(text: Any, vision: Any, dtype: torch.dtype) -> int:
    """Of an image's token while its prompt is read.

    That is its pixels, copies of its features on their way among the words', and the more of two: in the language model
    the three products of a gated MLP beside what is normalised and added; in the vision tower, for each of the patches
    that were merged into the token, the same of its MLP, or queries and keys that are rotated in float32.
    """
    size, patches = dtype.itemsize, vision.spatial_merge_size**2
    pixels = FLOAT32 * vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    features = 2 * size * text.hidden_size * len(getattr(vision, "deepstack_visual_indexes", ()))
    width = getattr(vision, "embed_dim", vision.hidden_size)
    hidden = vision.intermediate_size if hasattr(vision, "intermediate_size") else vision.mlp_ratio * width
    tower = max(size * (3 * hidden + 4 * width), (9 * size + 6 * FLOAT32) * width)
    among_words = 3 * size * text.hidden_size
    return patches * pixels + features + max(word_bytes(text, dtype), among_words + patches * tower)


def word_bytes(text: Any, dtype: torch.dtype) -> int:
    """Of a text's token while its prompt is read: its embedding on its way, and what the language model makes of it."""
    experts = getattr(text, "moe_intermediate_size", 0) * getattr(text, "num_experts_per_tok", 0)
    hidden = 3 * max(text.intermediate_size, experts) + 2 * _head_width(text)
    return dtype.itemsize * (hidden + (3 + 4) * text.hidden_size)


def _head_width(text: Any) -> int:
    width: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return width
