"""The search finds the best split, beside the steps, and again only when costs have drifted."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from algorithms.planning import Planner
from algorithms.train import Progress
from asyncflow.core.cost import CostTable
from asyncflow.core.graph import Graph, Kind, Task
from asyncflow.core.plan import Cluster, Plan
from asyncflow.core.schedules import cluster, schedule
from asyncflow.core.search import search, split
from asyncflow.core.simulate import simulate
from asyncflow.testing import rl_step


class Slow:
    """A judge so slow to start that it should decode and train meanwhile; `factor` makes everything slower."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def run(self, tasks: Sequence[Task], rank: int) -> float:
        seconds = {Kind.ROLLOUT: 3.0, Kind.DECODE: 2.0, Kind.REPLAY: 7.0, Kind.SCORE: 4.0 + 0.5 * len(tasks)}
        return self.factor * seconds.get(tasks[0].kind, 0.0)

    def move(self, tensor: str, source: int, target: int) -> float:
        return 0.0


def made() -> tuple[Graph, Plan, Cluster]:
    ranks = cluster("stagebreaker", 3, 1)
    return *schedule("stagebreaker", rl_step(groups=4, batches=2, mini_batches=2), ranks, judge_batch=16), ranks


def costs(graph: Graph, plan: Plan, factor: float = 1.0) -> CostTable:
    table = CostTable(keep=1)
    table.observe(simulate(graph, plan, Slow(factor)), graph)
    return table


def test_the_search_is_exhaustive():
    """No split of decodes and replays, with greedy or with patient judges, is better than the plan it returns."""
    graph, plan, ranks = made()
    found, seconds = search(graph, plan, ranks, Slow())
    tried = [
        simulate(graph, split(graph, msgspec.structs.replace(plan, judge_wait=wait), ranks, d, *r), Slow()).seconds
        for wait in (1, 16)
        for d in range(9)
        for r in [(0, 0), *((batches, each) for batches in (1, 2) for each in range(1, 5))]
    ]
    assert seconds == min(tried) == simulate(graph, found, Slow()).seconds
    assert seconds < simulate(graph, plan, Slow()).seconds


def test_each_of_the_last_mini_batches_gives_as_many_replays_away():
    graph, plan, ranks = made()
    moved = split(graph, plan, ranks, 0, 2, 3)
    away = [task.mini_batch for task in graph.of(Kind.REPLAY) if moved.ranks[task.id] != plan.ranks[task.id]]
    assert sorted(away) == [0, 0, 0, 1, 1, 1]
    moved = split(graph, plan, ranks, 0, 1, 3)
    away = [task.mini_batch for task in graph.of(Kind.REPLAY) if moved.ranks[task.id] != plan.ranks[task.id]]
    assert away == [1, 1, 1]


def test_moved_videos_are_judged_where_they_are_decoded():
    graph, plan, ranks = made()
    moved = split(graph, plan, ranks, 5)
    moved.validate(graph, ranks)
    for task in graph.of(Kind.SCORE):
        decode = task.inputs[0].rpartition(".")[0]
        if moved.ranks[decode] != plan.ranks[decode]:
            assert moved.ranks[task.id] == moved.ranks[decode]


def test_a_planner_searches_once_costs_are_known_and_again_when_they_drift():
    graph, plan, ranks = made()
    best, _ = search(graph, plan, ranks, costs(graph, plan).estimates())

    async def main() -> None:
        planner = Planner(graph, plan, ranks, searches=True, fixed=False)
        await planner.reconsider(costs(graph, plan))
        assert planner.plan == plan, "the search runs beside the next step"
        await planner.close()
        await planner.reconsider(costs(graph, plan, 1.05))
        assert planner.plan == planner.found == best
        assert planner._search is None, "5 % are no drift"
        await planner.reconsider(costs(graph, plan, 1.2))
        assert planner._search is not None
        await planner.close()

    asyncio.run(main())


@pytest.mark.parametrize("resumed", [False, True])
def test_a_fixed_plan_is_found_once_and_survives_a_checkpoint(resumed: bool):
    graph, plan, ranks = made()
    best, _ = search(graph, plan, ranks, Slow())

    async def main() -> None:
        saved = msgspec.convert(msgspec.to_builtins(Progress(plan=best)), Progress).plan if resumed else None
        planner = Planner(graph, plan, ranks, searches=True, fixed=True, found=saved)
        if not resumed:
            await planner.reconsider(costs(graph, plan))
            await planner.close()
        await planner.reconsider(costs(graph, plan, 2.0))
        assert planner.plan == planner.found
        assert planner._search is None
        if resumed:
            assert planner.plan == best

    asyncio.run(main())


def test_a_plan_of_other_ranks_or_tasks_is_not_taken_up():
    graph, plan, ranks = made()
    assert plan.fits(graph, ranks)
    assert not plan.fits(graph, cluster("stagebreaker", 4, 1))
    assert not plan.fits(rl_step(groups=3, batches=2), ranks)
    other = cluster("stagebreaker", 4, 1)
    _, larger = schedule("stagebreaker", rl_step(groups=4, batches=2, mini_batches=2), other)
    assert Planner(graph, plan, ranks, searches=True, fixed=True, found=larger).plan == plan


def test_other_schedules_never_search():
    graph, plan, ranks = made()

    async def main() -> None:
        planner = Planner(graph, plan, ranks, searches=False, fixed=False)
        await planner.reconsider(costs(graph, plan))
        await planner.close()
        assert planner.plan == plan
        assert planner.found is None

    asyncio.run(main())
