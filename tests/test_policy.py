"""The causal policy equals its references: a full forward, and the stock model. (Self-Forcing's own: test_load.)"""

import pytest
import torch

from engines.policy import KVCache, Policy
from engines.testing import CHANNELS, TEXT_DIM, latents, texts, tiny_policy, tiny_settings, tiny_transformer

WINDOWS = {
    "global": {"local_attn_size": -1, "sink_size": 0},
    "window": {"local_attn_size": 4, "sink_size": 0},
    "window_and_sink": {"local_attn_size": 5, "sink_size": 1},
}


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_cached_chunks_equal_teacher_forcing(window: dict[str, int]) -> None:
    """Chunk by chunk with a cache gives what one forward over all chunks gives, chunk levels differing."""
    policy = tiny_policy(**window)
    clean, noisy, text = latents(2), latents(2, seed=5), texts(2)
    levels = (0.9, 0.5, 0.2)
    sigma = torch.tensor(levels).repeat_interleave(2).expand(2, 6)
    with torch.no_grad():
        expected = policy.teacher_forced_velocity(clean, noisy, sigma, text)
        cache = policy.new_cache(4, 4)
        for chunk, level in zip(policy.settings.chunks, levels, strict=True):
            velocity = policy.velocity(noisy[:, :, chunk], level, text, cache, chunk.start)
            torch.testing.assert_close(velocity, expected[:, :, chunk], atol=1e-5, rtol=1e-5)
            policy.write_context(clean[:, :, chunk], text, cache, chunk.start)


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_cache_drops_what_no_chunk_sees_again(window: dict[str, int]) -> None:
    """After each chunk the cache holds what the next one sees."""
    policy = tiny_policy(**window)
    cache = policy.new_cache(4, 4)
    for chunk in policy.settings.chunks:
        policy.write_context(latents(1, frames=2), texts(1), cache, chunk.start)
        assert cache.frames == policy.settings.visible(range(chunk.stop, chunk.stop + 2))


def test_plain_model_without_context() -> None:
    """Outside a policy's calls the changed model computes what the stock model does, bit for bit."""
    stock, changed = tiny_transformer(), tiny_policy().model
    inputs = (latents(2), torch.tensor([700.0, 20.0]), texts(2))
    assert torch.equal(stock(*inputs).sample, changed(*inputs).sample)


def test_frame_choice() -> None:
    """A chunk may be shown chosen cached frames: choosing none is another velocity, the window's own is the default."""
    policy = tiny_policy()
    cache = policy.new_cache(4, 4)
    clean, text = latents(1), texts(1)
    for first in (0, 2):
        policy.write_context(clean[:, :, first : first + 2], text, cache, first)
    with torch.no_grad():
        everything, alone, some = (
            policy.velocity(clean[:, :, 4:], 0.5, text, cache, 4, visible=frames) for frames in (None, (), (0, 2, 3))
        )
        chosen = policy.velocity(clean[:, :, 4:], 0.5, text, cache, 4, visible=(0, 1, 2, 3))
        window = Policy(policy.model, tiny_settings(local_attn_size=5, sink_size=1))
        windowed = window.velocity(clean[:, :, 4:], 0.5, text, cache, 4)
    assert torch.equal(everything, chosen)
    assert torch.equal(some, windowed)
    assert (alone - everything).abs().max() > 1e-3
    assert cache.frames == (0, 1, 2, 3)


def test_kept_history_outlives_the_window() -> None:
    """`recent` keeps frames beyond the window, for callers that choose frames."""
    policy = tiny_policy(local_attn_size=2)
    cache = policy.new_cache(4, 4, recent=3)
    for first in (0, 2, 4):
        policy.write_context(latents(1, frames=2), texts(1), cache, first)
    assert cache.frames == (3, 4, 5)


def test_no_gradient_crosses_chunks() -> None:
    """A chunk's velocity has no path to an earlier chunk's latents, and reading the cache keeps no graph."""
    policy = tiny_policy()
    policy.model.requires_grad_(True)
    cache = policy.new_cache(4, 4)
    first = latents(1, frames=2).requires_grad_()
    policy.velocity(first, 0.5, texts(1), cache, 0)
    policy.write_context(first, texts(1), cache, 0)
    held = cache.past((0, 1))
    assert not held[0].keys[0].requires_grad
    second = latents(1, frames=2, seed=3).requires_grad_()
    velocity = policy.velocity(second, 0.5, texts(1), cache, 2)
    of_first, of_second = torch.autograd.grad(velocity.sum(), (first, second), allow_unused=True)
    assert of_first is None
    assert of_second is not None


def test_cache_is_detached() -> None:
    """What is written to a cache has no graph, even where gradients are on."""
    cache = KVCache(layers=1, tokens_per_frame=2)
    states = torch.ones(1, 2, 1, 4, requires_grad=True) * 2
    cache.write(0, range(0, 1), states, states)
    (held,) = cache.past((0,))
    assert not held.keys[0].requires_grad
    assert not held.values[0].requires_grad


def test_gradient_checkpointing_reads_the_same_cache() -> None:
    """Checkpointed gradients are the plain ones bit for bit, though the cache grew before the backward."""
    gradients = []
    for checkpointing in (False, True):
        policy = tiny_policy(local_attn_size=4)
        policy.model.requires_grad_(True)
        if checkpointing:
            policy.model.enable_gradient_checkpointing()
        cache = policy.new_cache(4, 4)
        text = texts(1)
        policy.write_context(latents(1, frames=2), text, cache, 0)
        velocity = policy.velocity(latents(1, frames=2, seed=2), 0.5, text, cache, 2)
        policy.write_context(latents(1, frames=2, seed=2), text, cache, 2)
        velocity.square().sum().backward()
        gradients.append([p.grad for p in policy.model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 40
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_half_precision_stays_close() -> None:
    """A bfloat16 policy takes and returns float32 and stays near the float32 one."""
    x, text = latents(1, frames=2), texts(1)
    full = tiny_policy()
    half = Policy(tiny_transformer().to(torch.bfloat16), tiny_settings())
    expected, velocity = (p.velocity(x, 0.5, text, p.new_cache(4, 4), 0) for p in (full, half))
    assert velocity.dtype == torch.float32
    assert (velocity - expected).abs().max() < 0.1 * expected.abs().max()


def test_latent_shape() -> None:
    """Whole-clip latents are [B, C, F, H, W]; text width is the model's."""
    policy = tiny_policy()
    assert policy.latent_shape(3, 4, 4) == (3, CHANNELS, 6, 4, 4)
    assert policy.model.config.text_dim == TEXT_DIM
