"""Tiny random models and inputs for tests, in memory or as a model folder."""

import re
from pathlib import Path

import msgspec
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from transformers import UMT5Config, UMT5EncoderModel

from engines.policy import CausalSettings, Policy
from engines.policy.settings import FILE_NAME
from engines.toy.make_policy import new_tokenizer

CHANNELS = 4
TEXT_DIM = 12
ORIGINAL_LINEAR = re.compile(r"blocks\.\d+\.((self|cross)_attn\.[qkvo]|ffn\.[02])\.weight")


def tiny_settings(**changes: object) -> CausalSettings:
    """Three chunks of two frames, three denoising steps."""
    values: dict[str, object] = {
        "frames_per_chunk": 2,
        "denoising_steps": (1000.0, 700.0, 300.0),
        "latent_frames": 6,
        "height": 32,
        "width": 32,
        "text_length": 5,
    }
    return CausalSettings(**(values | changes))  # type: ignore[arg-type]


def tiny_transformer(seed: int = 0) -> WanTransformer3DModel:
    """Two layers of 2 x 16 heads with random weights of a size that makes every path matter."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            text_dim=TEXT_DIM,
            freq_dim=16,
            ffn_dim=48,
            num_layers=2,
        )
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    return model.eval().requires_grad_(False)


def tiny_policy(seed: int = 0, **changes: object) -> Policy:
    return Policy(tiny_transformer(seed), tiny_settings(**changes))


def latents(batch: int, frames: int = 6, seed: int = 0) -> torch.Tensor:
    """Random latents [batch, CHANNELS, frames, 4, 4]."""
    return torch.randn(batch, CHANNELS, frames, 4, 4, generator=torch.Generator().manual_seed(seed))


def texts(batch: int, seed: int = 1) -> torch.Tensor:
    """Random text embeddings [batch, 5, TEXT_DIM]."""
    return torch.randn(batch, 5, TEXT_DIM, generator=torch.Generator().manual_seed(seed))


def tiny_vae(*, residual: bool, seed: int = 0) -> AutoencoderKLWan:
    """A random VAE of CHANNELS latent channels: Wan2.1's plan, or with `residual` Wan2.2's (8x spatial both)."""
    plan = {"patch_size": 2, "in_channels": 12, "out_channels": 12, "is_residual": True} if residual else {}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        vae = AutoencoderKLWan(
            base_dim=8,
            z_dim=CHANNELS,
            dim_mult=[1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[True, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.5, 0.5, 1.0, 2.0],
            **plan,
        )
    return vae.eval().requires_grad_(False)


def save_tiny_model(folder: Path) -> None:
    """Write a diffusers folder of the tiny policy and VAE, with the toy's tokenizer and a tiny text encoder."""
    tokenizer = new_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = UMT5EncoderModel(
            UMT5Config(vocab_size=len(tokenizer), d_model=TEXT_DIM, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
        )
    WanPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder.eval(),
        vae=tiny_vae(residual=True),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=tiny_transformer(),
    ).save_pretrained(folder)
    (folder / FILE_NAME).write_bytes(msgspec.json.encode(tiny_settings(text_length=8)))


def original_names(blocks: int) -> list[str]:
    """The tensors of a Wan model in the original code's names."""
    attention = [f"{part}.{kind}" for part in "qkvo" for kind in ("weight", "bias")]
    attention += ["norm_q.weight", "norm_k.weight"]
    block = ["modulation", *(f"{part}.{kind}" for part in ("norm3", "ffn.0", "ffn.2") for kind in ("weight", "bias"))]
    block += [f"{which}_attn.{name}" for which in ("self", "cross") for name in attention]
    ends = ["patch_embedding", "text_embedding.0", "text_embedding.2", "time_embedding.0", "time_embedding.2"]
    ends += ["time_projection.1", "head.head"]
    names = [f"{end}.{kind}" for end in ends for kind in ("weight", "bias")] + ["head.modulation"]
    return names + [f"blocks.{number}.{name}" for number in range(blocks) for name in block]


def original_weights(model: WanTransformer3DModel) -> dict[str, torch.Tensor]:
    """The model's weights as Self-Forcing's generator has them, `model.` before each name."""
    names = convert_wan_transformer_to_diffusers({name: name for name in original_names(len(model.blocks))})
    return {f"model.{original}": model.state_dict()[name] for name, original in names.items()}


def save_as_longlive(weights: dict[str, torch.Tensor], folder: Path) -> tuple[Path, Path]:
    """Write a Self-Forcing generator (`model.` prefix) in LongLive's layout: a base, and a LoRA whose sum it is."""
    generator = torch.Generator().manual_seed(0)
    base, lora = {}, {}
    for prefixed, weight in weights.items():
        name = f"_fsdp_wrapped_module.{prefixed.removeprefix('model.')}"
        base[f"model.{name}"] = weight
        if ORIGINAL_LINEAR.search(name):
            up = 0.3 * torch.randn(len(weight), 2, generator=generator)
            down = 0.3 * torch.randn(2, weight.shape[1], generator=generator)
            base[f"model.{name}"] = weight - up @ down
            factors = {"lora_A": down, "lora_B": up}
            lora |= {
                f"base_model.model.{name.removesuffix('weight')}{factor}.weight": tensor
                for factor, tensor in factors.items()
            }
    torch.save({"generator": base}, folder / "longlive_base.pt")
    torch.save({"generator_lora": lora}, folder / "lora.pt")
    return folder / "longlive_base.pt", folder / "lora.pt"
