"""The StageBreaker paper's own load, to emulate and to simulate: DanceGRPO with VR-Thinker on six GPUs.

The paper prints no times of tasks. These were derived from the proportions in its sections 5.2 and 5.5; 1000 units are
one step of its AsyncReward. They give its Figure 16 within 3 %.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from algorithms.step import step_graph
from asyncflow.core.bounds import best_bound
from asyncflow.core.catch_up import variants
from asyncflow.core.graph import Graph, Kind, Task
from asyncflow.core.plan import Cluster, Plan
from asyncflow.core.schedules import Name, cluster, schedule
from asyncflow.core.search import search
from asyncflow.core.simulate import simulate
from asyncflow.core.trace import Trace
from engines.rewards.registry import WeightedReward
from engines.rewards.toy import Colour

RANKS = 6
JUDGE_BATCH = 12
SWITCH = 120.0
"""Units in which colocated ranks switch the judge in and out, once a step."""

UNITS = {Kind.ROLLOUT: 29.0, Kind.DECODE: 12.5, Kind.FORWARD: 15.0, Kind.REPLAY: 73.3}
"""Units of each task of one candidate."""


class Durations:
    """The load's durations in units of `unit` seconds; `switch` and `transfer` are units too.

    A judge batch of b videos takes 100 + 9 b, and `switch` on top unless it is apart: a colocated rank judges one batch
    a step.
    """

    def __init__(self, *, unit: float = 1.0, switch: float = 0.0, transfer: float = 0.0) -> None:
        self.unit, self.switch, self.transfer = unit, switch, transfer

    def run(self, tasks: Sequence[Task], rank: int) -> float:
        """See `asyncflow.core.cost.Durations`."""
        kind = tasks[0].kind
        if kind is not Kind.SCORE:
            return UNITS.get(kind, 0.0) * self.unit
        switch = 0.0 if tasks[0].apart else self.switch
        return (100.0 + 9.0 * len(tasks) + switch) * self.unit

    def move(self, tensor: str, source: int, target: int) -> float:
        """See `asyncflow.core.cost.Durations`."""
        return self.transfer * self.unit


@dataclass(frozen=True, slots=True)
class Load:
    """One step of the paper's load under a schedule."""

    name: Name
    graph: Graph
    plan: Plan
    ranks: Cluster

    def durations(self, unit: float = 1.0) -> Durations:
        """What its tasks take, in units of `unit` seconds."""
        return Durations(unit=unit, switch=SWITCH if self.name == "colocated" else 0.0)

    def following(self, plan: Plan) -> "Load":
        """With a plan that `searched` found before, and the variant of the graph that it is of."""
        (graph,) = (variant for variant in variants(self.graph, self.ranks) if plan.fits(variant, self.ranks))
        return replace(self, graph=graph, plan=plan)

    def searched(self) -> "Load":
        """With the plan that `search` finds for stagebreaker, which takes seconds; other schedules have theirs."""
        if self.name != "stagebreaker":
            return self
        found = search(self.graph, self.plan, self.ranks, self.durations())
        return replace(self, graph=found.graph, plan=found.plan)

    def bound(self) -> float:
        """Units below which no plan of this graph can get."""
        return best_bound(self.graph, self.ranks, self.durations(), judge_batch=JUDGE_BATCH).seconds

    def simulated(self) -> Trace:
        """The step in units, transfers and updates free as in the paper's proportions."""
        return simulate(self.graph, self.plan, self.durations())


class Judge(Colour):
    """One of several judges, each as slow as the paper's; what it would say does not matter."""

    def __init__(self, number: int, *, apart: bool) -> None:
        self.name = f"number {number}"
        self.apart = apart


def load(
    name: Name,
    *,
    candidates: int = 24,
    mini_batches: int = 2,
    reward_ranks: int = 2,
    judges: int = 1,
    apart: bool = False,
) -> Load:
    """A step of `candidates` in as many groups as mini-batches, on 6 ranks; both baselines replay twice, as there.

    Each of `judges` scores all candidates, `apart` or on the devices of the reward ranks.
    """
    groups = mini_batches
    rewards = [WeightedReward(Judge(number, apart=apart), 1.0) for number in range(judges)]
    dataflow = step_graph(groups, candidates // groups, mini_batches=mini_batches, task_batch=1, rewards=rewards)
    ranks = cluster(name, RANKS, 0 if name == "colocated" else reward_ranks)
    return Load(name, *schedule(name, dataflow, ranks, forward_replays=True, judge_batch=JUDGE_BATCH), ranks)
