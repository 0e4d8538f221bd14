"""Build the toy's text parts and pre-train its causal Wan transformer on encoded procedural videos.

Invariant: every part is a stock class, so the folder loads as any `WanPipeline` does; only the weights are ours. The
text encoder stays as it was drawn. Trained on the training prompts alone. Called by `engines.toy.make`.
"""

import logging
import math
from collections.abc import Callable

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from diffusers.training_utils import EMAModel
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from engines.policy.policy import Policy
from engines.policy.settings import CausalSettings
from engines.text import TextEncoder
from engines.toy.make_vae import draw, to_model
from engines.toy.videos import COLOURS, DIRECTIONS, SHAPES, all_prompts, split_prompts

log = logging.getLogger(__name__)

SETTINGS = CausalSettings(latent_frames=9, height=32, width=32, fps=8, text_length=16)
VIDEOS = 6144
STEPS = 4500
BATCH = 32
LEARNING_RATE = 2e-3
CONTEXT_NOISE = 0.1  # up to this much of the context is noise, since what a rollout sees of itself is not clean either
# Share of the captions whose colour is drawn at random, as captions from the web are unreliable: the model learns to
# paint, but follows its prompt loosely, which reinforcement learning is to mend.
COLOUR_NOISE = 0.3
SAMPLER_SHARE = 0.75  # of the noise levels are the sampler's own; the rest lie anywhere on the shifted schedule


def new_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word of the grammar, lower case, closed by `</s>`."""
    words = ["<pad>", "</s>", "<unk>", *sorted({word for prompt in all_prompts() for word in prompt.split()})]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        model_max_length=SETTINGS.text_length,
    )


def new_pipeline(vae: AutoencoderKLWan, seed: int = 0) -> WanPipeline:
    """The whole toy with an untrained transformer (1.23 M parameters) and its final text encoder (0.08 M)."""
    torch.manual_seed(seed)
    tokenizer = new_tokenizer()
    text_encoder = UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(tokenizer), d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
            relative_attention_num_buckets=8,
        )
    )
    transformer = WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=32, in_channels=16, out_channels=16, text_dim=64, freq_dim=64,
        ffn_dim=512, num_layers=4, rope_max_seq_len=128,
    )
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder.eval().requires_grad_(False),
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SETTINGS.timestep_shift),
        transformer=transformer,
    )


@torch.no_grad()
def encode_videos(vae: AutoencoderKLWan, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw n videos of training prompts: each one's index in `all_prompts` [n], and its latents [n, 16, 9, 4, 4]."""
    everything, (training, _) = all_prompts(), split_prompts()
    mean = torch.tensor(vae.config.latents_mean)[:, None, None, None]
    std = torch.tensor(vae.config.latents_std)[:, None, None, None]
    indices, latents = [], []
    for _ in range(n // BATCH):
        prompts, videos = draw(BATCH, generator, training)
        indices += [everything.index(prompt) for prompt in prompts]
        latents.append((vae.encode(to_model(videos)).latent_dist.mean - mean) / std)
    return torch.tensor(indices), torch.cat(latents)


def draw_captions(prompt: Tensor, generator: torch.Generator) -> Tensor:
    """Unreliable captions of videos of `prompt` [n]: indices in `all_prompts`, never that of a held-out prompt."""
    n = len(prompt)
    of_a_colour = len(SHAPES) * len(DIRECTIONS)
    colour = torch.randint(len(COLOURS), (n,), generator=generator)
    other = colour * of_a_colour + prompt % of_a_colour
    _, held_out = split_prompts()
    allowed = torch.tensor([prompt not in held_out for prompt in all_prompts()])
    return torch.where((torch.rand(n, generator=generator) < COLOUR_NOISE) & allowed[other], other, prompt)


def draw_sigmas(n: int, generator: torch.Generator) -> Tensor:
    """A noise level for each of the three chunks of n videos: [n, 9], alike within a chunk."""
    chunks = len(SETTINGS.chunks)
    sampler = torch.tensor(SETTINGS.sigmas[:-1])[torch.randint(4, (n, chunks), generator=generator)]
    time = torch.rand(n, chunks, generator=generator)
    anywhere = SETTINGS.timestep_shift * time / (1 + (SETTINGS.timestep_shift - 1) * time)
    sigma = torch.where(torch.rand(n, chunks, generator=generator) < SAMPLER_SHARE, sampler, anywhere)
    return sigma.repeat_interleave(SETTINGS.frames_per_chunk, dim=1)


def train_policy(
    pipeline: WanPipeline,
    steps: int = STEPS,
    videos: int = VIDEOS,
    seed: int = 0,
    checkpoint: Callable[[EMAModel], None] | None = None,
) -> None:
    """Flow matching with teacher forcing: each noisy chunk is denoised given the clean chunks before it.

    The transformer ends with its weights' moving average. `checkpoint`, if given, gets that average every 500 steps.
    """
    generator = torch.Generator().manual_seed(seed)
    text = TextEncoder(pipeline.tokenizer, pipeline.text_encoder, SETTINGS.text_length).encode(all_prompts())
    prompt, latents = encode_videos(pipeline.vae, videos, generator)
    log.info("encoded %d videos: latents' mean %.3f, deviation %.3f", videos, latents.mean(), latents.std())

    policy = Policy(pipeline.transformer, SETTINGS)
    weights = list(pipeline.transformer.parameters())
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    average = EMAModel(weights, decay=0.998)
    recent = 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
        chosen = torch.randint(len(latents), (BATCH,), generator=generator)
        clean = latents[chosen]
        sigma = draw_sigmas(BATCH, generator)
        level = sigma[:, None, :, None, None]
        noise = torch.randn(clean.shape, generator=generator)
        blur = CONTEXT_NOISE * torch.rand(BATCH, 1, 1, 1, 1, generator=generator)
        context = (1 - blur) * clean + blur * torch.randn(clean.shape, generator=generator)
        noisy = (1 - level) * clean + level * noise
        caption = draw_captions(prompt[chosen], generator)
        velocity = policy.teacher_forced_velocity(context, noisy, sigma, text[caption])
        loss = (velocity - (noise - clean)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        average.step(weights)

        recent += loss.item() / 500
        if step % 500 == 499:
            log.info("policy step %d: loss %.4f", step + 1, recent)
            recent = 0.0
            if checkpoint is not None:
                checkpoint(average)
    average.copy_to(weights)
