"""The causal policy equals its references: Self-Forcing's own model, a full forward, and the stock model."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file

from asyncflow.errors import ModelError
from engines.policy import CausalSettings, KVCache, Policy, load_policy, load_settings
from engines.testing import CHANNELS, TEXT_DIM, latents, texts, tiny_policy, tiny_settings, tiny_transformer

GOLDEN = Path(__file__).parent / "golden"
WINDOWS = {
    "global": {"local_attn_size": -1, "sink_size": 0},
    "window": {"local_attn_size": 4, "sink_size": 0},
    "window_and_sink": {"local_attn_size": 5, "sink_size": 1},
}
GOLDEN_CASES = json.loads((GOLDEN / "self_forcing_tiny.json").read_text())["cases"]


@pytest.fixture(scope="module")
def golden_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with the configuration of the golden checkpoint and no weights."""
    folder = tmp_path_factory.mktemp("golden")
    config = json.loads((GOLDEN / "self_forcing_tiny.json").read_text())["config"]
    config.pop("text_len")
    WanTransformer3DModel(**config).save_config(folder / "transformer")
    return folder


@pytest.mark.parametrize("case", GOLDEN_CASES, ids=lambda case: f"w{case['local_attn_size']}s{case['sink']}")
def test_reproduces_self_forcing(golden_folder: Path, case: dict[str, int]) -> None:
    """Velocities equal those of Self-Forcing's CausalWanModel to 1e-4, from its own checkpoint layout."""
    window = CausalSettings(local_attn_size=case["local_attn_size"], sink_size=case["sink"])
    frozen = load_policy(golden_folder, checkpoint=GOLDEN / "self_forcing_tiny.pt")
    policy = Policy(frozen.model, window)
    recorded = load_file(GOLDEN / "self_forcing_tiny_io.safetensors")
    text = torch.nn.functional.pad(recorded["text"], (0, 0, 0, 512 - recorded["text"].shape[1]))
    cache = policy.new_cache(8, 8)
    for chunk in range(case["chunks"]):
        name = f"w{case['local_attn_size']}.s{case['sink']}.c{chunk}"
        for step, sigma in enumerate(window.sigmas[:-1]):
            with torch.no_grad():
                velocity = policy.velocity(recorded[f"{name}.k{step}.x"], sigma, text, cache, 3 * chunk)
            torch.testing.assert_close(velocity, recorded[f"{name}.k{step}.v"], atol=1e-4, rtol=0)
        policy.write_context(recorded[f"{name}.x0"], text, cache, 3 * chunk)


def test_sigmas_are_self_forcings() -> None:
    """The warped noise levels equal those recorded with the golden velocities."""
    golden = json.loads((GOLDEN / "self_forcing_tiny.json").read_text())
    assert CausalSettings().sigmas == pytest.approx(golden["sigmas"], abs=1e-7)


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


def test_saved_folder_loads_the_same(tmp_path: Path) -> None:
    """A policy read from a diffusers folder gives the velocities of the model that was saved, with its settings."""
    policy = tiny_policy()
    policy.model.save_pretrained(tmp_path / "transformer")
    (tmp_path / "causal.json").write_text('{"frames_per_chunk": 2, "latent_frames": 6, "sink_size": 1}')
    loaded = load_policy(tmp_path)
    assert loaded.settings == CausalSettings(frames_per_chunk=2, latent_frames=6, sink_size=1)
    x = latents(1, frames=2)
    assert torch.equal(
        policy.velocity(x, 0.5, texts(1), policy.new_cache(4, 4), 0),
        loaded.velocity(x, 0.5, texts(1), loaded.new_cache(4, 4), 0),
    )
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_half_precision_stays_close() -> None:
    """A bfloat16 policy takes and returns float32 and stays near the float32 one."""
    x, text = latents(1, frames=2), texts(1)
    full = tiny_policy()
    half = Policy(tiny_transformer().to(torch.bfloat16), tiny_settings())
    expected, velocity = (p.velocity(x, 0.5, text, p.new_cache(4, 4), 0) for p in (full, half))
    assert velocity.dtype == torch.float32
    assert (velocity - expected).abs().max() < 0.1 * expected.abs().max()


def test_missing_folder(tmp_path: Path) -> None:
    """A folder without a transformer says which file is missing."""
    with pytest.raises(ModelError, match=r"transformer/config\.json is missing"):
        load_policy(tmp_path)


def test_damaged_and_foreign_configuration(tmp_path: Path) -> None:
    """A config.json that is no JSON, or another model's, is refused."""
    path = tmp_path / "transformer" / "config.json"
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        load_policy(tmp_path)
    path.write_text('{"_class_name": "FluxTransformer2DModel"}')
    with pytest.raises(ModelError, match="FluxTransformer2DModel"):
        load_policy(tmp_path)


def test_missing_weights(golden_folder: Path) -> None:
    """A configuration without weights is refused."""
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_policy(golden_folder)


def test_checkpoint_of_another_kind(golden_folder: Path, tmp_path: Path) -> None:
    """A checkpoint without a generator, and one of another size, are refused."""
    path = tmp_path / "other.pt"
    torch.save({"critic": {}}, path)
    with pytest.raises(ModelError, match="holds none of generator_ema, generator"):
        load_policy(golden_folder, checkpoint=path)
    WanTransformer3DModel.from_config(tiny_transformer().config).save_config(tmp_path / "transformer")
    with pytest.raises(ModelError, match="does not fit"):
        load_policy(tmp_path, checkpoint=GOLDEN / "self_forcing_tiny.pt")
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(ModelError, match="cannot be read"):
        load_policy(golden_folder, checkpoint=path)


@pytest.mark.parametrize(
    "text",
    ['{"latent_frames": 20}', '{"frames": 3}', '{"local_attn_size": 2}', '{"denoising_steps": [250, 1000]}', "{"],
)
def test_wrong_settings(tmp_path: Path, text: str) -> None:
    """A causal.json that cannot be sampled is refused, and its path is named."""
    (tmp_path / "causal.json").write_text(text)
    with pytest.raises(ModelError, match=r"causal\.json does not describe"):
        load_settings(tmp_path)


def test_latent_shape() -> None:
    """Whole-clip latents are [B, C, F, H, W]; text width is the model's."""
    policy = tiny_policy()
    assert policy.latent_shape(3, 4, 4) == (3, CHANNELS, 6, 4, 4)
    assert policy.model.config.text_dim == TEXT_DIM
