"""A training run whose judge vLLM serves: the toy's judge, beside ranks as torchrun starts them."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from engines.toy import JUDGE
from tests.with_vllm.test_vllm_processes import SOON_S, descendants


@pytest.fixture(scope="module")
def options(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Sequence[str]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "prompts.txt").write_text("a red square moving up\na blue circle moving left\n")
    settings = JUDGE.read_text().replace('"transformers"', '"vllm"')
    for name in ("judge", "judge.txt"):
        settings = settings.replace(f'"{name}"', f'"{JUDGE.parent / name}"')
    (folder / "judge.toml").write_text(settings)
    sizes = ["--prompts-per-step=2", "--group-size=4", "--task-batch=2", "--lora-rank=2", "--lora-alpha=2"]
    return [
        f"--model={tiny_model}", f"--prompts={folder / 'prompts.txt'}", f"--reward={folder / 'judge.toml'}", *sizes,
        "--device=cpu", "--eval-every=0", "--save-every=1",
    ]  # fmt: skip


@pytest.mark.parametrize(("schedule", "ranks"), [("colocated", 1), ("stagebreaker", 2)])
def test_a_run_ends_with_what_its_judge_said(schedule, ranks, options, run_ranks, tmp_path):
    """Every judgement is valid, and those of a later step as well, although the judge rests where its rank trains."""
    more = [f"--schedule={schedule}", "--steps=2", f"--out={tmp_path / 'run'}"]
    codes, output = run_ranks(ranks, [*options, *more], tmp_path / "output")
    assert codes == [0] * ranks, output
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["judge/toy-judge/valid"] for step in steps] == [8, 8]
    assert all(step["judge/toy-judge/tokens/mean"] > 5 for step in steps)
    trace = json.loads((tmp_path / "run" / "trace" / "step-000002.json").read_text())["traceEvents"]
    assert {event["cat"] for event in trace if event.get("name") == "score"} == {"judge toy-judge"}, "beside the device"


def rank_of(pid: int) -> str:
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((line.removeprefix(b"RANK=").decode() for line in environment if line.startswith(b"RANK=")), "")


def test_a_killed_reward_rank_takes_vllm_with_it(options, tmp_path):
    """The run ends with one error that names the rank; the last step is saved, and not even shared memory stays."""
    command = [sys.executable, "-m", "algorithms.dancegrpo", "--ranks=2", "--steps=1000", f"--out={tmp_path / 'run'}"]
    command += ["--schedule=stagebreaker", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        while not list((tmp_path / "run" / "checkpoints").glob("step-*")):
            assert run.poll() is None, run.communicate()
        (judge,) = [pid for pid in descendants(run.pid) if rank_of(pid) == "1"]
        served = descendants(judge)
        watched = [os.pidfd_open(pid) for pid in served]
        os.kill(judge, signal.SIGKILL)
        _, errors = run.communicate(timeout=SOON_S)
    assert run.returncode == 1
    (error,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "rank 1" in error
    assert len(served) >= 2, "vLLM's engine and its worker"
    for descriptor in watched:
        with closing(os.fdopen(descriptor)):
            assert select.select([descriptor], [], [], SOON_S)[0], f"one of {served} lives on"
