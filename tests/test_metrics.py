"""What a step reports, and the one thing it refuses: ranks whose weights differ."""

import math

import pytest
import torch

from algorithms.algorithm import GroupAdvantages, Loss
from algorithms.metrics import evaluation_metrics, quality, step_metrics, timing_metrics
from algorithms.program import StepReport
from algorithms.step import evaluation_graph, step_graph
from asyncflow.controller import StepResult
from asyncflow.core.catch_up import variants
from asyncflow.core.graph import DEVICE
from asyncflow.core.schedules import cluster
from asyncflow.core.trace import Span, Trace
from asyncflow.engine import Invalid
from asyncflow.errors import TrainingError
from engines.rewards.registry import WeightedReward
from engines.rewards.testing import Blind, Brightness, BrightnessDuel
from engines.rewards.toy import ColourDuel

REWARDS = [WeightedReward(Brightness(), 1.0), WeightedReward(Blind(), 0.5)]
NAN = math.nan


def group(*rows: tuple[float, float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def report(**changes: object) -> StepReport:
    values: dict[str, object] = {
        "rewards": {0: group((1.0, 2.0), (3.0, 0.0), (2.0, NAN)), 1: group((1.0, 1.0), (1.0, 1.0), (NAN, NAN))},
        "advantages": {
            0: GroupAdvantages(group((1.0, 1.0), (-1.0, 3.0), (9.0, 9.0)), torch.tensor([True, True, False])),
            1: GroupAdvantages(group((0.0, 0.0), (0.0, 0.0), (0.0, 0.0)), torch.tensor([False, False, False])),
        },
        "losses": [Loss(torch.zeros(()), {"actor/loss": 1.0}), Loss(torch.zeros(()), {"actor/loss": 2.0})],
        "start_deviation": 0.0,
    }
    return StepReport(**(values | changes))


def update(sha: str = "a" * 64, norm: float = 1.0) -> dict[str, object]:
    return {"grad_norm": norm, "lr": 1e-3, "skipped": 0, "sha256": sha}


def made(values: dict[str, object], of: StepReport | None = None, mini_batches: int = 1) -> dict[str, object]:
    graph = step_graph(2, 2, mini_batches=mini_batches, task_batch=2, rewards=REWARDS)
    return step_metrics(StepResult(Trace(), values, []), graph, of or report(), REWARDS)


def test_rewards_are_weighted_sums_of_the_valid():
    """Candidates with an invalid reward are counted and left out; a group without differences is noticed."""
    metrics = made({"update/0": {0: update()}})
    assert metrics["critic/invalid"] == 2
    assert metrics["critic/rewards/mean"] == pytest.approx((2.0 + 3.0 + 1.5 + 1.5) / 4)
    assert (metrics["critic/rewards/max"], metrics["critic/rewards/min"]) == (3.0, 1.5)
    assert metrics["critic/rewards/zero_std_ratio"] == 0.5
    assert metrics["critic/reward/brightness/mean"] == 1.5
    assert metrics["critic/reward/blind/mean"] == 1.0


def test_equal_rewards_count_as_equal_whatever_their_rounding():
    """Three times 0.7 has a deviation of 1e-16 by rounding alone."""
    equal = {0: group(*[(0.7, 0.0)] * 3)}
    assert made({"update/0": {0: update()}}, report(rewards=equal))["critic/rewards/zero_std_ratio"] == 1.0


def test_advantages_of_the_kept():
    metrics = made({"update/0": {0: update()}})
    assert metrics["critic/kept"] == 2
    assert metrics["critic/advantages/abs_mean"] == 1.5


def test_losses_are_averaged_over_mini_batches():
    values = {"update/0": {0: update("a" * 64, 3.0)}, "update/1": {0: update("b" * 64, 2.0)}}
    metrics = made(values, mini_batches=2)
    assert metrics["actor/loss"] == 1.5
    assert metrics["actor/grad_norm"] == 3.0
    assert metrics["actor/ratio_start_deviation"] == 0.0
    assert metrics["weights/sha256"] == "b" * 64


def test_a_step_without_a_valid_reward_still_reports():
    """Nothing is averaged over nothing."""
    nobody = GroupAdvantages(torch.zeros(2, 2), torch.zeros(2, dtype=torch.bool))
    empty = report(rewards={0: group((NAN, 1.0), (NAN, 1.0))}, advantages={0: nobody}, losses=[])
    metrics = made({"update/0": {0: update()}}, empty)
    assert (metrics["critic/invalid"], metrics["critic/kept"]) == (2, 0)
    assert "critic/rewards/mean" not in metrics
    assert all(math.isfinite(value) for value in metrics.values() if isinstance(value, float))


def test_ranks_with_different_weights_end_the_run():
    """The error names the update and each rank's hash, even if a later update made them equal again."""
    values = {"update/0": {0: update("a" * 64), 1: update("b" * 64)}, "update/1": {0: update(), 1: update()}}
    with pytest.raises(TrainingError, match="after update/0 .* rank 0 aaaaaaaaaaaa, rank 1 bbbbbbbbbbbb$"):
        made(values, mini_batches=2)
    assert made({"update/0": {0: update(), 1: update()}})["weights/sha256"] == "a" * 64


def test_a_rank_that_catches_up_to_different_weights_ends_the_run():
    """Each is compared with the update that it caught up with."""
    dataflow = step_graph(2, 2, mini_batches=2, task_batch=2, rewards=REWARDS)
    _, graph = variants(dataflow, cluster("stagebreaker", 2, 1))
    values = {"update/0": {0: update("a" * 64)}, "update/1": {0: update("b" * 64)}}
    good = values | {"catch-up/0/1": update("a" * 64), "catch-up/1/1": update("b" * 64)}
    assert step_metrics(StepResult(Trace(), good, [], {}), graph, report(), REWARDS)["weights/sha256"] == "b" * 64
    wrong = good | {"catch-up/1/1": update("a" * 64)}
    with pytest.raises(TrainingError, match="after update/1 .* rank 0 bbbbbbbbbbbb, rank 1 aaaaaaaaaaaa$"):
        step_metrics(StepResult(Trace(), wrong, [], {}), graph, report(), REWARDS)


def test_times_by_kind_and_busy_shares():
    """Seconds of each kind over all ranks; the busy share of each rank's device, and of a judge that is apart."""
    graph = step_graph(1, 2, mini_batches=1, task_batch=2, rewards=REWARDS[:1])
    trace = Trace()
    trace.spans += [
        Span(0, DEVICE, "rollout", ("rollout/0/0",), 0.0, 3.0, 1),
        Span(1, DEVICE, "replay", ("replay/0/0",), 3.0, 4.0, 2),
        Span(1, "judge brightness", "score", ("score/brightness/0/0",), 2.0, 4.0, 3),
    ]
    trace.seconds = 4.0
    metrics = timing_metrics(trace, graph)
    assert metrics["timing_s/step"] == 4.0
    assert [metrics[f"timing_s/{kind}"] for kind in ("rollout", "replay", "score")] == [3.0, 1.0, 2.0]
    assert {name: share for name, share in metrics.items() if "/busy" in name} == {
        "rank/0/busy": 0.75, "rank/1/busy": 0.25, "rank/1/busy/judge_brightness": 0.5,
    }  # fmt: skip


def test_an_evaluation_averages_who_was_judged_by_all():
    """Weighted sums over the videos with every score; the others are left out and seen in `val/judged`."""
    values = {
        "score/brightness/0/0": 1.0, "score/blind/0/0": 2.0,
        "score/brightness/0/1": 3.0, "score/blind/0/1": 2.0,
        "score/brightness/0/2": 9.0, "score/blind/0/2": Invalid("it moves left"),
        "rollout/0/0": [[0.0]],
    }  # fmt: skip
    graph = evaluation_graph(3, 0, task_batch=3, rewards=REWARDS)
    metrics = evaluation_metrics(StepResult(Trace(), values, []), graph, REWARDS)
    assert metrics["val/judged"] == 2
    assert metrics["val/judge/blind/invalid/other"] == 1
    assert metrics["val/rewards/mean"] == 3.0
    assert metrics["val/rewards/std"] == 1.0
    assert metrics["val/reward/brightness/mean"] == 2.0
    nothing = evaluation_metrics(StepResult(Trace(), {"score/blind/0/2": Invalid("dark")}, []), graph, REWARDS)
    assert nothing["val/judged"] == 0
    assert not {name for name in nothing if name.startswith(("val/reward", "val/win"))}


def compared(outcomes: dict[str, dict[str, object]], rewards: list[WeightedReward]) -> dict[str, object]:
    """The metrics of an evaluation of two samples, from outcomes by reward and pair; the base's are 2 and 3."""
    values = {f"compare/{judge}/0/{pair}": made for judge, pairs in outcomes.items() for pair, made in pairs.items()}
    graph = evaluation_graph(2, 0, task_batch=2, rewards=rewards)
    return evaluation_metrics(StepResult(Trace(), values, []), graph, rewards)


def test_win_rates_against_the_base_model():
    """Points of the trained policy over valid comparisons, whoever is shown first, a tie half a point; weighted."""
    rewards = [WeightedReward(BrightnessDuel(), 3.0), WeightedReward(ColourDuel(), 1.0)]
    first = {"0-2": 1.0, "2-0": 0.5, "1-3": Invalid("timeout: late"), "3-1": 0.0}
    metrics = compared({"brightness-duel": first, "colour-duel": {"0-2": 0.0, "3-1": 1.0}}, rewards)
    assert metrics["val/win_rate/brightness-duel"] == pytest.approx(2.5 / 3)
    assert metrics["val/win_rate/colour-duel"] == 0.0
    assert metrics["val/win_rates/mean"] == pytest.approx(3 / 4 * 2.5 / 3)
    assert metrics["val/judge/brightness-duel/valid"] == 3
    assert metrics["val/judge/brightness-duel/invalid/timeout"] == 1
    assert metrics["val/judge/brightness-duel/tie_rate"] == pytest.approx(1 / 3)
    assert "val/judged" not in metrics
    broken = compared({"brightness-duel": first, "colour-duel": {"0-2": Invalid("dark")}}, rewards)
    assert "val/win_rate/colour-duel" not in broken and "val/win_rates/mean" not in broken


def test_a_preference_for_what_is_shown_first_cancels():
    """Of two equal policies a judge who always takes the first says one half."""
    first = {pair: 1.0 for pair in ("0-2", "2-0", "1-3", "3-1")}
    metrics = compared({"brightness-duel": first}, [WeightedReward(BrightnessDuel(), 0.0)])
    assert metrics["val/win_rate/brightness-duel"] == 0.5
    assert metrics["val/judge/brightness-duel/first_shown_wins_rate"] == 1.0
    assert "val/win_rates/mean" not in metrics, "a reward without weight has no part in it"


def test_what_says_which_weights_are_best():
    """The score, unless nothing that scores has a weight; then how often the base model is beaten."""
    duel = WeightedReward(BrightnessDuel(), 1.0)
    assert quality([*REWARDS, duel]) == "val/rewards/mean"
    assert quality([WeightedReward(Brightness(), 0.0), duel]) == quality([duel]) == "val/win_rates/mean"
