"""The numbers of a step, under the names of verl-omni where it has one, so that curves can be compared.

Called by the training loop, once a step.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from algorithms.algorithm import enough_valid, valid_candidates
from algorithms.program import StepReport
from asyncflow.controller import StepResult
from asyncflow.core.catch_up import rank_of
from asyncflow.core.graph import DEVICE, Graph, Kind
from asyncflow.core.plan import CONTROLLER
from asyncflow.core.trace import TRANSFER, Trace, busy_share, waited_for
from asyncflow.engine import Invalid
from asyncflow.errors import TrainingError
from engines.rewards.base import PairwiseReward, PointwiseReward
from engines.rewards.metrics import judge_metrics
from engines.rewards.registry import WeightedReward

Metrics = dict[str, float | int | str]


def step_metrics(result: StepResult, graph: Graph, report: StepReport, rewards: Sequence[WeightedReward]) -> Metrics:
    """All metrics of an RL step. Raises TrainingError if the ranks' weights differ."""
    return {
        **_reward_metrics(report, rewards),
        **judge_metrics(result.values, graph, rewards),
        **_actor_metrics(report),
        **_update_metrics(result, graph),
        **timing_metrics(result.trace, graph),
        **{f"rank/{rank}/lag_s": lag for rank, lag in sorted(result.lags.items())},
    }


def _reward_metrics(report: StepReport, rewards: Sequence[WeightedReward]) -> Metrics:
    """Rewards are weighted sums; candidates with an invalid one of those that count are counted and left out."""
    weights = torch.tensor([reward.weight for reward in rewards], dtype=torch.float64)
    every_group = [values for _, values in sorted(report.rewards.items())]
    valid = [valid_candidates(values[:, weights > 0]) for values in every_group]
    groups = [values[mask] for values, mask in zip(every_group, valid, strict=True)]
    totals = [group[:, weights > 0] @ weights[weights > 0] for group in groups if len(group)]
    metrics: Metrics = {
        "critic/invalid": sum(int((~mask).sum()) for mask in valid),
        "critic/dropped_groups": sum(not enough_valid(mask) for mask in valid),
    }
    if totals:
        every = torch.cat(totals)
        flat = sum(len(total) > 1 and bool(total.max() == total.min()) for total in totals)
        metrics |= {
            "critic/rewards/mean": every.mean().item(),
            "critic/rewards/max": every.max().item(),
            "critic/rewards/min": every.min().item(),
            "critic/rewards/zero_std_ratio": flat / len(totals),
        }
        for place, reward in enumerate(rewards):
            column = torch.cat(groups)[:, place]
            metrics[f"critic/reward/{reward.name}/mean"] = column[column.isfinite()].mean().item()
    kept = [group.advantages[group.kept] for group in report.advantages.values()]
    sizes = [advantages.abs().mean().item() for advantages in kept if len(advantages)]
    metrics["critic/advantages/abs_mean"] = sum(sizes) / len(sizes) if sizes else 0.0
    metrics["critic/kept"] = sum(map(len, kept))
    return metrics


def _actor_metrics(report: StepReport) -> Metrics:
    """The loss's own metrics, as the mean over mini-batches that trained something."""
    collected: dict[str, list[float]] = defaultdict(list)
    for loss in report.losses:
        for name, value in loss.metrics.items():
            collected[name].append(value)
    means: Metrics = {name: sum(values) / len(values) for name, values in collected.items()}
    return {
        **means,
        "actor/ratio_start_deviation": report.start_deviation,
        "actor/not_finite": report.not_finite,
    }


def _update_metrics(result: StepResult, graph: Graph) -> Metrics:
    late = graph.of(Kind.CATCH_UP)
    for task in graph.of(Kind.UPDATE):
        values = dict(result.values[task.id])
        values |= {rank_of(other): result.values[other.id] for other in late if other.mini_batch == task.mini_batch}
        hashes = {rank: value["sha256"] for rank, value in sorted(values.items())}
        if len(set(hashes.values())) > 1:
            raise TrainingError(
                f"after {task.id} the policy ranks have different weights: "
                + ", ".join(f"rank {rank} {value[:12]}" for rank, value in hashes.items())
            )
    updates = [next(iter(result.values[task.id].values())) for task in graph.of(Kind.UPDATE)]
    return {
        "actor/grad_norm": max(update["grad_norm"] for update in updates),
        "actor/lr": updates[-1]["lr"],
        "actor/skipped": updates[-1]["skipped"],
        "weights/sha256": updates[-1]["sha256"],
    }


