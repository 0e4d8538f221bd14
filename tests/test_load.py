"""What policies are loaded from: folders, and checkpoints in the layouts of Self-Forcing and LongLive."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file
from torch import Tensor

from asyncflow.errors import ModelError
from engines.policy import CausalSettings, Policy, load_policy, load_settings
from engines.policy.load import keeps_float32
from engines.testing import latents, save_as_longlive, texts, tiny_policy, tiny_transformer

GOLDEN = Path(__file__).parent / "golden"
CHECKPOINT = GOLDEN / "self_forcing_tiny.pt"
DESCRIPTION = json.loads((GOLDEN / "self_forcing_tiny.json").read_text())
CASES = DESCRIPTION["cases"]
LONGLIVE = CASES[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with the configuration of the golden checkpoint and no weights."""
    folder = tmp_path_factory.mktemp("golden")
    config = {name: value for name, value in DESCRIPTION["config"].items() if name != "text_len"}
    WanTransformer3DModel(**config).save_config(folder / "transformer")
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Write what it is given as checkpoint.pt."""

    def saved(**parts: object) -> Path:
        torch.save(parts, tmp_path / "checkpoint.pt")
        return tmp_path / "checkpoint.pt"

    return saved


def golden_weights() -> dict[str, Tensor]:
    return torch.load(CHECKPOINT, weights_only=True)["generator_ema"]


def window(case: dict[str, int]) -> CausalSettings:
    return CausalSettings(local_attn_size=case["local_attn_size"], sink_size=case["sink"])


def check_golden(policy: Policy, case: dict[str, int]) -> None:
    """Velocities equal those of Self-Forcing's CausalWanModel to 1e-4, chunk by chunk and step by step."""
    recorded = load_file(GOLDEN / "self_forcing_tiny_io.safetensors")
    text = torch.nn.functional.pad(recorded["text"], (0, 0, 0, 512 - recorded["text"].shape[1]))
    cache = policy.new_cache(8, 8)
    for chunk in range(case["chunks"]):
        name = f"w{case['local_attn_size']}.s{case['sink']}.c{chunk}"
        for step, sigma in enumerate(policy.settings.sigmas[:-1]):
            with torch.no_grad():
                velocity = policy.velocity(recorded[f"{name}.k{step}.x"], sigma, text, cache, 3 * chunk)
            torch.testing.assert_close(velocity, recorded[f"{name}.k{step}.v"], atol=1e-4, rtol=0)
        policy.write_context(recorded[f"{name}.x0"], text, cache, 3 * chunk)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"w{case['local_attn_size']}s{case['sink']}")
def test_reproduces_self_forcing(folder: Path, case: dict[str, int]) -> None:
    """From its own checkpoint layout, for each window."""
    check_golden(load_policy(folder, checkpoint=CHECKPOINT, settings=window(case)), case)


def test_sigmas_are_self_forcings() -> None:
    """The warped noise levels equal those recorded with the golden velocities."""
    assert CausalSettings().sigmas == pytest.approx(DESCRIPTION["sigmas"], abs=1e-7)


def test_reproduces_longlive(folder: Path, tmp_path: Path) -> None:
    """A base with its LoRA fused gives the velocities of the original model with the sum, window 12 and sink 3."""
    base, lora = save_as_longlive(golden_weights(), tmp_path)
    check_golden(load_policy(folder, checkpoint=base, base_lora=lora, settings=window(LONGLIVE)), LONGLIVE)
    with pytest.raises(AssertionError):
        check_golden(load_policy(folder, checkpoint=base, settings=window(LONGLIVE)), LONGLIVE)


def test_a_lora_is_fused_into_a_folders_weights_too(folder: Path, tmp_path: Path) -> None:
    """Rounded once: to bfloat16, where the checkpoint would be as well."""
    base, lora = save_as_longlive(golden_weights(), tmp_path)
    load_policy(folder, checkpoint=base).model.save_pretrained(tmp_path / "transformer")
    expected = load_policy(folder, checkpoint=base, base_lora=lora, dtype=torch.bfloat16).model.state_dict()
    found = load_policy(tmp_path, base_lora=lora, dtype=torch.bfloat16).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_averaged_generator_goes_before_the_last(folder: Path, saved: Callable[..., Path]) -> None:
    """Where a file holds both; `critic` is nobody's."""
    averaged = golden_weights()
    path = saved(generator={"model.other": torch.zeros(1)}, generator_ema=averaged, critic={})
    model = load_policy(folder, checkpoint=path).model
    assert torch.equal(model.patch_embedding.weight, averaged["model.patch_embedding.weight"])


@pytest.mark.parametrize("source", ["checkpoint", "folder"])
def test_bfloat16_but_for_what_diffusers_keeps(folder: Path, tmp_path: Path, source: str) -> None:
    """A checkpoint gets the dtypes that `from_pretrained` gives a folder, and rounds each weight once."""
    exact = load_policy(folder, checkpoint=CHECKPOINT)
    if source == "folder":
        exact.model.save_pretrained(tmp_path / "transformer")
        model = load_policy(tmp_path, dtype=torch.bfloat16).model
    else:
        model = load_policy(folder, checkpoint=CHECKPOINT, dtype=torch.bfloat16).model
    kept = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert {name.removeprefix("blocks.0.") for name in kept if name.startswith("blocks.0.")} == {
        "scale_shift_table",
        "norm2.weight",
        "norm2.bias",
    }
    assert "condition_embedder.time_embedder.linear_1.weight" in kept
    for name, weight in exact.model.named_parameters():
        expected = weight if name in kept else weight.to(torch.bfloat16)
        assert torch.equal(model.get_parameter(name), expected)
        assert keeps_float32(name) == (name in kept)
    assert model.dtype == torch.bfloat16


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


