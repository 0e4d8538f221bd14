"""A run that was stopped, or killed, goes on to the bits of one that was not; one that trains otherwise is refused."""

import json
import os
import shutil
import signal
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from algorithms.dancegrpo import DanceGRPOConfig
from algorithms.prepare import hash_model
from algorithms.resume import Progress, Saved, checkpoint_of
from asyncflow import checkpoint
from asyncflow.config import dump
from asyncflow.errors import ConfigError


def weights(run: Path) -> dict[int, str]:
    """The hash of the weights after each step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines), "a step is reported once"
    return {line["step"]: line["weights/sha256"] for line in lines if line["step"]}


@pytest.fixture
def stopped(torchrun: Path, tmp_path: Path) -> Path:
    """A copy of a run that ended after its second step."""
    return shutil.copytree(torchrun, tmp_path / "run")


def test_a_stopped_run_goes_on(stopped, uninterrupted, run_ranks, tmp_path):
    """From its directory and configuration, on other ranks under another schedule; metrics go on where they were."""
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "weights/sha256": "lost with the crash"}\n{"step": 4, "wei')
    options = [
        f"--config={stopped / 'config.toml'}", f"--resume={stopped}", f"--out={stopped}", "--steps=4",
        "--eval-every=0", "--schedule=async-reward",
    ]  # fmt: skip
    codes, output = run_ranks(3, options, tmp_path / "output")
    assert codes == [0, 0, 0], output
    assert weights(stopped) == weights(uninterrupted)
    assert checkpoint.steps(stopped / "checkpoints") == [2, 4]


def test_a_damaged_checkpoint_is_passed_over(stopped, recipe, uninterrupted, run_ranks, tmp_path):
    """The newest that verifies is taken, which is said, and the damaged one is replaced when its step comes again."""
    good = stopped / "checkpoints" / "step-000002"
    damaged = shutil.copytree(good, stopped / "checkpoints" / "step-000003")
    (damaged / "adapter.pt").write_bytes(b"half a file")
    options = [*recipe, "--save-every=1", "--steps=3", f"--resume={stopped}"]
    codes, output = run_ranks(1, options, tmp_path / "output")
    assert codes == [0], output
    assert f"warning: {damaged}: adapter.pt has 11 bytes, expected" in output
    assert f"warning: going on from {good}, the newest checkpoint that is whole" in output
    assert weights(stopped) == {step: sha for step, sha in weights(uninterrupted).items() if step <= 3}
    assert checkpoint.load(damaged).step == 3


def test_a_checkpoint_goes_on_in_another_folder(uninterrupted, recipe, run_ranks, tmp_path):
    """An earlier checkpoint of a finished run, named by itself."""
    earlier = uninterrupted / "checkpoints" / "step-000002"
    options = [*recipe, "--steps=3", f"--resume={earlier}", f"--out={tmp_path / 'other'}"]
    codes, output = run_ranks(2, options, tmp_path / "output")
    assert codes == [0, 0], output
    assert weights(tmp_path / "other") == {3: weights(uninterrupted)[3]}


def test_a_killed_run_goes_on(recipe, uninterrupted, run_ranks, tmp_path):
    """A rank is killed in its third step: the run ends everywhere, with one error, and can be resumed."""
    from algorithms.testing import start_ranks

    run = tmp_path / "run"
    ranks = start_ranks(2, [*recipe, "--steps=50", f"--out={run}"], tmp_path / "killed")
    second = ranks.processes[1]
    while not (run / "checkpoints" / "step-000002").exists():
        second.join(0.02)
        assert second.is_alive(), (tmp_path / "killed").read_text()
    os.kill(second.pid, signal.SIGKILL)
    assert ranks.wait(30) == [1, -signal.SIGKILL]
    output = (tmp_path / "killed").read_text()
    assert output.count("error: ") == 1
    assert "error: rank 1 (process " in output
    assert checkpoint.steps(run / "checkpoints") == [2]

    codes, output = run_ranks(2, [*recipe, "--steps=4", f"--resume={run}"], tmp_path / "resumed")
    assert codes == [0, 0], output
    assert weights(run) == weights(uninterrupted)


def test_without_exact_a_resumed_run_stays_close(recipe, run_ranks, tmp_path):
    """Stopped after one step and resumed on other ranks, whose sums round otherwise: nearly the same adapter."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    ordinary = [*recipe, "--no-exact", "--save-every=1"]
    for name, ranks, options in (
        ("whole", 1, ["--steps=2", f"--out={whole}"]),
        ("first", 2, ["--steps=1", f"--out={parts}"]),
        ("second", 3, ["--steps=2", f"--resume={parts}"]),
    ):
        codes, output = run_ranks(ranks, [*ordinary, *options], tmp_path / f"{name}.txt")
        assert set(codes) == {0}, output
    one, other = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (whole, parts))
    for name, weight in one.items():
        assert (weight - other[name]).norm() <= 1e-2 * weight.norm(), name


