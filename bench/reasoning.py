"""A judge that costs what a reasoning judge costs: a tiny vision-language model thinks, the pixel judge decides.

The score is the pixel judge's colour score, so it depends on neither the thinking nor the batch; the thinking is real:
a Qwen2.5-VL with random weights sees the frames and generates `TOKENS` tokens for the whole batch at once. Given as
`--reward bench.reasoning:ReasoningJudge`; `bench.schedules` chooses the tokens.
"""

import os
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from engines.rewards.base import Outcome
from engines.rewards.toy import Colour

TOKENS = "ASYNCFLOW_BENCH_TOKENS"
"""The environment variable that says how many tokens are generated for each video; 32 without it."""
SIDE, PATCH, MERGE, PAIR = 32, 8, 2, 2  # pixels a side, pixels a patch, patches a token's side, frames a patch
EVERY = 4  # the judge looks at every 4th frame
SEES, SAW, VIDEO, VOCABULARY = 123, 124, 126, 128


def tiny_model() -> Qwen2_5_VLForConditionalGeneration:
    """A Qwen2.5-VL of 4 layers and width 128, its weights drawn from a fixed seed; it never ends a sentence early."""
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    vision = {
        "depth": 2, "fullatt_block_indexes": [1], "hidden_size": 128, "intermediate_size": 256, "num_heads": 4,
        "out_hidden_size": 128, "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": PAIR,
        "window_size": 2 * PATCH * MERGE,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=125, video_token_id=VIDEO,
        vision_start_token_id=SEES, vision_end_token_id=SAW,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2_5_VLForConditionalGeneration(config)


def patches(videos: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Videos, uint8 [T, H, W, 3] of one length, as Qwen2.5-VL takes them: patches [N, D] and grids [B, 3].

    The order of the patches is that of transformers' Qwen2VLVideoProcessor, which would need torchvision.
    """
    seen = torch.stack([video[::EVERY] for video in videos]).float() / 127.5 - 1
    seen = seen[:, : len(seen[0]) // PAIR * PAIR]
    batch, frames = seen.shape[:2]
    pixels = interpolate(seen.flatten(0, 1).permute(0, 3, 1, 2), size=(SIDE, SIDE), mode="area")
    times, side = frames // PAIR, SIDE // PATCH
    blocks = pixels.reshape(batch, times, PAIR, 3, side // MERGE, MERGE, PATCH, side // MERGE, MERGE, PATCH)
    flat = blocks.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9).reshape(batch * times * side**2, 3 * PAIR * PATCH**2)
    return flat, torch.tensor([[times, side, side]] * batch)


class ReasoningJudge(Colour):
    """The pixel judge's colour score, after some thought."""

    name = "reasoning"

    def load(self, device: torch.device) -> None:
        """See `Reward`."""
        self._model = tiny_model().eval().to(device)
        self._tokens = int(os.environ.get(TOKENS, "32"))

    def score(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Outcome]:
        """See `PointwiseReward`."""
        self.think(videos)
        return super().score(videos, prompts)

    @torch.inference_mode()
    def think(self, videos: Sequence[Tensor]) -> Tensor:
        """The tokens [B, L] of question and thought, greedily generated, always the same number of them."""
        device = self._model.device
        pixels, grids = patches(videos)
        looks = int(grids[0].prod()) // MERGE**2
        question = torch.tensor([[1, SEES, *[VIDEO] * looks, SAW, 2]] * len(videos), device=device)
        return self._model.generate(
            input_ids=question,
            attention_mask=torch.ones_like(question),
            mm_token_type_ids=(question == VIDEO) * 2,
            pixel_values_videos=pixels.to(device),
            video_grid_thw=grids.to(device),
            second_per_grid_ts=[1.0] * len(videos),
            do_sample=False,
            min_new_tokens=self._tokens,
            max_new_tokens=self._tokens,
        )
