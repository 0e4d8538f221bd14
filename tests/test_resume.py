"""A run that was stopped, or killed, goes on to the bits of one that was not."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from asyncflow import checkpoint


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
    assert f"{damaged}: adapter.pt has 11 bytes, expected" in output
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
