"""The numbers of a step's judges, from the outcomes as the controller has them."""

import msgspec
import pytest

from asyncflow.core.graph import Graph, Kind, Task
from asyncflow.engine import Invalid
from engines.rewards.base import Effort
from engines.rewards.metrics import judge_metrics, reason_class
from engines.rewards.registry import WeightedReward
from engines.rewards.testing import Brightness, BrightnessDuel


def compared(number: int) -> Task:
    return Task(f"compare/brightness-duel/0/{number}", Kind.COMPARE, judge="brightness-duel")


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("timeout: no verdict", "timeout"), ("parse: a: b", "parse"), ("it moves left", "other"), ("Note: x", "other"),
     ("parse", "other")],
)  # fmt: skip
def test_reasons_by_class(reason, expected):
    assert reason_class(reason) == expected


def test_metrics_of_comparisons():
    """Rates are of valid outcomes; first-shown-wins of those that are no ties; what never ran counts nowhere."""
    tasks = [compared(number) for number in range(8)]
    outcomes = [1.0, 0.9, 0.5, 0.2, Invalid("parse: hm"), Invalid("parse: no"), Invalid("timeout: late")]
    values = {task.id: outcome for task, outcome in zip(tasks, outcomes, strict=False)}
    for place, task in enumerate(tasks[:5]):
        values[f"effort/{task.id}"] = msgspec.to_builtins(Effort(seconds=place, tokens=10 * place, turns=1 + place % 2))
    rewards = [WeightedReward(BrightnessDuel(), 1.0), WeightedReward(Brightness(), 1.0)]
    assert judge_metrics(values, Graph(tasks), rewards) == pytest.approx(
        {
            "judge/brightness-duel/valid": 4,
            "judge/brightness-duel/invalid/parse": 2,
            "judge/brightness-duel/invalid/timeout": 1,
            "judge/brightness-duel/tie_rate": 0.25,
            "judge/brightness-duel/first_shown_wins_rate": 2 / 3,
            "judge/brightness-duel/seconds/median": 2,
            "judge/brightness-duel/seconds/p95": 3,
            "judge/brightness-duel/tokens/mean": 20,
            "judge/brightness-duel/turns/mean": 1.4,
            "judge/brightness/valid": 0,
        }
    )


def test_a_score_of_one_half_is_no_tie():
    tasks = [Task("score/brightness/0/0", Kind.SCORE, judge="brightness")]
    made = judge_metrics({tasks[0].id: 0.5}, Graph(tasks), [WeightedReward(Brightness(), 1.0)])
    assert made == {"judge/brightness/valid": 1}
