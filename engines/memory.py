"""How many bytes a policy rank needs, from configurations and shapes alone, before any weights are read.

Weights, text encoder, cache, gradients, LoRA and AdamW are exact; decoding is counted on the meta device. What a
forward keeps for its backward is listed operation by operation in `Shapes.of_block`. Left out is what the device itself
takes: context, kernels' work space, fragmentation. What a judge takes it `needs` by itself; `algorithms.memory` calls
both.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import nn
from transformers import AutoConfig, UMT5EncoderModel

from asyncflow.errors import ModelError
from engines.adapter import AdapterSettings
from engines.live_bytes import LiveBytes
from engines.policy import CausalSettings
from engines.policy.load import empty_transformer, keeps_float32
from engines.replay import Order
from engines.vae import StreamingDecoder, empty_vae

FLOAT32 = 4
UPDATE_VECTORS = {False: 4, True: 10}
"""How many times a LoRA an update takes for a while, in floats and exactly: sums, and what AdamW makes of them."""

LOWER = {
    "decoding": "lower --height, --width or --task-batch",
    "KV cache": "lower --latent-frames, --local-attn-size, --height, --width or --task-batch",
    "activations": "turn on --gradient-checkpointing, or lower --height, --width or --task-batch",
    "unit gradients": "lower --lora-rank or --task-batch",
    "gradient sums": "lower --lora-rank, or raise --mini-batches or the number of ranks",
    "LoRA and AdamW": "lower --lora-rank",
    "update": "lower --lora-rank",
    "trajectories": "lower --group-size or --prompts-per-step",
    "text encoder": "take a smaller one",
    "judge weights": "take a smaller judge, or serve it elsewhere and give its url",
    "judge activations": "lower the judge's frames or concurrency",
    "judge KV cache": "lower the judge's frames, turns, max-tokens or concurrency",
}
"""What to do for less of each term."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a policy rank does in a step, as far as memory depends on it.

    `batch` candidates make a task, which replays `steps` denoising steps of `units` each and keeps `sums` sums of their
    gradients at most. The rank holds the trajectories of `candidates` at once, and the sums of `pending`.
    """

    settings: CausalSettings
    adapter: AdapterSettings
    dtype: torch.dtype
    order: Order
    checkpointing: bool
    exact: bool
    batch: int
    steps: int
    units: int
    sums: int
    candidates: int
    pending: int


@dataclass(frozen=True)
class Estimate:
    """Bytes by what they are for, at the moment that needs the most."""

    terms: dict[str, int]

    @property
    def total(self) -> int:
        """The sum of the terms."""
        return sum(self.terms.values())

    @property
    def largest(self) -> list[str]:
        """The terms' names, the largest first."""
        return sorted((name for name, size in self.terms.items() if size), key=lambda name: -self.terms[name])

    def __str__(self) -> str:
        return f"{gib(self.total)}: " + ", ".join(f"{name} {gib(self.terms[name])}" for name in self.largest)

    @property
    def advice(self) -> str:
        """What to do for less of the two largest terms besides the weights."""
        names = [name for name in self.largest if name in LOWER]
        return "; ".join(f"for less {name}, {LOWER[name]}" for name in names[:2])


def gib(size: int) -> str:
    """A size for a person."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def estimate(folder: Path, work: Workload) -> Estimate:
    """What a policy rank with the model of `folder` needs for `work`. Raises `ModelError`."""
    model, vae = empty_transformer(folder), empty_vae(folder)
    lora = FLOAT32 * lora_size(model, work.adapter)
    shapes = Shapes.of(model, vae, work)
    held = {
        "weights": transformer_bytes(model, work.dtype) + sum(p.numel() for p in vae.parameters()) * FLOAT32,
        "LoRA and AdamW": 3 * lora,
        "gradient sums": work.pending * work.sums * lora,
        "trajectories": work.candidates * (len(work.settings.denoising_steps) + 1) * shapes.latents,
    }
    phases = [
        shapes.replay(work, lora),
        {"decoding": decoding_bytes(vae, work)},
        {"update": UPDATE_VECTORS[work.exact] * lora},
    ]
    needed = held | max(phases, key=lambda phase: sum(phase.values()))
    encoder = {"text encoder": encoder_bytes(folder, work.dtype)}  # before the policy is loaded
    return max(Estimate(needed), Estimate(encoder), key=lambda made: made.total)


def transformer_bytes(model: WanTransformer3DModel, dtype: torch.dtype) -> int:
    """Its parameters, in the dtypes that `load_policy` gives them."""
    return sum(
        parameter.numel() * (FLOAT32 if keeps_float32(name) else dtype.itemsize)
        for name, parameter in model.named_parameters()
    )


def lora_size(model: WanTransformer3DModel, settings: AdapterSettings) -> int:
    """How many weights a LoRA has: for each linear with it, rank times inputs and outputs."""
    linears = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return sum(
        settings.rank * (linear.in_features + linear.out_features)
        for name, linear in linears
        if _is_target(name, settings)
    )


def encoder_bytes(folder: Path, dtype: torch.dtype) -> int:
    """The text encoder's parameters. Raises `ModelError`."""
    try:
        config = AutoConfig.from_pretrained(folder / "text_encoder", local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / 'text_encoder'} describes no UMT5 encoder: {error}") from error
    with torch.device("meta"):
        encoder = UMT5EncoderModel(config)
    return sum(parameter.numel() for parameter in encoder.parameters()) * dtype.itemsize


