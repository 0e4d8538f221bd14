"""What is left of a GPU for judges' caches: who gets how much, who is told, and what does not fit."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from algorithms import command, memory
from algorithms.dancegrpo import DanceGRPO, DanceGRPOConfig
from algorithms.dancegrpo import main as dancegrpo
from algorithms.memory import SHARE, RunMemory, split
from algorithms.prepare import Prepared, prepare
from asyncflow import launch
from asyncflow.config import resolve
from asyncflow.core.schedules import NAMES, Name
from asyncflow.errors import ConfigError
from asyncflow.options import run
from engines.memory import Estimate
from engines.rewards.base import Needs
from engines.rewards.registry import WeightedReward
from engines.rewards.testing import Brightness, save_tiny_judge

GIB = 2**30


def test_what_is_left_is_split() -> None:
    """Each gets its least, all it could use where there is enough, and else the same share of that."""
    needs = {"small": Needs({}, 10, 30), "large": Needs({}, 20, 100), "fixed": Needs({}, 5, 5), "rule": Needs({})}
    assert split(35, needs) == {"small": 10, "large": 20, "fixed": 5, "rule": 0}
    assert split(85, needs) == {"small": 20, "large": 60, "fixed": 5, "rule": 0}
    assert split(10**9, needs) == {"small": 30, "large": 100, "fixed": 5, "rule": 0}
    assert split(0, {}) == {}


class Judge(Brightness):
    """Needs what a judge of seven billion parameters does, or as much as is given."""

    def __init__(self, name: str, weights: float = 15, least: float = 1, most: float = 16) -> None:
        self.name = name
        self._needs = Needs({"judge weights": int(weights * GIB)}, int(least * GIB), int(most * GIB))

    def needs(self, height: int, width: int, device: torch.device) -> Needs:
        assert (height, width) == (32, 32)
        return self._needs


POLICY = Estimate({"activations": 12 * GIB, "weights": 3 * GIB})
Made: TypeAlias = Callable[..., RunMemory]


@pytest.fixture
def made(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """The memory of a run of so many ranks with these judges, on GPUs of these sizes in GiB, or on a CPU."""
    (tmp_path / "prompts.txt").write_text("a red square moving left\n")

    def made(schedule: str, *judges: Judge, gpus: Sequence[float] = (80, 80)) -> RunMemory:
        sizes = {f"cuda:{rank}": int(size * GIB) for rank, size in enumerate(gpus)}
        monkeypatch.setattr(memory, "device_memory", sizes.__getitem__)
        monkeypatch.setattr(memory, "estimate", lambda folder, work: POLICY)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        files = {"model": str(tiny_model), "prompts": str(tmp_path / "prompts.txt")}
        options = {"schedule": schedule, "reward": ["colour"], "eval_every": 0, "device": "cuda" if gpus else "cpu"}
        config = resolve(DanceGRPOConfig, files | options)
        prepared = prepare("dancegrpo", config, DanceGRPO, 2)
        run = dataclasses.replace(prepared.run, rewards=[WeightedReward(judge, 1.0) for judge in judges])
        return RunMemory(run, prepared.settings)

    return made


@pytest.mark.parametrize(
    ("schedule", "kinds"),
    [
        ("colocated", ["a policy and reward rank"]),
        ("async-reward", ["a policy rank", "a reward rank"]),
        ("stagebreaker", ["a policy rank", "a policy and reward rank"]),
    ],
)
@pytest.mark.parametrize("gpus", [(80, 80), ()])
def test_a_line_for_each_kind_of_rank(made: Made, schedule: str, kinds: list[str], gpus: tuple[int, ...]) -> None:
    """With the terms of judge and policy; where rewards need nothing there is the policy's line alone."""
    policy, judge = "activations 12.0 GiB, weights 3.0 GiB", "judge KV cache 16.0 GiB, judge weights 15.0 GiB"
    expected = {
        "a policy rank": f"15.0 GiB: {policy}",
        "a reward rank": f"31.0 GiB: {judge}",
        "a policy and reward rank": f"46.0 GiB: {judge}, {policy}",
    }
    lines = str(made(schedule, Judge("first"), gpus=gpus)).splitlines()
    assert lines == [f"{kind} needs about {expected[kind]}" for kind in kinds]
    rule = Brightness()
    assert str(made(schedule, rule, gpus=gpus)) == f"a policy rank needs about {expected['a policy rank']}"


