"""The search finds the best plan, beside the steps, and again only when costs have drifted."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

from algorithms.planning import Planner, _drifted
from algorithms.step import step_graph
from algorithms.train import Progress
from asyncflow.core.catch_up import adapted, variants
from asyncflow.core.cost import BatchSeconds, CostTable, Estimates, StatedCosts
from asyncflow.core.graph import Graph, Kind, Task
from asyncflow.core.plan import Cluster, Plan
from asyncflow.core.schedules import cluster, schedule
from asyncflow.core.search import FIRST, Choice, _improved, planned, search
from asyncflow.core.simulate import simulate
from asyncflow.testing import rl_step
from engines.rewards.registry import parse_rewards


class Slow:
    """A judge so slow to start that it should decode and train meanwhile; the factors make it, or all, still slower."""

    def __init__(self, factor: float = 1.0, judging: float = 1.0) -> None:
        self.factor, self.judging = factor, judging

    def run(self, tasks: Sequence[Task], rank: int) -> float:
        judging = self.judging * (4.0 + 0.5 * len(tasks))
        seconds = {Kind.ROLLOUT: 3.0, Kind.DECODE: 2.0, Kind.REPLAY: 7.0, Kind.SCORE: judging}
        return self.factor * seconds.get(tasks[0].kind, 0.0)

    def move(self, tensor: str, source: int, target: int) -> float:
        return 0.0


def made() -> tuple[Graph, Plan, Cluster]:
    ranks = cluster("stagebreaker", 3, 1)
    return *schedule("stagebreaker", rl_step(groups=4, batches=2, mini_batches=2), ranks, judge_batch=16), ranks


def with_plans(graph: Graph, plan: Plan, ranks: Cluster) -> list[tuple[Graph, Plan]]:
    """The variants of a graph, each with the plan that the search begins with."""
    return [(variant, adapted(plan, variant, ranks)) for variant in variants(graph, ranks)]


def costs(graph: Graph, plan: Plan, factor: float = 1.0, judging: float = 1.0) -> CostTable:
    table = CostTable(keep=1)
    table.observe(simulate(graph, plan, Slow(factor, judging)), graph)
    return table


@pytest.mark.parametrize(("judging", "catches_up"), [(1.0, False), (3.0, True)])
def test_the_search_is_exhaustive(judging: float, catches_up: bool):
    """No split of decodes and replays, with greedy or with patient judges, is better than the plan it returns, nor is
    the other variant: updates wait for the judge to free its rank unless that takes long."""
    graph, plan, ranks = made()
    durations = Slow(judging=judging)
    found, best, seconds = search(graph, plan, ranks, durations)
    tried = [
        simulate(variant, planned(variant, own, ranks, Choice(16, patient, decodes, *replays)), durations).seconds
        for variant, own in with_plans(graph, plan, ranks)
        for patient in (False, True)
        for decodes in range(9)
        for replays in [(0, 0), *((batches, each) for batches in (1, 2) for each in range(1, 5))]
        if replays == (0, 0) or not variant.catches_up
    ]
    assert min(tried) >= seconds == simulate(found, best, durations).seconds
    assert seconds < simulate(graph, plan, durations).seconds
    assert found.catches_up == catches_up
    best.validate(found, ranks)


def test_a_judge_that_catches_up_is_given_no_replay():
    """Though the step would seem to end sooner: what it replayed would be lost."""
    ranks = cluster("stagebreaker", 2, 1)
    _, (late, own) = with_plans(*schedule("stagebreaker", rl_step(groups=2, batches=2, mini_batches=2), ranks), ranks)
    costs = StatedCosts({"rollout": 1.0, "decode": 0.0, "score": 0.0, "replay": 10.0, "update": 0.0})
    found, seconds = _improved(late, own, ranks, costs)
    found.validate(late, ranks)
    assert simulate(late, planned(late, own, ranks, Choice(8, batches=2, replays=1)), costs).seconds < seconds


def test_of_equal_plans_the_one_that_moves_least_is_found():
    """The schedule's own, where nothing takes any time."""
    graph, plan, ranks = made()
    nothing = StatedCosts(dict.fromkeys(("rollout", "decode", "score", "replay", "update"), 0.0))
    assert search(graph, plan, ranks, nothing) == (graph, plan, 0.0)


