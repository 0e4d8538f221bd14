"""Wrong use of a command: one clear sentence on stderr and exit code 2, before a process starts or a model loads."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from algorithms.cli import asyncflow
from algorithms.dancegrpo import DanceGRPOConfig
from algorithms.dancegrpo import main as dancegrpo
from algorithms.prepare import hash_model
from algorithms.resume import Progress, Saved
from asyncflow import checkpoint, launch, options
from asyncflow.config import dump, resolve
from asyncflow.options import run
from engines.adapter import Adapter, AdapterSettings
from engines.testing import tiny_transformer

Refused = Callable[..., str]


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: `model` with unreadable weights, and four prompts. No process may start from it."""
    shutil.copytree(tiny_model, tmp_path / "model")
    for weights in (tmp_path / "model").rglob("*.safetensors"):
        weights.write_text("whoever loads this fails")
    (tmp_path / "prompts.txt").write_text("a red square moving left\n" * 4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    monkeypatch.setattr(launch, "run_rank", lambda *_: pytest.fail("a rank was run"))
    return tmp_path


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run the command with options that are wrong; returns the sentence."""

    def refused(*wrong: str) -> str:
        args = ["--model", "model", "--prompts", "prompts.txt", "--reward", "engines.rewards.testing:Brightness"]
        assert run(dancegrpo, [*args, "--out", "out", "--device", "cpu", *wrong]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("Error: ")
        assert captured.err.count("\n") == 1
        assert not (folder / "out" / "config.toml").exists()
        return captured.err.removeprefix("Error: ").strip()

    return refused


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("--model nowhere", "--model: there is no folder nowhere; give a diffusers folder of a causal Wan model"),
        ("--model .", "--model: . is no diffusers Wan folder: it has no transformer, vae, text_encoder, tokenizer"),
        ("--prompts prompts.pdf", "--prompts: expected a file that ends in .txt, .csv or .jsonl, got prompts.pdf"),
        ("--prompts none.txt", "--prompts: cannot read none.txt: No such file or directory"),
        ("--eval-prompts none.txt", "--eval-prompts: cannot read none.txt: No such file or directory"),
        ("--stepz 3", "No such option '--stepz'. (Did you mean one of: "),
        ("--steps many", "--steps: expected an integer of at least 1, got many"),
        ("--group-size 1", "--group-size: expected an integer of at least 2, got 1"),
        (
            "--schedule fastest",
            "--schedule: expected one of async-reward, async-train, colocated, merged-replay, stagebreaker, "
            "got fastest",
        ),
        ("--ranks 0", "--ranks: expected at least 1, got 0"),
        ("--schedule async-reward --ranks 2 --reward-ranks 2", "--reward-ranks: the async-reward schedule needs"),
        ("--schedule async-reward --ranks 1", "--reward-ranks: the async-reward schedule needs at least 1 reward rank"),
        ("--schedule async-reward --reward-ranks 0", "--reward-ranks: the async-reward schedule needs"),
        ("--reward-ranks 1", "--reward-ranks: the colocated schedule has no reward ranks, got 1"),
        ("--mini-batches 3", "--mini-batches: expected a divisor of --prompts-per-step 4"),
        ("--best-of-n 3", "--best-of-n: expected an even number up to --group-size 8, got 3"),
        ("--best-of-n 10", "--best-of-n: expected an even number up to --group-size 8, got 10"),
        ("--step-fraction 0.3", "--step-fraction: 0.3 of 2 stochastic steps trains none; give at least 0.5"),
        ("--reward colr", '--reward: unknown reward "colr"; did you mean "colour"?'),
        ("--reward motion --reward motion", "--reward: motion is given twice"),
        ("--reward nomod:X", "--reward: cannot import nomod:X"),
        ("--init-adapter none", "--init-adapter: none has no adapter_config.json"),
        ("--resume none", "--resume: none: no such checkpoint"),
        ("--resume model", "--resume: model: manifest.json cannot be read: No such file or directory"),
        ("--config none.toml", "--config: cannot read none.toml: No such file or directory"),
        ("--out prompts.txt", "--out: prompts.txt is no folder; choose another"),
        ("--out prompts.txt/run", "--out: cannot write prompts.txt/run/config.toml: Not a directory"),
    ],
)
def test_a_wrong_option(refused: Refused, wrong: str, sentence: str):
    assert sentence in refused(*wrong.split())


def test_a_gpu_that_is_not_there(refused: Refused, monkeypatch: pytest.MonkeyPatch):
    """Found for all ranks before any starts."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    sentence = refused("--device", "cuda", "--ranks", "2")
    assert sentence == "--device cuda: rank 1 needs a GPU of its own, and this host has 1"


def test_nccl_without_gpus(refused: Refused):
    sentence = refused("--device", "cpu", "--channel", "nccl")
    assert sentence == "--channel nccl: rank 0 needs a GPU of its own; without, choose shared-memory or gloo"


def test_an_unknown_key_of_a_file(refused: Refused, folder: Path):
    (folder / "run.toml").write_text("group-sise = 4\n")
    assert refused("--config", "run.toml") == 'run.toml: unknown key "group-sise"; did you mean "group-size"?'


def test_an_empty_prompt(refused: Refused, folder: Path):
    (folder / "empty.jsonl").write_text('{"prompt": "a"}\n{"prompt": " "}\n')
    assert refused("--prompts", "empty.jsonl") == (
        "empty.jsonl, line 2: the prompt is empty; write one or remove the line"
    )


def test_a_model_without_prompts(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert run(dancegrpo, ["--model", "model"]) == 2
    assert capsys.readouterr().err == "Error: --prompts: a model of your own needs a file of training prompts\n"


def test_a_folder_of_another_kind(refused: Refused, folder: Path):
    """Another transformer's class, or a configuration that is none, is found without loading it."""
    config = folder / "model" / "transformer" / "config.json"
    config.write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    assert refused() == "--model: model holds a FluxTransformer2DModel; only Wan text-to-video models are trained"
    for damage in ("{", "[]", "{}"):
        config.write_text(damage)
        assert "model/transformer/config.json is missing or damaged" in refused()
    config.unlink()
    assert "model/transformer/config.json is missing or damaged" in refused()


def test_wrong_causal_settings(refused: Refused, folder: Path):
    settings = json.loads((folder / "model" / "causal.json").read_text())
    (folder / "model" / "causal.json").write_text(json.dumps(settings | {"denoising_steps": [1000.0]}))
    assert "--model: model samples in one denoising step" in refused()
    (folder / "model" / "causal.json").write_text(json.dumps(settings | {"latent_frames": 7}))
    assert "causal.json does not describe a causal sampler" in refused()


def test_a_reward_that_only_compares_is_enough(folder: Path):
    """An evaluation then compares with the base model's videos."""
    shutil.copy("prompts.txt", "held_out.txt")
    duel = ["--reward", "colour-duel", "--eval-prompts", "held_out.txt"]
    given = ["--model", "model", "--prompts", "prompts.txt", "--device", "cpu", *duel]
    assert run(dancegrpo, [*given, "--dry-run"]) == 0


def test_a_folder_that_holds_a_run(refused: Refused, folder: Path):
    (folder / "out").mkdir()
    (folder / "out" / "metrics.jsonl").touch()
    assert refused() == "--out: out holds a run already; choose another folder, or go on with --resume out"


def test_ranks_under_torchrun(refused: Refused, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert refused("--ranks", "2") == "--ranks: torchrun started 2 ranks already; leave the option out"


def test_only_rank_0_says_what_is_wrong(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Every rank meets the same error; the others end with the same code and no word."""
    monkeypatch.setattr(options, "SILENCE_S", 0.0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for wrong in (["--stepz", "3"], ["--model", "nowhere", "--prompts", "prompts.txt"]):
        assert run(dancegrpo, wrong) == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("", "")


@pytest.fixture
def adapter(folder: Path) -> Path:
    """An adapter of rank 4 and alpha 8."""
    path = folder / "adapter"
    Adapter(tiny_transformer(), AdapterSettings(rank=4, alpha=8.0), 0).save(path)
    return path


def test_an_adapter_of_another_rank(refused: Refused, adapter: Path):
    assert refused("--init-adapter", "adapter") == (
        "--init-adapter: adapter has rank 4 and alpha 8, this run 32 and 32; give --lora-rank 4 --lora-alpha 8"
    )


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_unreadable_adapter(refused: Refused, adapter: Path, file: str):
    (adapter / file).write_text("damaged")
    assert refused("--init-adapter", "adapter").startswith("--init-adapter: adapter holds no readable LoRA: ")
    (adapter / file).unlink()
    assert refused("--init-adapter", "adapter").startswith(f"--init-adapter: adapter has no {file}; give a folder")


@pytest.fixture
def stopped(folder: Path) -> Path:
    """A run directory with checkpoints of steps 2 and 4 of the options that `refused` gives, and metrics."""
    config = DanceGRPOConfig(model="model", prompts="prompts.txt", reward=("engines.rewards.testing:Brightness",))
    for step in (2, 4):
        saved = Saved(
            algorithm="DanceGRPO",
            model=hash_model(folder / "model"),
            config=dump(config),
            progress=Progress(step=step),
        )
        meta = msgspec.to_builtins(saved)
        checkpoint.save(folder / "before" / "checkpoints", step, {"adapter.pt": b"weights"}, meta)
    (folder / "before" / "metrics.jsonl").write_text('{"step": 1}\n')
    return folder / "before"


def test_steps_that_are_done(refused: Refused, stopped: Path):
    sentence = "--steps: the checkpoint is of step 4; give more than that to go on"
    assert refused("--resume", "before", "--steps", "4") == sentence


def test_a_resumed_run_with_other_options(refused: Refused, stopped: Path):
    """Whatever changes the training is refused; what does not is free."""
    sentence = refused("--resume", "before", "--lr", "1")
    assert sentence.startswith("--lr: the run to resume has 0.0003, this one 1.0; pass --config with the config.toml")
    assert refused("--resume", "before", "--steps", "5", "--schedule", "async-reward", "--ranks", "1").startswith(
        "--reward-ranks"
    )


def test_a_damaged_checkpoint(refused: Refused, stopped: Path):
    """Named by itself it is an error; of a run the newest that verifies is taken, and the damage is told."""
    file = stopped / "checkpoints" / "step-000004" / "adapter.pt"
    file.write_bytes(b"weightz")
    sentence = refused("--resume", str(file.parent))
    assert sentence.startswith(f"--resume: {file.parent}: adapter.pt was altered, its SHA-256 differs")
    assert refused("--resume", "before", "--steps", "2").startswith("--steps: the checkpoint is of step 2")
    (stopped / "checkpoints" / "step-000002" / "adapter.pt").unlink()
    assert refused("--resume", "before").startswith("--resume: before/checkpoints: holds no checkpoint to resume from")


def test_an_earlier_checkpoint_of_a_run_that_went_on(refused: Refused, stopped: Path):
    """It cannot be trained into the same folder, where later checkpoints are."""
    sentence = refused("--resume", "before/checkpoints/step-000002", "--out", "before")
    assert sentence.startswith("--resume: before holds a later checkpoint, of step 4; go on with --resume before, or")


def test_dry_run_prints_configuration_graph_and_plan(folder: Path, capsys: pytest.CaptureFixture[str]):
    """It loads nothing (the weights here are unreadable) and writes nothing; its configuration can be run."""
    given = "--model model --prompts prompts.txt --device cpu --dry-run --ranks 3 --schedule async-reward --lr 0.25"
    rewards = ["--reward", "engines.rewards.testing:Brightness=0.5", "--reward", "colour-duel"]
    assert run(dancegrpo, [*given.split(), *rewards, "--task-batch", "4", "--out", "new"]) == 0
    out = capsys.readouterr().out
    text, _, plan = out.partition("graph: ")
    (folder / "again.toml").write_text(text)
    config = resolve(DanceGRPOConfig, {}, "again.toml")
    assert (config.lr, config.reward) == (0.25, ("engines.rewards.testing:Brightness=0.5", "colour-duel"))
    assert plan.startswith("178 tasks, ")
    assert "8 rollout, 8 decode, 32 score, 112 compare, 4 reward, 4 advantage, 1 barrier, 8 replay, 1 update" in plan
    assert "rank 0 (policy): 4 rollout, 4 decode, 4 replay, 1 update" in plan
    assert "rank 2 (judge): 32 score, 112 compare" in plan
    assert not (folder / "new").exists()


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]):
    assert run(asyncflow, ["dancegrpo", "--help"]) == 0
    out = capsys.readouterr().out
    for name in (*DanceGRPOConfig.__struct_fields__, "ranks", "dry_run"):
        assert f"--{name.replace('_', '-')}" in out
    assert run(asyncflow, []) == 2
    assert "generate" in capsys.readouterr().err
