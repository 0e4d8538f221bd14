"""The toy that ships: a small stock diffusers folder whose base model paints well and follows prompts loosely."""

import pytest
import torch
from diffusers import AutoencoderKLWan

from engines.policy import load_policy, load_settings
from engines.rewards.pixels import colour_right, colour_score, motion_right, motion_score
from engines.text import TextEncoder, load_text_encoder
from engines.toy import MODEL
from engines.toy.assess import generate
from engines.toy.make_policy import COLOUR_NOISE, SETTINGS, draw_captions, draw_sigmas, encode_videos
from engines.toy.make_vae import psnr, reconstruct, to_model
from engines.toy.videos import all_prompts, render, split_prompts
from engines.vae import StreamingDecoder, load_vae, to_uint8


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLWan:
    return load_vae(MODEL)


@pytest.fixture(scope="module")
def texts() -> TextEncoder:
    return load_text_encoder(MODEL, SETTINGS.text_length)


def test_the_folder_is_small_and_says_how_it_is_sampled() -> None:
    """It fits into a repository, and its causal settings are those it was trained with."""
    assert sum(file.stat().st_size for file in MODEL.rglob("*")) < 8_000_000
    assert load_settings(MODEL) == SETTINGS
    assert load_policy(MODEL).model.dtype == torch.float32


def test_the_autoencoder_keeps_what_the_judge_looks_at(vae: AutoencoderKLWan) -> None:
    """Reconstructed videos are above 25 dB, and right in colour and motion, for a third of the grammar."""
    prompts = all_prompts()[::3]
    real = to_model(render(prompts, torch.Generator().manual_seed(0)))
    restored = reconstruct(vae, real)
    assert psnr(real, restored) > 25
    for video, prompt in zip(to_uint8(restored), prompts, strict=True):
        assert colour_right(video, prompt)
        assert motion_right(video, prompt)


def test_normalised_latents_have_about_unit_variance(vae: AutoencoderKLWan) -> None:
    """Each channel, so that the sampler's noise levels mean what they say."""
    _, latents = encode_videos(vae, 32, torch.Generator().manual_seed(0))
    assert latents.mean((0, 2, 3, 4)).abs().max() < 0.3
    assert latents.std((0, 2, 3, 4)).sub(1).abs().max() < 0.3


def test_the_base_model_follows_held_out_prompts_far_above_chance(vae: AutoencoderKLWan, texts: TextEncoder) -> None:
    """Mean scores of the held-out prompts by the few-step sampler; prompts of other colours and directions do worse."""
    _, prompts = split_prompts()
    latents = generate(load_policy(MODEL), texts.encode(prompts), (4, 4), torch.Generator().manual_seed(0))
    videos = StreamingDecoder(vae).decode(latents)
    assert videos.shape == (18, 33, 32, 32, 3)

    def mean(asked: list[str]) -> tuple[float, float]:
        colour = sum(colour_score(*pair) for pair in zip(videos, asked, strict=True))
        motion = sum(motion_score(*pair) for pair in zip(videos, asked, strict=True))
        return colour / len(asked), motion / len(asked)

    colour, motion = mean(prompts)
    other_colour, other_motion = mean(prompts[-4:] + prompts[:-4])
    assert colour > 0.45
    assert colour > other_colour + 0.2
    assert motion > 0.65
    assert motion > other_motion + 0.2


def test_captions_lie_about_the_colour_alone() -> None:
    """The stated share draws a new colour; shape and direction stay, and held-out prompts never become captions."""
    training, held_out = split_prompts()
    everything = all_prompts()
    prompt = torch.tensor([everything.index(name) for name in training]).repeat(200)
    caption = draw_captions(prompt, torch.Generator().manual_seed(0))
    assert torch.equal(prompt % 12, caption % 12)
    assert not {everything[index] for index in caption.unique().tolist()} & set(held_out)
    # Of the six colours one is the true one, and on average 54 / 72 of the others are allowed.
    assert (prompt != caption).float().mean() == pytest.approx(COLOUR_NOISE * 5 / 6 * 0.75, abs=0.02)


def test_noise_levels_are_mostly_the_samplers() -> None:
    """Alike within a chunk, in (0, 1], and three quarters of them exactly the sampler's own."""
    sigma = draw_sigmas(1000, torch.Generator().manual_seed(0))
    chunks = sigma.view(1000, 3, 3)
    assert (chunks == chunks[..., :1]).all()
    assert 0 <= sigma.min() <= sigma.max() <= 1
    own = torch.isin(sigma, torch.tensor(SETTINGS.sigmas[:-1]))
    assert own.float().mean() == pytest.approx(0.75, abs=0.03)
