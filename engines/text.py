"""Prompts to text embeddings, as `WanPipeline` makes them."""

from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import WanPipeline
from torch import Tensor
from transformers import AutoTokenizer, UMT5EncoderModel

from asyncflow.errors import ModelError


class TextEncoder:
    """The frozen tokenizer and UMT5 encoder of a model folder."""

    def __init__(self, tokenizer: AutoTokenizer, encoder: UMT5EncoderModel, length: int) -> None:
        self.length = length
        self._pipeline = WanPipeline(tokenizer, encoder, vae=None, scheduler=None)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Embeddings [N, length, D] on the encoder's device; zero beyond a prompt's own tokens.

        Prompts go through the encoder one by one: which others are asked for never changes a prompt's bits.
        """
        return torch.cat([self._encode(prompt) for prompt in prompts])

    def _encode(self, prompt: str) -> Tensor:
        embeddings: Tensor
        embeddings, _ = self._pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=self.length
        )
        return embeddings


def load_text_encoder(
    folder: Path, length: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> TextEncoder:
    """Load `tokenizer/` and `text_encoder/` of a diffusers folder; `length` is the model's `text_length`.

    Raises `ModelError`.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)
        encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=dtype, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{folder} holds no readable tokenizer/ and text_encoder/: {error}") from error
    return TextEncoder(tokenizer, encoder.requires_grad_(False).to(device).eval(), length)