def failed_saves(run: Path) -> list[int]:
    """How many saves had failed in a row before each step."""
    return [json.loads(line)["checkpoint/failed"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_save_that_fails_is_told_and_training_goes_on(recipe, run_ranks, tmp_path):
    """Two saves find checkpoints of another run in their way, which stay; the third succeeds and ends the count."""
    run = tmp_path / "run"
    others = [checkpoint.save(run / "checkpoints", step, {"other": b"run"}, {}) for step in (1, 2)]
    options = [*recipe, "--save-every=1", "--steps=4", "--keep-checkpoints=9", f"--out={run}"]
    codes, output = run_ranks(1, options, tmp_path / "output")
    assert codes == [0], output
    told = [line for line in output.splitlines() if "save failed" in line]
    assert [line.partition("; ")[0] for line in told] == [
        f"step {step}: a save failed: {path}: exists already" for step, path in enumerate(others, 1)
    ]
    assert failed_saves(run) == [0, 1, 2, 0]
    assert [checkpoint.load(path).files.get("other") for path in others] == [b"run", b"run"]
    assert checkpoint.steps(run / "checkpoints") == [1, 2, 3, 4]


def test_a_run_whose_saves_keep_failing_ends(recipe, run_ranks, tmp_path):
    """On every rank and with one error, long before its last step."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").touch()
    codes, output = run_ranks(2, [*recipe, "--save-every=1", "--steps=99", f"--out={run}"], tmp_path / "output")
    assert codes == [1, 1]
    assert output.count("a save failed") == 2
    assert output.count("error: ") == 1
    assert f"error: 3 saves in a row failed: {run}/checkpoints/step-000003: cannot write a checkpoint of " in output
    assert "MB: Not a directory; make room or give another --out\n" in output
    assert failed_saves(run) == [0, 1, 2]


def test_a_run_whose_last_save_fails_ends_with_an_error(recipe, run_ranks, tmp_path):
    """Here of the adapter alone: the checkpoint is there, and can be resumed from."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "adapter").touch()
    codes, output = run_ranks(1, [*recipe, "--steps=1", f"--out={run}"], tmp_path / "output")
    assert codes == [1]
    assert f"error: the last save of the run failed: {run}/adapter: cannot write the adapter: " in output
    assert output.endswith("; make room or give another --out\n")
    assert checkpoint.steps(run / "checkpoints") == [1]


def resumed(folder: Path, algorithm: str = "DanceGRPO", content: str = "hash", **changes: object) -> int:
    """The step from which a run of these options resumes another, of seven steps."""
    options = {"model": "model", "prompts": "prompts.txt"}
    before = dump(DanceGRPOConfig(**options))
    saved = Saved(algorithm="DanceGRPO", model="hash", config=before, progress=Progress(step=7))
    if not folder.exists():
        checkpoint.save(folder, 7, {}, msgspec.to_builtins(saved))
    config = DanceGRPOConfig(**options | {"resume": str(folder / "step-000007")} | changes)
    return checkpoint_of(config, algorithm, content)[1].progress.step


def test_what_does_not_change_the_training_may_change(tmp_path):
    """Ranks, schedule, channel, when to save, and where the model lies."""
    changes = {"steps": 9, "schedule": "stagebreaker", "reward_ranks": 2, "channel": "gloo", "save_every": 1}
    changes |= {"deterministic": True}
    assert resumed(tmp_path / "run", **changes, model="moved") == 7


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"algorithm": "KVPO"}, "--resume: {}/step-000007 is of a run of DanceGRPO, this is KVPO; use its command"),
        ({"content": "other"}, "--model: model has other weights or settings than the model of the run to resume, "),
        ({"reward": ("colour",)}, "--reward: the run to resume has ('colour', 'motion'), this one ('colour',); pass "),
        ({"seed": 1}, "--seed: the run to resume has 0, this one 1; pass --config with the config.toml of that run, "),
    ],
)
def test_a_run_that_trains_otherwise_is_refused_by_name(changes, sentence, tmp_path):
    with pytest.raises(ConfigError) as error:
        resumed(tmp_path / "run", **changes)
    assert str(error.value).startswith(sentence.format(tmp_path / "run"))
    assert str(error.value).endswith("or start a new run from its adapter with --init-adapter")


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    checkpoint.save(tmp_path / "run", 7, {}, {"config": ""})
    with pytest.raises(ConfigError, match=r"^--resume: .*step-000007 holds no checkpoint of a training run of this"):
        resumed(tmp_path / "run")


def test_a_model_s_hash_is_of_its_content(tiny_model, tmp_path):
    """Other weights, settings or files change it; another place, or a file beside the model's parts, does not."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "README.md").touch()
    (model / "transformer" / "large").write_bytes(bytes(10_000_000))
    before = hash_model(model)
    assert before != hash_model(tiny_model)
    assert before == hash_model(model.rename(tmp_path / "moved"))
    model = tmp_path / "moved"
    (model / "README.md").write_text("new")
    assert before == hash_model(model)
    hashes = {before}
    for name in ("causal.json", "vae/diffusion_pytorch_model.safetensors", "transformer/large"):
        (model / name).write_bytes((model / name).read_bytes().swapcase().replace(b"\0", b"\1"))
        hashes.add(hash_model(model))
    (model / "tokenizer" / "tokenizer_config.json").unlink()
    hashes.add(hash_model(model))
    assert len(hashes) == 5
