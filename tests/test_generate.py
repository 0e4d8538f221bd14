"""`asyncflow generate`: videos of a model folder, the same for the same seed, and wrong use in one sentence."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import av
import pytest
import torch

from algorithms.generate import main
from asyncflow.options import run
from engines.adapter import Adapter, AdapterSettings
from engines.testing import tiny_transformer

Generate = Callable[..., dict[str, str]]


@pytest.fixture
def generate(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generate:
    """Run the command in the test's directory; returns the hash of each video by name."""
    monkeypatch.chdir(tmp_path)

    def generate(out: str, *options: str) -> dict[str, str]:
        assert run(main, ["--model", str(tiny_model), "--device", "cpu", "--out", out, *options]) == 0
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(out).iterdir())}

    return generate


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A trained adapter's folder: one whose B is not zero."""
    made = Adapter(tiny_transformer(), AdapterSettings(rank=2, alpha=4.0), seed=0)
    made.assign(0.3 * torch.randn(made.size, generator=torch.Generator().manual_seed(0)))
    made.save(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_a_video_for_each_prompt_and_sample(generate, tmp_path):
    """Of the prompts given and of a file's, as mp4 of the model's length; each sample is another."""
    (tmp_path / "more.txt").write_text("a blue circle moving up\n")
    made = generate("videos", "--prompt", "a red square moving left", "--prompts", "more.txt", "--samples", "2")
    assert list(made) == ["000-0.mp4", "000-1.mp4", "001-0.mp4", "001-1.mp4"]
    assert len(set(made.values())) == 4
    with av.open("videos/000-0.mp4") as video:
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    assert len(frames) == 21
    assert frames[0].shape == (256, 256, 3)  # 32 x 32, enlarged for the eye


def test_the_same_seed_gives_the_same_videos(generate):
    prompt = ["--prompt", "a red square moving left"]
    first = generate("first", *prompt)
    assert generate("second", *prompt) == first
    assert generate("third", *prompt, "--seed", "1") != first


def test_an_adapter_changes_the_video(generate, adapter):
    prompt = ["--prompt", "a red square moving left"]
    assert generate("with", *prompt, "--adapter", str(adapter)) != generate("without", *prompt)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "--prompt: nothing to generate; give --prompt TEXT or --prompts FILE"),
        (["--prompt", " "], "--prompt: the prompt is empty; write one"),
        (["--prompts", "none.txt"], "--prompts: cannot read none.txt: No such file or directory"),
        (["--prompt", "a", "--samples", "0"], "--samples: expected an integer of at least 1, got 0"),
        (["--prompt", "a", "--device", "tpu"], "--device: expected one of auto, cpu, cuda, got tpu"),
        (["--prompt", "a", "--model", "none"], "--model: there is no folder none"),
        (["--prompt", "a", "--adapter", "none"], "--adapter: none has no adapter_config.json"),
        (["--prompt", "a", "--adapter", "damaged"], "--adapter: damaged holds no readable LoRA"),
        (["--prompt", "a", "--out", "file"], "--out: file is no folder; choose another"),
        (["--promt", "a"], "No such option '--promt'"),
    ],
)
def test_wrong_use_is_one_sentence(options, sentence, adapter, tiny_model, tmp_path, monkeypatch, capsys):
    """Before the model loads: its weights here are unreadable."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, "model")
    for weights in Path("model").rglob("*.safetensors"):
        weights.write_text("whoever loads this fails")
    shutil.copytree(adapter, "damaged")
    Path("damaged/adapter_model.safetensors").write_text("damaged")
    Path("file").touch()
    assert run(main, ["--model", "model", *options]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"Error: {sentence}")
    assert captured.err.count("\n") == 1
    assert not Path("videos").exists()
