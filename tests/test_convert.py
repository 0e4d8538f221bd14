"""`asyncflow convert`: one diffusers folder from a model of any form, and nothing from one that is wrong."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file

from algorithms.cli import asyncflow
from algorithms.prepare import check_model
from asyncflow.options import run
from engines.adapter import PREFIX, WEIGHTS_FILE, Adapter, AdapterSettings
from engines.policy import CausalSettings, Policy, load_policy
from engines.testing import original_weights, save_as_longlive, tiny_transformer

GOLDEN = Path(__file__).parent / "golden"
CHECKPOINT = GOLDEN / "self_forcing_tiny.pt"
Convert = Callable[..., int]


@pytest.fixture
def convert(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Convert:
    """Convert from `wan`, a folder like Wan's own download (here without weights), to `out`, with options as given."""
    shutil.copytree(tiny_model, tmp_path / "wan")
    shutil.rmtree(tmp_path / "wan" / "transformer")
    (tmp_path / "wan" / "causal.json").unlink()
    config = json.loads((GOLDEN / "self_forcing_tiny.json").read_text())["config"]
    config.pop("text_len")
    WanTransformer3DModel(**config).save_config(tmp_path / "wan" / "transformer")
    monkeypatch.chdir(tmp_path)
    return lambda *options: run(asyncflow, ["convert", "--model", "wan", "--out", "out", *map(str, options)])


def velocity(policy: Policy) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x, text = torch.randn(1, 16, 3, 8, 8, generator=generator), torch.randn(1, 4, 32, generator=generator)
    with torch.no_grad():
        return policy.velocity(x, 0.5, text, policy.new_cache(8, 8), 0)


def test_a_checkpoint_becomes_a_folder(convert: Convert, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Which needs no other option, and holds the Wan folder's other parts as they were."""
    assert convert("--checkpoint", CHECKPOINT, "--latent-frames", 6, "--preset", "self-forcing-480p") == 0
    assert capsys.readouterr().out == "out: 149,248 parameters; train it with --model out\n"
    out = tmp_path / "out"
    check_model(out)
    made = load_policy(out)
    assert made.settings == CausalSettings(latent_frames=6)
    assert torch.equal(velocity(made), velocity(load_policy(tmp_path / "wan", checkpoint=CHECKPOINT)))
    for file in (tmp_path / "wan").rglob("*"):
        if file.is_file() and file.parent.name != "transformer":
            assert (out / file.relative_to(tmp_path / "wan")).read_bytes() == file.read_bytes()
    assert (out / "model_index.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "wan"]


def test_longlive_becomes_a_folder(convert: Convert, tmp_path: Path):
    """Its LoRA is part of the weights, its window part of the settings."""
    weights = torch.load(CHECKPOINT, weights_only=True)["generator_ema"]
    base, lora = save_as_longlive(weights, tmp_path)
    assert convert("--checkpoint", base, "--base-lora", lora, "--preset", "longlive-480p") == 0
    made = load_policy(tmp_path / "out")
    assert made.settings == CausalSettings(local_attn_size=12, sink_size=3, latent_frames=33)
    torch.testing.assert_close(velocity(made), velocity(load_policy(tmp_path / "wan", checkpoint=CHECKPOINT)))


def test_an_adapter_on_a_converted_checkpoint_loads_into_stock_diffusers(convert: Convert, tmp_path: Path):
    """Where it changes the model as it does here."""
    assert convert("--checkpoint", CHECKPOINT) == 0
    policy = load_policy(tmp_path / "out")
    adapter = Adapter(policy.model, AdapterSettings(rank=2, alpha=4.0), seed=0)
    adapter.assign(0.1 * torch.randn(adapter.size, generator=torch.Generator().manual_seed(1)))
    adapter.save(tmp_path / "adapter")
    stock = WanTransformer3DModel.from_pretrained("out", subfolder="transformer", local_files_only=True)
    inputs = torch.randn(1, 16, 3, 8, 8), torch.tensor([500.0]), torch.randn(1, 4, 32)
    with torch.no_grad():
        plain = stock(*inputs).sample
        stock.load_lora_adapter("adapter", prefix=PREFIX.removesuffix("."), weight_name=WEIGHTS_FILE)
        torch.testing.assert_close(stock(*inputs).sample, policy.model(*inputs).sample)
        assert (stock(*inputs).sample - plain).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--checkpoint", "none.pt"), "none.pt cannot be read as a PyTorch checkpoint"),
        (("--base-lora", CHECKPOINT), "holds no generator_lora"),
        (("--sink-size", "9", "--local-attn-size", "10"), "--local-attn-size, --sink-size: local_attn_size must"),
        (("--checkpoint", CHECKPOINT, "--out", "wan"), "--out: wan is there already; choose another folder"),
        (("--checkpoint", CHECKPOINT, "--out", "wan/model_index.json/x"), "--out: cannot write wan/model_index.json/x"),
        (("--out", ""), "--out: give a folder"),
        (("--model", ""), "--model: give a folder"),
        (("--model", "", "--checkpoint", CHECKPOINT), "--checkpoint: give --model as well"),
        (("--model", "none"), "--model: there is no folder none"),
        ((), "The weights in wan/transformer cannot be loaded"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_writes_nothing(
    convert: Convert, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], sentence: str
):
    before = sorted(tmp_path.rglob("*"))
    assert convert(*options) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ") and error.count("\n") == 1
    assert sentence in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_that_fills_up_leaves_nothing(
    convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The folder appears whole or not at all."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    before = sorted(tmp_path.rglob("*"))
    assert convert("--checkpoint", CHECKPOINT) == 2
    assert "--out: cannot write out: No space left on device; make room" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_from_checkpoints_and_one_from_what_they_convert_to_train_the_same(
    convert: Convert, tiny_model: Path, tmp_path: Path, recipe: list[str], run_ranks: Callable[..., Any]
):
    """To the bit, with LongLive's LoRA below the one that is trained; a sampler's options come to the ranks as well."""
    shutil.copytree(tiny_model, tmp_path / "tiny")
    (tmp_path / "tiny" / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    base, lora = save_as_longlive(original_weights(tiny_transformer(seed=5)), tmp_path)
    files = ["--checkpoint", str(base), "--base-lora", str(lora), "--latent-frames", "4"]
    assert convert("--model", "tiny", *files) == 0
    training = [option for option in recipe if not option.startswith("--model=")] + ["--steps=1", "--mini-batches=1"]
    for out, model in (("first", ["--model", "tiny", *files]), ("second", ["--model", "out"])):
        codes, output = run_ranks(1, [*training, *model, f"--out={out}"], tmp_path / f"{out}.log")
        assert codes == [0], output
        assert output.count("a policy rank needs about ") == 1
    first, second = (load_file(tmp_path / out / "adapter" / WEIGHTS_FILE) for out in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(tensor.any() for name, tensor in first.items() if "lora_B" in name)
