"""With durations that fit the StageBreaker paper's Figure 16, our baselines take what the paper says they take."""

from collections.abc import Sequence

import pytest

from algorithms.step import step_graph
from asyncflow.core.graph import Kind, Task
from asyncflow.core.schedules import Name, cluster, schedule
from asyncflow.core.simulate import simulate
from engines.rewards.registry import parse_rewards

SWITCH = 120.0  # colocated ranks switch the judge in and out, once a step


class PaperDurations:
    """DanceGRPO with VR-Thinker on 4 + 2 GPUs, in thousandths of the paper's AsyncReward step."""

    def run(self, tasks: Sequence[Task], rank: int) -> float:
        if tasks[0].kind is Kind.SCORE:
            return 100.0 + 9.0 * len(tasks)
        return {Kind.ROLLOUT: 29.0, Kind.DECODE: 12.5, Kind.FORWARD: 15.0, Kind.REPLAY: 73.3}.get(tasks[0].kind, 0.0)

    def move(self, tensor: str, source: int, target: int) -> float:
        return 0.0


@pytest.mark.parametrize(("name", "reward_ranks", "switch", "paper"), [
    ("colocated", 0, SWITCH, 780.0),
    ("async-reward", 2, 0.0, 1000.0),
])  # fmt: skip
def test_baselines_take_what_the_paper_measured(name: Name, reward_ranks: int, switch: float, paper: float) -> None:
    """24 candidates in 2 mini-batches on 6 GPUs, with both replays: within 3 % of the paper's bars."""
    dataflow = step_graph(2, 12, mini_batches=2, task_batch=1, rewards=parse_rewards(["colour"]))
    graph, plan = schedule(name, dataflow, cluster(name, 6, reward_ranks), forward_replays=True, judge_batch=12)
    assert simulate(graph, plan, PaperDurations()).seconds + switch == pytest.approx(paper, rel=0.03)