def timing_metrics(trace: Trace, graph: Graph) -> Metrics:
    """Seconds of the step and, over all ranks, of each kind of task; each device's busy share and what it waited for.

    The busy share of a judge that is apart stands beside that of its rank's device.
    """
    kinds: dict[str, float] = defaultdict(float)
    for span in trace.spans:
        if span.lane != TRANSFER and span.rank != CONTROLLER:
            kinds[f"timing_s/{span.name}"] += span.end - span.start
    metrics: Metrics = {"timing_s/step": trace.seconds, **kinds}
    for rank in sorted({span.rank for span in trace.spans} - {CONTROLLER}):
        metrics[f"rank/{rank}/busy"] = busy_share(trace, rank)
        for reason, seconds in sorted(waited_for(trace, graph, rank).items()):
            metrics[f"rank/{rank}/waited_s/{reason.replace(' ', '_')}"] = seconds
    for rank, lane in trace.lanes():
        if lane != DEVICE:
            metrics[f"rank/{rank}/busy/{lane.replace(' ', '_')}"] = busy_share(trace, rank, lane)
    return metrics


def evaluation_metrics(result: StepResult, graph: Graph, rewards: Sequence[WeightedReward]) -> Metrics:
    """How good the videos of an evaluation are, by those rewards that score and by those that compare."""
    pairwise = [reward for reward in rewards if isinstance(reward.reward, PairwiseReward)]
    judges = judge_metrics(result.values, graph, rewards)
    return {
        **_scores(result.values, graph, [reward for reward in rewards if reward not in pairwise]),
        **_win_rates(result.values, graph, pairwise),
        **{f"val/{name}": value for name, value in judges.items()},
        "timing_s/evaluation": result.trace.seconds,
    }


def quality(rewards: Sequence[WeightedReward]) -> str:
    """The metric of an evaluation that says which weights are best.

    That is the weighted score and, where no reward that scores has a weight, the weighted win rate.
    """
    scored = any(reward.weight for reward in rewards if isinstance(reward.reward, PointwiseReward))
    return "val/rewards/mean" if scored else "val/win_rates/mean"


def _scores(values: Mapping[str, Any], graph: Graph, rewards: Sequence[WeightedReward]) -> Metrics:
    """Mean and deviation of the weighted reward over the videos that all could judge, and each reward's mean."""
    if not rewards:
        return {}
    scores: dict[int, dict[str, float]] = defaultdict(dict)
    for task in graph.of(Kind.SCORE):
        if task.id in values and not isinstance(values[task.id], Invalid):
            (candidate,) = task.candidates
            scores[candidate][task.judge] = values[task.id]
    judged = [videos for videos in scores.values() if len(videos) == len(rewards)]
    if not judged:
        return {"val/judged": 0}
    totals = torch.tensor([[v[r.name] * r.weight for r in rewards] for v in judged], dtype=torch.float64).sum(dim=1)
    return {
        "val/rewards/mean": totals.mean().item(),
        "val/rewards/std": totals.std(unbiased=False).item(),
        **{f"val/reward/{r.name}/mean": sum(v[r.name] for v in judged) / len(judged) for r in rewards},
        "val/judged": len(judged),
    }


def _win_rates(values: Mapping[str, Any], graph: Graph, rewards: Sequence[WeightedReward]) -> Metrics:
    """Each reward's points for the trained policy against the base model, over valid comparisons; a weighted mean.

    The mean is there once each reward that has a weight could judge, so that those of two evaluations compare.
    """
    rates: dict[str, float] = {}
    for reward in rewards:
        tasks = [task for task in graph.of(Kind.COMPARE) if task.judge == reward.name]
        points = [
            values[task.id] if task.candidates[0] < task.candidates[1] else 1.0 - values[task.id]
            for task in tasks
            if task.id in values and not isinstance(values[task.id], Invalid)
        ]
        if points:
            rates[reward.name] = sum(points) / len(points)
    metrics: Metrics = {f"val/win_rate/{name}": rate for name, rate in rates.items()}
    counted = [reward for reward in rewards if reward.weight]
    if counted and all(reward.name in rates for reward in counted):
        total = sum(reward.weight for reward in counted)
        metrics["val/win_rates/mean"] = sum(reward.weight * rates[reward.name] for reward in counted) / total
    return metrics
