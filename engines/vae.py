"""Decodes latents to frames as the chunks arrive, with the bits of decoding the whole clip at once.

`AutoencoderKLWan.decode` keeps the decoder's features between latent frames on the model itself and drops them at the
end. Here each batch of videos owns them, so that several can be decoded in turns with one model.
"""

from pathlib import Path

import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from torch import Tensor

from asyncflow.errors import ModelError

SUBFOLDER = "vae"


def load_vae(
    folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> AutoencoderKLWan:
    """Load the frozen `vae/` of a diffusers folder. Raises `ModelError`."""
    try:
        vae = AutoencoderKLWan.from_pretrained(folder, subfolder=SUBFOLDER, torch_dtype=dtype, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{folder / SUBFOLDER} holds no readable AutoencoderKLWan: {error}") from error
    for parameter in vae.parameters():
        # A memory-mapped tensor keeps the file's alignment, on which the last bits of CPU kernels depend.
        parameter.data = parameter.data.clone()
        if parameter.ndim == 5:  # convolutions over channels-last frames are a quarter faster on CPUs
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last_3d)
    return vae.requires_grad_(False).to(device).eval()


def empty_vae(folder: Path) -> AutoencoderKLWan:
    """The VAE that `vae/config.json` describes, its parameters on the meta device. Raises `ModelError`."""
    try:
        config = AutoencoderKLWan.load_config(folder, subfolder=SUBFOLDER, local_files_only=True)
        with init_empty_weights():
            vae: AutoencoderKLWan = AutoencoderKLWan.from_config(config)
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{folder / SUBFOLDER} describes no AutoencoderKLWan: {error}") from error
    return vae


def denormalise(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """From the policy's latents [B, C, F, H, W] to the VAE's: times its std, plus its mean, channel by channel."""
    mean, std = (
        torch.tensor(values, dtype=latents.dtype, device=latents.device).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return latents * std + mean


def to_uint8(video: Tensor) -> Tensor:
    """From [-1, 1], [B, 3, T, H, W], to uint8 frames [B, T, H, W, 3]."""
    scaled = (video.float() * 0.5 + 0.5).clamp(0.0, 1.0) * 255.0
    return scaled.round().to(torch.uint8).permute(0, 2, 3, 4, 1).contiguous()


class StreamingDecoder:
    """Decodes one batch of videos, chunk after chunk."""

    def __init__(self, vae: AutoencoderKLWan) -> None:
        self._vae = vae
        self._features: list[Tensor | str | None] = [None] * vae._cached_conv_counts["decoder"]
        self._started = False

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Frames of the next latents [B, C, f, h, w], as uint8 [B, T, H, W, 3].

        The very first latent frame of a clip gives one frame, every other one as many as the VAE compresses (4).
        """
        vae = self._vae
        chunk = vae.post_quant_conv(denormalise(vae, latents.to(vae.device, vae.dtype)))
        parts = []
        for frame in chunk.split(1, dim=2):
            parts.append(vae.decoder(frame, feat_cache=self._features, feat_idx=[0], first_chunk=not self._started))
            self._started = True
        video = torch.cat(parts, dim=2)
        if vae.config.patch_size is not None:
            video = unpatchify(video, patch_size=vae.config.patch_size)
        return to_uint8(video.clamp(-1.0, 1.0))
