"""Streamed decoding gives the bits of decoding at once."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.video_processor import VideoProcessor

from asyncflow.errors import ModelError
from engines.testing import latents, tiny_vae
from engines.vae import StreamingDecoder, denormalise, load_vae, to_uint8


@pytest.fixture(params=[False, True], ids=["wan2.1", "wan2.2"])
def vae(request: pytest.FixtureRequest) -> AutoencoderKLWan:
    return tiny_vae(residual=request.param)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 5), (3, 1, 2), (6,)])
def test_streamed_equals_whole(vae: AutoencoderKLWan, sizes: tuple[int, ...]) -> None:
    """However a clip is cut into chunks, its frames are those of `vae.decode`, bit for bit."""
    clip = latents(2)
    expected = to_uint8(vae.decode(denormalise(vae, clip)).sample)
    decoder = StreamingDecoder(vae)
    parts = [decoder.decode(part) for part in clip.split(sizes, dim=2)]
    assert [part.shape[1] for part in parts] == [
        4 * size - (3 if place == 0 else 0) for place, size in enumerate(sizes)
    ]
    assert torch.equal(torch.cat(parts, dim=1), expected)
    assert expected.shape[-1] == 3
    assert expected.dtype == torch.uint8


def test_two_videos_in_turns(vae: AutoencoderKLWan) -> None:
    """Two decoders on one VAE do not disturb each other, nor does a whole decode between their chunks."""
    clips = (latents(1, seed=1), latents(1, seed=2))
    expected = [StreamingDecoder(vae).decode(clip) for clip in clips]
    decoders = [StreamingDecoder(vae) for _ in clips]
    parts: list[list[torch.Tensor]] = [[], []]
    for first in (0, 2, 4):
        for place, decoder in enumerate(decoders):
            parts[place].append(decoder.decode(clips[place][:, :, first : first + 2]))
        vae.decode(clips[0])
    for found, whole in zip(parts, expected, strict=True):
        assert torch.equal(torch.cat(found, dim=1), whole)


def test_denormalises_and_rounds_as_the_pipeline(vae: AutoencoderKLWan) -> None:
    """Latents are scaled by the configured mean and std, and frames rounded as diffusers' video processor does."""
    clip = latents(1, frames=1)
    raw = clip * torch.tensor([1.5, 0.5, 1.0, 2.0]).view(1, 4, 1, 1, 1)
    raw = raw + torch.tensor([0.1, -0.2, 0.3, 0.0]).view(1, 4, 1, 1, 1)
    video = VideoProcessor(vae_scale_factor=8).postprocess_video(vae.decode(raw).sample, output_type="np")
    expected = (video * 255).round().astype("uint8")
    assert np.array_equal(StreamingDecoder(vae).decode(clip).numpy(), expected)


def test_loads_from_a_folder(vae: AutoencoderKLWan, tmp_path: Path) -> None:
    """A saved VAE decodes to the same frames."""
    vae.save_pretrained(tmp_path / "vae")
    loaded = load_vae(tmp_path)
    assert torch.equal(StreamingDecoder(loaded).decode(latents(1)), StreamingDecoder(vae).decode(latents(1)))


def test_missing_vae(tmp_path: Path) -> None:
    """A folder without a VAE is refused."""
    with pytest.raises(ModelError, match="no readable AutoencoderKLWan"):
        load_vae(tmp_path)
