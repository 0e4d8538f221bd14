"""A run that is interrupted saves its last completed step, and a resumed one goes on from there to the same bits."""

import json
import os
import signal
from pathlib import Path

import pytest

from algorithms.testing import Ranks, start_ranks
from asyncflow import checkpoint
from asyncflow.launch import INTERRUPTED


def lines(run: Path) -> list[dict[str, object]]:
    """What was written of each step so far."""
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def interrupt(ranks: Ranks, run: Path, steps: int, number: signal.Signals) -> list[int | None]:
    """Send every rank a signal once so many steps are written, as a launcher does; their exit codes."""
    while len(lines(run)) < steps:
        ranks.processes[0].join(0.02)
        assert ranks.processes[0].is_alive(), ranks.output.read_text()
    for process in ranks.processes:
        assert process.pid
        os.kill(process.pid, number)
    return ranks.wait(30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_its_last_step_and_goes_on(number, recipe, uninterrupted, run_ranks, tmp_path):
    """Nobody asked for a checkpoint before."""
    run = tmp_path / "run"
    options = [*recipe, "--save-every=0", f"--out={run}"]
    ranks = start_ranks(2, [*options, "--steps=99"], tmp_path / "output")
    codes = interrupt(ranks, run, 2, number)
    output = (tmp_path / "output").read_text()
    assert codes == [INTERRUPTED, INTERRUPTED], output
    assert "error" not in output
    (last,) = checkpoint.steps(run / "checkpoints")
    assert [line["step"] for line in lines(run)] == list(range(1, last + 1))
    assert output.endswith(f"interrupted: step {last} is saved; go on with --resume {run}\n")

    codes, output = run_ranks(1, [*options, f"--resume={run}", f"--steps={last + 1}"], tmp_path / "resumed")
    assert codes == [0], output
    made = {line["step"]: line["weights/sha256"] for line in lines(run)}
    assert len(made) == last + 1
    for line in lines(uninterrupted):
        assert made.get(line["step"], line["weights/sha256"]) == line["weights/sha256"]


def test_a_run_interrupted_in_its_first_step_has_nothing_to_save(recipe, tmp_path):
    run = tmp_path / "run"
    ranks = start_ranks(2, [*recipe, "--steps=99", "--eval-every=0", f"--out={run}"], tmp_path / "output")
    while not (run / "metrics.jsonl").exists():
        ranks.processes[0].join(0.005)
        assert ranks.processes[0].is_alive(), ranks.output.read_text()
    assert interrupt(ranks, run, 0, signal.SIGINT) == [INTERRUPTED, INTERRUPTED]
    assert not lines(run) or checkpoint.steps(run / "checkpoints") == [lines(run)[-1]["step"]]
    assert "error" not in (tmp_path / "output").read_text()