def test_the_grants(made: Made) -> None:
    """A reward rank's caches take what is left of its GPU's share beside weights and policy, or what they can use."""
    first, second = Judge("first"), Judge("second", 10, 2, 17)
    assert made("async-reward", first, second).grants(1) == {"first": 16 * GIB, "second": 17 * GIB}
    assert made("colocated", first, second, gpus=()).grants(1) == {"first": 16 * GIB, "second": 17 * GIB}
    tight = made("async-reward", first, second, gpus=(80, 40))
    rest = (int(SHARE * 40 * GIB) - 28 * GIB) // 2
    assert tight.grants(1) == {"first": GIB + rest, "second": 2 * GIB + rest}
    shared = made("stagebreaker", first, second, gpus=(80, 55))
    rest = (int(SHARE * 55 * GIB) - (28 + 15) * GIB) // 2
    assert shared.grants(1) == {"first": GIB + rest, "second": 2 * GIB + rest}
    assert f"judge KV cache {sum(shared.grants(1).values()) / GIB:.1f} GiB" in str(shared)


def test_judges_that_do_not_fit(made: Made) -> None:
    """One that no GPU could hold is to be served; several, or one beside the policy, have to be made smaller."""
    with pytest.raises(
        ConfigError,
        match=r"^--reward: cuda:1 has 16\.0 GiB, 92% of which can be given out, and large alone needs at least "
        r"16\.0 GiB: judge weights 15\.0 GiB, judge KV cache 1\.0 GiB; a judge over several GPUs is not supported yet: "
        r"serve it yourself \(vllm serve --tensor-parallel-size N\) and give its url, or for less judge weights, ",
    ):
        made("async-reward", Judge("small", 1), Judge("large"), gpus=(80, 16)).check()
    with pytest.raises(ConfigError, match=r"^--reward: cuda:1 .*, and a reward rank needs at least 32\.0 GiB") as both:
        made("async-reward", Judge("first"), Judge("second"), gpus=(80, 32)).check()
    assert "merged-replay" not in str(both.value) and "lower the judge's frames, turns, max-tokens" in str(both.value)
    enough = 16 / SHARE + 0.0001
    made("async-reward", Judge("first"), gpus=(80, enough)).check()
    with pytest.raises(
        ConfigError,
        match=r"a policy and reward rank needs at least 31\.0 GiB: .*; or choose --schedule merged-replay, whose",
    ):
        made("stagebreaker", Judge("first"), gpus=(80, enough)).check()
    with pytest.raises(ConfigError, match=r"^--device: cuda:0 has 14\.0 GiB, and a policy rank needs about 15\.0 GiB"):
        made("async-reward", Judge("first"), gpus=(14, 80)).check()


def test_a_folder_that_does_not_tell_ends_the_command(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything starts, on a CPU too."""
    save_tiny_judge(tmp_path / "judge")
    (tmp_path / "judge" / "model.safetensors").unlink()
    (tmp_path / "prompts.txt").write_text("a red square moving left\n")
    reward = f"--reward=unified-reward-2@{tmp_path / 'judge'}"
    options = [f"--model={tiny_model}", f"--prompts={tmp_path / 'prompts.txt'}", reward, "--device=cpu"]
    assert run(dancegrpo, [*options, "--dry-run"]) == 2
    assert f"Error: --reward unified-reward-2: model: {tmp_path / 'judge'} does not tell" in capsys.readouterr().err


def test_a_rank_loads_its_judges_first_each_with_its_grant(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a server of its own finds the GPU empty, and takes of it what it was told."""
    judges = [Judge("first"), Judge("second", most=4)]
    granted = made("colocated", *judges)
    loaded: list[object] = []
    monkeypatch.setattr(command, "JudgeEngine", lambda rewards, device: loaded.append((list(rewards), device)))
    monkeypatch.setattr(command, "PolicyEngine", lambda job: loaded.append(job.device))
    monkeypatch.setattr(launch, "run_rank", lambda place, build_engine, *_: build_engine())
    command.be_rank(Prepared(granted._run, granted._settings, granted, None, []), launch.Rank(1, 2))
    assert loaded == [(judges, "cuda:1"), "cuda:1"]
    assert [judge.cache_bytes for judge in judges] == [16 * GIB, 4 * GIB]


@pytest.mark.parametrize("name", NAMES)
def test_judges_rest_where_all_is_judged_before_any_training(
    name: Name, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is so in a colocated run; elsewhere they would be woken between two judgements."""
    granted = made(name, Judge("first"), gpus=(200, 200))
    rest: list[bool] = []
    monkeypatch.setattr(command, "JudgeEngine", lambda rewards, device: None)
    monkeypatch.setattr(command, "PolicyEngine", lambda job: None)
    monkeypatch.setattr(command, "RankEngine", lambda policy, judge, judges_rest: rest.append(judges_rest))
    monkeypatch.setattr(launch, "run_rank", lambda place, build_engine, *_: build_engine())
    command.be_rank(Prepared(granted._run, granted._settings, granted, None, []), launch.Rank(1, 2))
    assert rest == [name == "colocated"]