def decoding_bytes(vae: AutoencoderKLWan, work: Workload) -> int:
    """The most that decoding a chunk takes, the decoder's features included, from a decode of meta tensors."""
    scale, settings = vae.config.scale_factor_spatial, work.settings
    shape = (work.batch, vae.config.z_dim, settings.frames_per_chunk, settings.height // scale, settings.width // scale)
    with LiveBytes() as live:
        StreamingDecoder(vae).decode(torch.empty(shape, device="meta"))
    return live.peak


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Of the forward that needs the most: the last chunk's, or that of all chunks.

    `tokens` are its own and `past` the cached ones that its attention reads, a copy for each segment and level; `text`
    are the prompts'. All count the whole batch. `latents` are the bytes of a clip in float32, `cache` those of the
    cache.
    """

    blocks: int
    width: int
    ffn: int
    tokens: int
    past: int
    text: int
    segments: int
    latents: int
    cache: int

    @classmethod
    def of(cls, model: WanTransformer3DModel, vae: AutoencoderKLWan, work: Workload) -> "Shapes":
        settings, config, scale = work.settings, model.config, vae.config.scale_factor_spatial
        height, width = settings.height // scale, settings.width // scale
        frame = height // config.patch_size[1] * (width // config.patch_size[2])
        seen = [len(settings.visible(chunk)) for chunk in settings.chunks]
        inner = config.num_attention_heads * config.attention_head_dim
        packed = work.order == "packed"
        rows = work.batch * (work.steps if work.order == "batched" else 1)
        held = settings.latent_frames - settings.frames_per_chunk if packed else max(seen)
        return cls(
            blocks=config.num_layers,
            width=inner,
            ffn=config.ffn_dim,
            tokens=rows * frame * (settings.latent_frames if packed else settings.frames_per_chunk),
            past=rows * frame * (sum(seen) if packed else max(seen)),
            text=rows * settings.text_length,
            segments=len(seen) if packed else 1,
            latents=config.in_channels * settings.latent_frames * height * width * FLOAT32,
            cache=2 * config.num_layers * work.batch * held * frame * inner * work.dtype.itemsize,
        )

    def replay(self, work: Workload, lora: int) -> dict[str, int]:
        """The terms of a replay, with a LoRA of that many bytes."""
        return {
            "KV cache": self.cache,
            "activations": self.kept(work) + self.working(work),
            "unit gradients": 0 if work.order == "packed" else work.batch * work.steps * work.units * lora,
        }

    def kept(self, work: Workload) -> int:
        """What the model's forward keeps for its backward; with checkpointing of its blocks only the inputs."""
        size = work.dtype.itemsize
        ends = FLOAT32 * self.tokens * self.width + size * self.text * self.width
        return ends + self.blocks * (size * self.tokens * self.width if work.checkpointing else self.of_block(work))

    def working(self, work: Workload) -> int:
        """What a backward needs besides: the gradients around its largest operation, and a block that it repeats."""
        largest = 2 * work.dtype.itemsize * max(self.tokens * self.ffn, (self.past + self.tokens) * self.width)
        return largest + (self.of_block(work) if work.checkpointing else 0)

    def of_block(self, work: Workload) -> int:
        """What a block's forward keeps: of each operation what its gradient needs."""
        adapter, size = work.adapter, work.dtype.itemsize
        tokens, text, width = self.tokens, self.text, self.width

        def trained(*names: str) -> bool:
            return any(_is_target(name, adapter) for name in names)

        # Of both attentions queries, keys, values and outputs.
        kept = 2 * tokens + 2 * (self.past + tokens) + 2 * tokens + 2 * text
        kept += 2 * (tokens - tokens // self.segments)  # the first chunk's keys and values are views of all chunks'
        kept += tokens * trained("attn1.to_q", "attn1.to_k", "attn1.to_v")  # inputs of linears with a LoRA
        kept += tokens * (self.segments > 1 and trained("attn1.to_out.0"))
        kept += tokens * trained("attn2.to_q")
        kept += tokens * trained("ffn.net.0.proj")
        # In float32, the inputs of norms: the block's three, those of both queries and of the keys.
        norms = 6 * tokens + text * trained("attn2.to_k")
        factors = [tokens for name in _OF_TOKENS if trained(name)] + [text for name in _OF_TEXT if trained(name)]
        hidden = tokens * self.ffn * (1 + trained("ffn.net.2"))
        return size * (kept * width + hidden + adapter.rank * sum(factors)) + FLOAT32 * norms * width


_OF_TOKENS = (
    *(f"attn1.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *("attn2.to_q", "attn2.to_out.0", "ffn.net.0.proj", "ffn.net.2"),
)
_OF_TEXT = ("attn2.to_k", "attn2.to_v")


def _is_target(name: str, settings: AdapterSettings) -> bool:
    """As PEFT matches names."""
    return any(name == target or name.endswith(f".{target}") for target in settings.targets)