def test_the_search_finds_the_size_of_the_judges_batches():
    """The eight videos of the first mini-batch together, since its update waits for them and not for the others."""
    graph, plan, ranks = made()
    score = BatchSeconds(6.0, 0.5)
    costs = StatedCosts({"rollout": 3.0, "decode": 1.0, "score": score, "replay": 5.0, "update": 0.0})
    _, found, _ = search(graph, plan, ranks, costs)
    assert (plan.judge_batch, found.judge_batch, found.judge_wait) == (16, 8, 8)


@pytest.mark.parametrize("first", FIRST)
def test_kinds_that_go_first_leave_the_others_in_order(first: frozenset[Kind]):
    graph, plan, ranks = made()
    order = planned(graph, plan, ranks, Choice(16, first=first)).order
    assert [name for name in order if graph[name].kind not in first] == [
        name for name in plan.order if graph[name].kind not in first
    ]
    assert all(graph[name].kind in first for name in order[: sum(task.kind in first for task in graph)])


def test_each_of_the_last_mini_batches_gives_as_many_replays_away():
    graph, plan, ranks = made()
    moved = planned(graph, plan, ranks, Choice(16, batches=2, replays=3))
    away = [task.mini_batch for task in graph.of(Kind.REPLAY) if moved.ranks[task.id] != plan.ranks[task.id]]
    assert sorted(away) == [0, 0, 0, 1, 1, 1]
    moved = planned(graph, plan, ranks, Choice(16, batches=1, replays=3))
    away = [task.mini_batch for task in graph.of(Kind.REPLAY) if moved.ranks[task.id] != plan.ranks[task.id]]
    assert away == [1, 1, 1]


def with_references() -> tuple[Graph, Plan, Cluster]:
    """Eight candidates of two mini-batches, of which the replays read references and the second has old ones too."""
    dataflow = step_graph(
        2, 4, mini_batches=2, task_batch=1, rewards=parse_rewards(["colour"]), reference=True, recompute_old=True
    )
    ranks = cluster("stagebreaker", 4, 2)
    return *schedule("stagebreaker", dataflow, ranks, judge_batch=4), ranks


@pytest.mark.parametrize("kind", [Kind.REFERENCE, Kind.OLD_LOG_PROB])
def test_what_a_moved_replay_needs_goes_with_it_first(kind: Kind):
    """To the very rank; those that move beyond that are the first of the others."""
    graph, plan, ranks = with_references()
    moved = planned(graph, plan, ranks, Choice(4, batches=1, replays=2, references=3, old_log_probs=3))
    moved.validate(graph, ranks)
    away = [task.id.partition("/")[2] for task in graph.of(kind) if moved.ranks[task.id][0] in ranks.judges]
    assert away == (["0/0", "1/0", "1/1"] if kind is Kind.REFERENCE else ["1/0", "1/1", "1/2"])
    for place in ("1/0", "1/1"):
        assert moved.ranks[f"{kind}/{place}"] == moved.ranks[f"replay/{place}"] != plan.ranks[f"replay/{place}"]


def test_the_search_gives_references_to_idle_judges():
    """Judges that have nothing else to do take references, which shortens the step; and old log-probabilities too."""
    graph, plan, ranks = with_references()
    costs = {"rollout": 1.0, "decode": 0.5, "score": 0.1, "reference": 3.0, "old-log-prob": 3.0, "replay": 5.0}
    graph, found, seconds = search(graph, plan, ranks, StatedCosts({**costs, "update": 0.0}))
    assert seconds <= 0.7 * simulate(graph, plan, StatedCosts({**costs, "update": 0.0})).seconds
    away = Counter(task.kind for task in graph if found.ranks[task.id][0] in ranks.judges)
    assert away[Kind.REFERENCE] + away[Kind.OLD_LOG_PROB] > 0


def test_moved_videos_are_judged_where_they_are_decoded():
    graph, plan, ranks = made()
    moved = planned(graph, plan, ranks, Choice(16, decodes=5))
    moved.validate(graph, ranks)
    for task in graph.of(Kind.SCORE):
        decode = task.inputs[0].rpartition(".")[0]
        if moved.ranks[decode] != plan.ranks[decode]:
            assert moved.ranks[task.id] == moved.ranks[decode]


