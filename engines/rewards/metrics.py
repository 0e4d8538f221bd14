"""How a step's judges did: what failed and why, ties, whether the first one shown wins, and what judging took.

Pure; the algorithms' metrics call it with the values of a step or of an evaluation. Means and rates are over what
could be judged.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from msgspec import convert

from asyncflow.core.graph import JUDGE_KINDS, Graph
from asyncflow.engine import Invalid
from engines.rewards.base import Effort, PairwiseReward
from engines.rewards.protocols.base import ReasonClass
from engines.rewards.registry import WeightedReward

OTHER = "other"
"""The class of reasons that rewards give in words of their own."""


def judge_metrics(values: Mapping[str, Any], graph: Graph, rewards: Sequence[WeightedReward]) -> dict[str, float]:
    """Metrics `judge/<reward>/...` from the outcomes of a graph's judge tasks, and their `effort/<task>` if given."""
    metrics: dict[str, float] = {}
    for weighted in rewards:
        tasks = _tasks(graph, weighted.name)
        outcomes = outcomes_of(values, graph, weighted.name)
        efforts = [convert(values[f"effort/{task}"], Effort) for task in tasks if f"effort/{task}" in values]
        made = _of_outcomes(outcomes, paired=isinstance(weighted.reward, PairwiseReward)) | _of_efforts(efforts)
        metrics |= {f"judge/{weighted.name}/{name}": value for name, value in made.items()}
    return metrics


def outcomes_of(values: Mapping[str, Any], graph: Graph, reward: str) -> list[Any]:
    """What became of a reward's judgements, those that were not needed aside: numbers, and Invalid with a reason."""
    return [values[task] for task in _tasks(graph, reward) if task in values]


def _tasks(graph: Graph, reward: str) -> list[str]:
    return [task.id for task in graph.of(*JUDGE_KINDS) if task.judge == reward]


def reason_class(reason: str) -> str:
    """What a reason counts as."""
    found, colon, _ = reason.partition(":")
    return found if colon and found in get_args(ReasonClass) else OTHER


def _of_outcomes(outcomes: Sequence[Any], *, paired: bool) -> dict[str, float]:
    """For pairs also how many were ties, and how many of the others the first one shown won.

    That is half of them for a fair judge who sees everyone first as often as second.
    """
    points = [outcome for outcome in outcomes if not isinstance(outcome, Invalid)]
    failed = Counter(reason_class(outcome.reason) for outcome in outcomes if isinstance(outcome, Invalid))
    made: dict[str, float] = {"valid": len(points), **{f"invalid/{name}": n for name, n in sorted(failed.items())}}
    if paired and points:
        decided = [p for p in points if p != 0.5]
        made["tie_rate"] = 1 - len(decided) / len(points)
        if decided:
            made["first_shown_wins_rate"] = sum(p > 0.5 for p in decided) / len(decided)
    return made


def _of_efforts(efforts: Sequence[Effort]) -> dict[str, float]:
    if not efforts:
        return {}
    seconds = sorted(effort.seconds for effort in efforts)
    return {
        "seconds/median": statistics.median(seconds),
        "seconds/p95": seconds[int(0.95 * (len(seconds) - 1))],
        "tokens/mean": statistics.fmean(effort.tokens for effort in efforts),
        "turns/mean": statistics.fmean(effort.turns for effort in efforts),
    }
