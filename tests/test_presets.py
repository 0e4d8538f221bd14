"""Presets: published recipes before the defaults, behind the TOML file and the command line."""

from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import pytest
from msgspec import Meta

from algorithms.convert import ConvertConfig
from algorithms.dancegrpo import DanceGRPO, DanceGRPOConfig
from algorithms.generate import GenerateConfig
from algorithms.prepare import prepare
from algorithms.presets import PRESETS
from asyncflow.config import dump, resolve
from asyncflow.errors import ConfigError, ModelError
from engines.adapter import AdapterSettings
from engines.policy import CausalSettings


@pytest.fixture
def given(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A model and prompts; the working directory is the test's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("a red square moving left\n")
    return {"model": str(tiny_model), "prompts": "prompts.txt", "device": "cpu", "eval_every": "0"}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration with presets, one of which has a key for others."""

    PRESETS: ClassVar[dict[str, dict[str, Any]]] = {"fast": {"steps": 5, "lr": 0.5, "other": 1}}

    preset: Annotated[str, Meta(description="A recipe.")] = ""
    steps: Annotated[int, Meta(description="Steps.")] = 100
    lr: Annotated[float, Meta(description="Learning rate.")] = 0.1
    seed: Annotated[int, Meta(description="Seed.")] = 0


@pytest.mark.parametrize("source", ["command line", "file"])
def test_what_goes_before_what(tmp_path: Path, source: str) -> None:
    """Command line, TOML file, preset, default; and a preset may stand in the file."""
    file = tmp_path / "run.toml"
    file.write_text("lr = 0.7\n" + ('preset = "fast"\n' if source == "file" else ""))
    line = {"preset": "fast"} if source == "command line" else {}
    assert resolve(Settings, line, str(file)) == Settings(preset="fast", steps=5, lr=0.7)
    assert resolve(Settings, line | {"steps": "7"}, str(file)) == Settings(preset="fast", steps=7, lr=0.7)
    assert resolve(Settings, {}) == Settings()


@pytest.mark.parametrize("name", PRESETS)
def test_every_value_is_one_that_could_be_given(given: dict[str, Any], name: str) -> None:
    """The preset is the same as its keys one by one, and the resolved configuration reads back equal."""
    config = resolve(DanceGRPOConfig, given | {"preset": name})
    assert resolve(DanceGRPOConfig, given | PRESETS[name] | {"preset": name}) == config
    assert {key: getattr(config, key) for key in PRESETS[name]} == PRESETS[name]
    Path("run.toml").write_text(dump(config))
    assert resolve(DanceGRPOConfig, {}, "run.toml") == config


def test_self_forcing_is_what_models_without_settings_are(given: dict[str, Any]) -> None:
    """Its preset samples as a folder without causal.json does, whatever the folder says."""
    settings = resolve(DanceGRPOConfig, given | {"preset": "self-forcing-480p"}).settings()
    assert settings == CausalSettings(fps=16, text_length=8)


def test_longlive_is_sampled_with_window_and_sink(given: dict[str, Any]) -> None:
    """In every command that takes a model."""
    for kind in (DanceGRPOConfig, GenerateConfig, ConvertConfig):
        values = {name: value for name, value in given.items() if name in kind.__struct_fields__}
        settings = resolve(kind, values | {"preset": "longlive-480p"}).settings()
        assert (settings.local_attn_size, settings.sink_size, settings.latent_frames) == (12, 3, 33)
        assert settings.visible(range(30, 33)) == (0, 1, 2, *range(24, 30))


def test_a_rank_gets_what_is_resolved(given: dict[str, Any]) -> None:
    """Sampler, LoRA, files and checkpointing; what is not given is as the folder has it."""
    changes = {"latent_frames": "4", "height": "48", "denoising_steps": ["900", "500"], "gradient_checkpointing": True}
    config = resolve(DanceGRPOConfig, given | changes | {"lora_targets": ["to_q"], "lora_rank": "2"})
    prepared = prepare("dancegrpo", config, DanceGRPO, 1)
    job = prepared.policy_job(0)
    assert job.settings == CausalSettings(
        frames_per_chunk=2,
        denoising_steps=(900.0, 500.0),
        latent_frames=4,
        height=48,
        width=32,
        text_length=8,
    )
    assert prepared.run.stochastic_steps == 1
    assert job.adapter == AdapterSettings(rank=2, alpha=32.0, targets=("to_q",))
    assert (job.gradient_checkpointing, job.checkpoint, job.base_lora) == (True, None, None)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"preset": "wan"}, "--preset: expected one of longlive-480p, self-forcing-480p, got wan"),
        ({"preset": "longlive-480p", "model": ""}, "--preset: give --model as well"),
        ({"latent_frames": "5"}, "--latent-frames: latent_frames must be a positive multiple of frames_per_chunk"),
        ({"height": "40"}, "--height: expected a multiple of 16 for"),
        ({"lora_targets": []}, "--lora-targets: expected a list that is not empty, each entry a text, got \\[\\]"),
        ({"checkpoint": "none.pt"}, "none.pt cannot be read as a PyTorch checkpoint"),
        ({"base_lora": "prompts.txt"}, "prompts.txt cannot be read as a PyTorch checkpoint"),
        ({"latent_frames": "1026"}, "latent_frames is 1026; the model has 1024 positions"),
    ],
)
def test_what_cannot_be(given: dict[str, Any], changes: dict[str, Any], sentence: str) -> None:
    """Found before anything starts."""
    with pytest.raises((ConfigError, ModelError), match=sentence):
        prepare("dancegrpo", resolve(DanceGRPOConfig, given | changes), DanceGRPO, 1)
