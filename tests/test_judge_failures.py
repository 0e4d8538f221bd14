"""A judge that fails too often, or for good, ends the run with a sentence, and no completed step is lost with it."""

import json
from pathlib import Path

import pytest

from asyncflow import checkpoint
from asyncflow.core.graph import Graph, Kind, Task
from asyncflow.engine import Invalid
from asyncflow.errors import JudgeUnfit
from engines.rewards.failures import JUDGEMENTS, STEPS, Failures
from engines.rewards.registry import WeightedReward, parse_rewards
from engines.rewards.testing import Brightness, Unfit

UNFIT = WeightedReward(Unfit(), 1.0)


def show(failures: Failures, judged: int, *reasons: str) -> None:
    """A step with so many valid judgements, and these invalid ones, of `unfit`, and as many invalid of another."""
    outcomes = [0.5] * judged + [Invalid(reason) for reason in reasons]
    tasks = [Task(f"score/unfit/0/{n}", Kind.SCORE, judge="unfit") for n in range(len(outcomes) + 1)]
    other = [Task(f"score/brightness/0/{n}", Kind.SCORE, judge="brightness") for n in range(len(outcomes))]
    values = dict(zip([task.id for task in tasks], outcomes, strict=False))
    failures.add(values | {task.id: Invalid("dark") for task in other}, Graph([*tasks, *other]))


def test_the_share_is_of_a_full_window():
    """Neither one bad step nor few judgements end a run, however bad; then the sentence says what to do."""
    failures = Failures([WeightedReward(Brightness(), 1.0), UNFIT])
    per_step = JUDGEMENTS // STEPS
    for _ in range(STEPS):
        show(failures, 0, *["parse: hm"] * per_step)
        failures.check()
    assert STEPS * per_step < JUDGEMENTS
    show(failures, 0, "length: 4096 tokens", "other words")
    with pytest.raises(JudgeUnfit) as error:
        failures.check()
    assert str(error.value) == (
        "reward unfit: 50 of the 50 judgements of the last 4 steps were invalid, more than its max-invalid of 0.3; 48 "
        "are like this one: parse: hm; correct its template, or the model that it names, or raise max-invalid, and go "
        "on with --resume"
    )


def test_the_share_may_be_reached():
    """Three of ten are allowed by 0.3, and one more is not."""
    failures = Failures([UNFIT])
    for _ in range(STEPS):
        show(failures, 70, *["timeout: no verdict"] * 30)
    failures.check()
    show(failures, 69, *["timeout: no verdict"] * 31)
    with pytest.raises(JudgeUnfit, match="^reward unfit: 91 of the 300 judgements of the last 3 steps .*its deadline"):
        failures.check()


def test_what_is_long_past_is_forgotten():
    """A window is the fewest steps that are enough, so a judge that has recovered is left in peace."""
    failures = Failures([UNFIT])
    show(failures, 0, *["engine: busy"] * 1000)
    for _ in range(STEPS):
        show(failures, JUDGEMENTS)
    failures.check()


def test_a_judge_says_what_share_it_may_have(tmp_path):
    """Of those that write three of ten by default, and what its file says; rules may always fail."""
    file = tmp_path / "judge.toml"
    file.write_text('protocol = "vr-thinker"\nurl = "http://localhost/v1"\nmax-invalid = 0.05')
    default = "unified-reward-flex@http://localhost/v1"
    shares = [weighted.reward.max_invalid for weighted in parse_rewards([default, str(file), "colour"])]
    assert shares == [0.3, 0.05, 1.0]


def metrics(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_with_an_unfit_judge_stops_and_goes_on(recipe, run_ranks, tmp_path):
    """Half of its 16 judgements a step fail: the fourth fills the window, and is saved although no save was due."""
    prompts, run = tmp_path / "prompts.txt", tmp_path / "run"
    prompts.write_text("".join(f"a red square moving {way}\n" for way in ("up", "left")))
    options = [
        *recipe, "--reward=engines.rewards.testing:Unfit", "--save-every=0", "--steps=6", f"--prompts={prompts}",
    ]  # fmt: skip
    codes, output = run_ranks(2, [*options, f"--out={run}"], tmp_path / "output")
    assert codes == [1, 1], output
    assert f"stopped: step 4 is saved; go on with --resume {run}\n" in output
    assert output.count("error: ") == 1
    assert "error: reward unfit: 32 of the 64 judgements of the last 4 steps were invalid, more than its max-" in output
    assert checkpoint.steps(run / "checkpoints") == [4]
    codes, output = run_ranks(1, [*options, f"--resume={run}"], tmp_path / "resumed")
    assert codes == [0], output
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert [line["critic/dropped_groups"] for line in metrics(run)] == [2] * 6


def test_a_run_goes_on_after_its_judge_was_gone(recipe, uninterrupted, run_ranks, tmp_path):
    """An endpoint that is dead in the third step loses no checkpoint: resumed from the second step, the same bits."""
    run = tmp_path / "run"
    rewards = [option for option in recipe if "Duel" in option]
    plain = [option for option in recipe if not option.startswith("--reward")]
    options = [*plain, "--reward=engines.rewards.testing:Mortal", *rewards, "--steps=4"]
    codes, output = run_ranks(1, [*options, f"--out={run}"], tmp_path / "output")
    assert codes == [1]
    assert output.count("error: ") == 1
    assert "failed: the endpoint does not answer, and went on so" in output
    assert checkpoint.steps(run / "checkpoints") == [2]
    codes, output = run_ranks(1, [*options, f"--resume={run}"], tmp_path / "resumed")
    assert codes == [0], output
    hashes = [line["weights/sha256"] for line in metrics(run)]
    assert hashes == [line["weights/sha256"] for line in metrics(uninterrupted)]


def test_a_step_that_teaches_nothing_is_no_failure(recipe, run_ranks, tmp_path):
    """Where all rewards are equal, and such candidates are dropped, nobody trains, and the run goes on."""
    plain = [option for option in recipe if not option.startswith("--reward")]
    options = [*plain, "--reward=engines.rewards.testing:Level", "--drop-zero-advantages", "--steps=2"]
    codes, output = run_ranks(1, [*options, f"--out={tmp_path / 'run'}"], tmp_path / "output")
    assert codes == [0], output
    assert [line["critic/kept"] for line in metrics(tmp_path / "run")] == [0, 0]