def two_judges() -> tuple[Graph, Plan, Cluster]:
    ranks = cluster("stagebreaker", 4, 2)
    dataflow = rl_step(groups=3, batches=4, mini_batches=1, judges={"first": False, "second": False})
    return *schedule("stagebreaker", dataflow, ranks, judge_batch=8), ranks


def test_a_group_can_be_judged_in_one_place_for_each_judge():
    """Whole, wherever it is decoded, and those of all judges go round the ranks."""
    graph, plan, ranks = two_judges()
    by_group = planned(graph, plan, ranks, Choice(8, by_group=True, decodes=5))
    by_group.validate(graph, ranks)
    places: dict[tuple[int, str], set[int]] = {}
    for task in graph.of(Kind.SCORE):
        places.setdefault((task.group, task.judge), set()).update(by_group.ranks[task.id])
    assert [place for _, place in sorted(places.items())] == [{2}, {3}] * 3


def test_the_search_finds_when_a_rank_should_judge_groups_whole():
    """Where a batch is slow to begin, each rank takes one judge's groups; where it is not, videos as they come."""
    graph, plan, ranks = two_judges()
    units = {(task.group, task.judge) for task in graph.of(Kind.SCORE)}
    for score, whole in ((BatchSeconds(20.0, 0.1), True), (BatchSeconds(0.0, 3.0), False)):
        costs = StatedCosts({"rollout": 1.0, "decode": 0.5, "replay": 1.0, "update": 0.0, "score": score})
        _, found, seconds = search(graph, plan, ranks, costs)
        places = {(task.group, task.judge, *found.ranks[task.id]) for task in graph.of(Kind.SCORE)}
        assert (len(places) == len(units)) == whole
        assert not whole or seconds < 0.8 * simulate(graph, plan, costs).seconds


def test_a_planner_searches_once_costs_are_known_and_again_when_they_drift():
    graph, plan, ranks = made()
    _, best, _ = search(graph, plan, ranks, costs(graph, plan).estimates())

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


def test_a_search_can_take_back_what_an_earlier_one_moved():
    """It begins with the schedule's own plan: now that judging is no longer slow, fewer tasks move than before."""
    graph, plan, ranks = made()
    _, best, _ = search(graph, plan, ranks, costs(graph, plan).estimates())

    def moved(other: Plan) -> int:
        return sum(other.ranks[task.id] != plan.ranks[task.id] for task in graph)

    async def main() -> None:
        planner = Planner(graph, plan, ranks, searches=True, fixed=False)
        for judging in (100.0, 1.0):
            await planner.reconsider(costs(graph, plan, judging=judging))
            await planner.close()
        before = planner.plan
        await planner.reconsider(costs(graph, plan))
        assert planner.plan == best
        assert 0 < moved(best) < moved(before)

    asyncio.run(main())


def test_a_size_of_batch_that_was_never_seen_is_drift_if_it_takes_what_nobody_thought():
    """And one that was foreseen is none, nor what is too short to matter."""

    def table(**rows: float) -> Estimates:
        seconds = {"one": "0|score||quality|1", "two": "0|score||quality|2", "short": "0|decode|||1"}
        return CostTable({seconds[name]: [took] for name, took in rows.items()}).estimates()

    assert not _drifted(table(one=1.0), table(one=1.05))
    assert _drifted(table(one=1.0), table(one=1.2))
    assert not _drifted(table(one=1.0), table(one=1.0, two=2.0))
    assert _drifted(table(one=1.0), table(one=1.0, two=1.2))
    assert not _drifted(table(one=1.0, short=0.001), table(one=1.0, short=0.002))


@pytest.mark.parametrize("judging", [1.0, 3.0], ids=["taking part", "catching up"])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_fixed_plan_is_found_once_and_survives_a_checkpoint(resumed: bool, judging: float):
    """And with it the variant of the graph that it is of."""
    graph, plan, ranks = made()
    found, best, _ = search(graph, plan, ranks, Slow(judging=judging))

    async def main() -> None:
        saved = msgspec.convert(msgspec.to_builtins(Progress(plan=best)), Progress).plan if resumed else None
        planner = Planner(graph, plan, ranks, searches=True, fixed=True, found=saved)
        if not resumed:
            await planner.reconsider(costs(graph, plan, judging=judging))
            await planner.close()
        await planner.reconsider(costs(graph, plan, 2.0))
        assert planner.plan == planner.found
        assert planner.graph.tasks == found.tasks
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