def test_missing_weights(folder: Path) -> None:
    """A configuration without weights is refused."""
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_policy(folder)


def test_a_partial_checkpoint(folder: Path, saved: Callable[..., Path]) -> None:
    """A few of the missing and of the unexpected names, and how many there are of each."""
    weights = golden_weights()
    for name in [name for name in weights if ".blocks.1." in name]:
        weights[name.replace("blocks.1", "blocks.7")] = weights.pop(name)
    del weights["model.head.head.bias"]
    with pytest.raises(ModelError) as error:
        load_policy(folder, checkpoint=saved(generator=weights))
    sentence = str(error.value)
    assert "is not the model that transformer/config.json describes, by its tensors: 28 missing (blocks.1." in sentence
    assert sentence.count("blocks.1.") == sentence.count("blocks.7.") == 3
    assert "and 27 unexpected (blocks.7." in sentence


def test_a_partial_folder(tmp_path: Path) -> None:
    """The weights of another depth are refused with names as well."""
    tiny_transformer().save_pretrained(tmp_path / "transformer")
    path = tmp_path / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 3}))
    with pytest.raises(ModelError, match=r"by its tensors: 27 missing \(blocks\.2\."):
        load_policy(tmp_path)


def test_a_checkpoint_of_another_size(tmp_path: Path) -> None:
    """With the tensor, and both shapes."""
    tiny_transformer().save_config(tmp_path / "transformer")
    with pytest.raises(ModelError, match=r"its \S+ is \[.*\], expected \[.*\]; give the files of one model"):
        load_policy(tmp_path, checkpoint=CHECKPOINT)


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"critic": {}}, "holds none of generator_ema, generator; expected a Self-Forcing or LongLive checkpoint"),
        ({"generator": {"a": 1}}, "holds no tensors by name"),
        ({"generator": {}}, r"69 missing \(blocks.0.attn1.norm_k.weight, "),
    ],
)
def test_a_checkpoint_of_another_kind(
    folder: Path, saved: Callable[..., Path], parts: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        load_policy(folder, checkpoint=saved(**parts))


@pytest.mark.parametrize(
    ("factors", "sentence"),
    [
        ({}, "holds an empty LoRA"),
        ({"blocks.0.self_attn.q.lora_A.weight": (2, 64)}, r"1 missing \(blocks.0.attn1.to_q.lora_B.weight\)"),
        (
            {"blocks.9.ffn.0.lora_A.weight": (2, 64), "blocks.9.ffn.0.lora_B.weight": (128, 2)},
            r"not a LoRA of this model, by its tensors: 1 unexpected \(blocks.9.ffn.net.0.proj\)",
        ),
        (
            {"blocks.0.ffn.0.lora_A.weight": (2, 64), "blocks.0.ffn.0.lora_B.weight": (64, 2)},
            r"its blocks.0.ffn.net.0.proj is \[64, 64\], expected \[128, 64\]",
        ),
        (
            {"blocks.0.ffn.0.lora_A.weight": (2, 64), "blocks.0.ffn.0.lora_B.weight": (128, 3)},
            r"holds no LoRA of blocks.0.ffn.net.0.proj: its factors are \[2, 64\] and \[128, 3\]",
        ),
    ],
)
def test_a_wrong_lora(
    folder: Path, saved: Callable[..., Path], factors: dict[str, tuple[int, int]], sentence: str
) -> None:
    path = saved(generator_lora={f"base_model.model.{name}": torch.zeros(shape) for name, shape in factors.items()})
    with pytest.raises(ModelError, match=sentence):
        load_policy(folder, checkpoint=CHECKPOINT, base_lora=path)


def test_a_checkpoint_as_lora(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no generator_lora; expected LongLive's lora\.pt"):
        load_policy(folder, checkpoint=CHECKPOINT, base_lora=CHECKPOINT)


class Payload:
    """What a pickle could run."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return exec, ("raise SystemExit('code of the file was run')",)


def test_no_code_of_a_checkpoint_runs(folder: Path, tmp_path: Path, saved: Callable[..., Path]) -> None:
    """Neither of torch's format nor of a bare pickle."""
    with pytest.raises(ModelError, match="cannot be read as a PyTorch checkpoint"):
        load_policy(folder, checkpoint=saved(generator=Payload()))
    bare = tmp_path / "bare.pt"
    bare.write_bytes(pickle.dumps(Payload()))
    with pytest.raises(ModelError, match="cannot be read as a PyTorch checkpoint"):
        load_policy(folder, checkpoint=bare)


@pytest.mark.parametrize(
    "text",
    ['{"latent_frames": 20}', '{"frames": 3}', '{"local_attn_size": 2}', '{"denoising_steps": [250, 1000]}', "{"],
)
def test_wrong_settings(tmp_path: Path, text: str) -> None:
    """A causal.json that cannot be sampled is refused, and its path is named."""
    (tmp_path / "causal.json").write_text(text)
    with pytest.raises(ModelError, match=r"causal\.json does not describe"):
        load_settings(tmp_path)
