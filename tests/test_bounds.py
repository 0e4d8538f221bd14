"""No simulated step beats a bound, and where a step cannot be improved the bound says so exactly."""

from collections.abc import Sequence
from random import Random

import msgspec
import pytest

from algorithms.step import step_graph
from asyncflow.core.bounds import Bound, best_bound, bounds
from asyncflow.core.catch_up import adapted, variants
from asyncflow.core.cost import BatchSeconds, StatedCosts
from asyncflow.core.graph import JUDGE_KINDS, LOCAL_KINDS, Graph, Kind, Task
from asyncflow.core.plan import CONTROLLER, Cluster, Plan, able
from asyncflow.core.schedules import NAMES, Name, cluster, schedule
from asyncflow.core.search import search
from asyncflow.core.simulate import simulate
from asyncflow.testing import rl_step
from engines.rewards.registry import parse_rewards

FIGURE_16 = StatedCosts(
    {"rollout": 29.0, "decode": 12.5, "forward": 15.0, "replay": 73.3, "score": BatchSeconds(100.0, 9.0), "update": 0.0}
)
TWO = Cluster(actors=(0, 1), policy=(0, 1), judges=(0, 1))
APART = Cluster(actors=(0,), policy=(0,), judges=(1,))


class Hashed:
    """Durations by what a cost table distinguishes: kind, shape, judge, size of the batch and rank; and by tensor."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def run(self, tasks: Sequence[Task], rank: int) -> float:
        task = tasks[0]
        return self._choose(task.kind, task.shape, task.judge, len(tasks), rank)

    def move(self, tensor: str, source: int, target: int) -> float:
        return self._choose(tensor, source, target)

    def _choose(self, *what: object) -> float:
        return Random(f"{self.seed} {what}").choice((0.0, 1.0, 2.5, 7.0, 20.0))


def somewhere(graph: Graph, plan: Plan, ranks: Cluster, random: Random) -> Plan:
    """A plan with everything drawn: places, order, and how long judges wait."""
    places = {
        task.id: able(task, graph, ranks) if task.id in graph.gangs else (random.choice(able(task, graph, ranks)),)
        for task in graph
    }
    order = random.sample(plan.order, len(plan.order))
    waits = random.randint(1, plan.judge_batch)
    return msgspec.structs.replace(plan, ranks=places, order=tuple(order), judge_wait=waits)


def shaped(graph: Graph, random: Random) -> Graph:
    """The graph with a shape and a judge drawn for each task, and which of two judges are apart."""
    apart = random.choice(("", "x", "xy"))
    judges = [random.choice("xy") if task.kind in JUDGE_KINDS else "" for task in graph]
    return Graph(
        msgspec.structs.replace(task, shape=random.choice("ab"), judge=judge, apart=bool(judge) and judge in apart)
        for task, judge in zip(graph, judges, strict=True)
    )


@pytest.mark.parametrize("name", NAMES)
def test_no_plan_beats_a_bound(name: Name) -> None:
    """Random steps, durations, shapes and placements, of every variant of the graph; for stagebreaker also the plan
    that the search finds."""
    for seed in range(40):
        random = Random(seed)
        ranks = random.randint(1 if name == "colocated" else 2, 5)
        roles = cluster(name, ranks, 0 if name == "colocated" else random.randint(1, ranks - 1))
        dataflow = rl_step(groups=random.randint(1, 4), batches=random.randint(1, 2), mini_batches=random.randint(1, 3))
        graph, plan = schedule(
            name, shaped(dataflow, random), roles, forward_replays=bool(seed % 2), judge_batch=random.randint(1, 4)
        )
        durations = Hashed(seed)
        least = best_bound(graph, roles, durations, judge_batch=plan.judge_batch)
        for variant in variants(graph, roles):
            named = max(bounds(variant, roles, durations, judge_batch=plan.judge_batch).values())
            assert name == "stagebreaker" or named <= least.seconds
            own = adapted(plan, variant, roles)
            for tried in (own, *(somewhere(variant, own, roles, random) for _ in range(4))):
                seconds = simulate(variant, tried, durations).seconds
                assert max(least.seconds, named) <= seconds + 1e-9, f"seed {seed}: {least}"
        if name == "stagebreaker" and len(graph.of(Kind.REPLAY)) <= 2:
            assert least.seconds <= search(graph, plan, roles, durations).seconds + 1e-9, f"seed {seed}: {least}"


def test_any_graph_has_bounds_that_hold() -> None:
    """Graphs that are no RL step: any kind after any other, gangs and barriers anywhere, inputs from anywhere."""
    kinds = [kind for kind in Kind if kind is not Kind.CHECKPOINT]
    for seed in range(250):
        random = Random(seed)
        ranks = random.randint(2, 4)
        roles = cluster("stagebreaker", ranks, random.randint(1, ranks - 1))
        tasks: list[Task] = []
        for number in range(random.randint(1, 14)):
            kind = random.choice(kinds)
            earlier = random.sample(tasks, min(len(tasks), random.randint(0, 2)))
            makers = [] if kind in LOCAL_KINDS else [t for t in earlier if t.kind not in LOCAL_KINDS]
            inputs = tuple(f"{task.id}.x" for task in makers)
            after = tuple(task.id for task in earlier if task not in makers)
            tasks.append(Task(f"{kind}/{number}", kind, random.choice("ab"), inputs=inputs, after=after))
        graph = Graph(tasks)
        plan = somewhere(graph, Plan({}, tuple(graph.tasks), random.randint(1, 3)), roles, random)
        least = best_bound(graph, roles, Hashed(seed), judge_batch=plan.judge_batch)
        assert least.seconds <= simulate(graph, plan, Hashed(seed)).seconds + 1e-9, f"seed {seed}: {least}"


def only(kind: Kind, count: int) -> Graph:
    return Graph([Task(f"{kind}/{number}", kind) for number in range(count)])


def test_tasks_that_do_not_divide_evenly() -> None:
    """Of three rollouts on two ranks one rank gets two."""
    costs = StatedCosts({"rollout": 4.0})
    assert bounds(only(Kind.ROLLOUT, 3), TWO, costs, judge_batch=1) == {"path": 4.0, "ranks": 6.0, "rollout": 8.0}
    assert best_bound(only(Kind.ROLLOUT, 3), TWO, costs, judge_batch=1) == Bound(8.0, "rollout")


def test_a_path_travels_where_no_rank_could_run_both() -> None:
    """Frames must get from an actor to a judge, but need not where one rank can do both."""
    graph = Graph([
        Task("rollout/0", Kind.ROLLOUT),
        Task("decode/0", Kind.DECODE, inputs=("rollout/0.path",)),
        Task("score/0", Kind.SCORE, inputs=("decode/0.frames",)),
    ])  # fmt: skip
    costs = StatedCosts({"rollout": 4.0, "decode": 2.0, "score": 1.0}, transfer=0.5)
    assert best_bound(graph, APART, costs, judge_batch=1) == Bound(7.5, "path")
    assert best_bound(graph, TWO, costs, judge_batch=1) == Bound(7.0, "path")


def test_scores_take_the_batches_that_cost_least() -> None:
    """Five in batches of at most three: a batch of three and one of two; where batches do not pay, five singles."""
    costs = StatedCosts({"score": BatchSeconds(10.0, 1.0)})
    assert bounds(only(Kind.SCORE, 5), APART, costs, judge_batch=3)["judges"] == 25.0
    assert bounds(only(Kind.SCORE, 5), APART, StatedCosts({"score": 2.0}), judge_batch=3)["judges"] == 10.0


def test_what_is_apart_takes_no_time_of_a_device() -> None:
    """Two judges that are apart are bound each by its own videos, and by nobody's device."""
    costs = StatedCosts({"score": 2.0, "decode": 1.0})
    scores = [Task(f"score/{n}", Kind.SCORE, judge="xy"[n % 2], apart=True) for n in range(6)]
    graph = Graph([*scores, Task("decode/0", Kind.DECODE)])
    assert bounds(graph, Cluster((0,), (0,), (0,)), costs, judge_batch=1) == {
        "path": 2.0, "ranks": 1.0, "score/x": 6.0, "score/y": 6.0, "decode": 1.0,
    }  # fmt: skip


def test_a_rank_idles_before_its_first_task_and_after_its_last() -> None:
    """The judge waits for the rollout and its decode, and is through before the update."""
    graph = Graph([
        Task("rollout/0", Kind.ROLLOUT),
        Task("decode/0", Kind.DECODE, inputs=("rollout/0.path",)),
        *(Task(f"score/{n}", Kind.SCORE, inputs=("decode/0.frames",)) for n in range(3)),
        Task("update/0", Kind.UPDATE, values=tuple(f"score/{n}" for n in range(3))),
    ])  # fmt: skip
    costs = StatedCosts({"rollout": 4.0, "decode": 2.0, "score": 10.0, "update": 1.0})
    assert bounds(graph, APART, costs, judge_batch=1)["judges"] == 4.0 + 2.0 + 30.0 + 1.0


def test_an_update_occupies_every_policy_rank_and_lasts_as_long_as_on_the_slowest() -> None:
    class Uneven(StatedCosts):
        def run(self, tasks: Sequence[Task], rank: int) -> float:
            return 3.0 if rank else 1.0

    assert bounds(only(Kind.UPDATE, 1), TWO, Uneven({}), judge_batch=1) == {"path": 3.0, "ranks": 2.0}


def test_parts_between_barriers_add_up() -> None:
    """Of three rollouts one rank has two, whatever follows the barrier; the four replays are shared evenly."""
    rollouts = only(Kind.ROLLOUT, 3)
    barrier = Task("barrier/0", Kind.BARRIER, after=tuple(rollouts.tasks))
    replays = [Task(f"replay/{n}", Kind.REPLAY, after=("barrier/0",)) for n in range(4)]
    costs = StatedCosts({"rollout": 4.0, "replay": 1.0})
    assert best_bound(Graph([*rollouts, barrier, *replays]), TWO, costs, judge_batch=1) == Bound(10.0, "rollout, ranks")


def paper(name: Name) -> tuple[Graph, Plan, Cluster]:
    """The StageBreaker paper's Figure 16: 24 candidates in 2 mini-batches on 6 GPUs, of which 2 judge."""
    dataflow = step_graph(2, 12, mini_batches=2, task_batch=1, rewards=parse_rewards(["colour"]))
    ranks = cluster(name, 6, 0 if name == "colocated" else 2)
    return *schedule(name, dataflow, ranks, forward_replays=True, judge_batch=12), ranks


@pytest.mark.parametrize(("name", "by"), [
    ("colocated", "ranks, score/colour, ranks, ranks"), ("async-train", "policy"), ("merged-replay", "policy"),
])  # fmt: skip
def test_the_paper_s_baselines_cannot_be_improved(name: Name, by: str) -> None:
    """What they lose is in their edges and roles: within these each takes exactly its bound."""
    graph, plan, ranks = paper(name)
    least = best_bound(graph, ranks, FIGURE_16, judge_batch=12)
    assert least.seconds == pytest.approx(simulate(graph, plan, FIGURE_16).seconds)
    assert least.by == by


def test_the_paper_s_best_is_near_what_is_possible() -> None:
    """All work over 6 GPUs is 529 of the 553 units that StageBreaker takes; that two of them cannot begin before a
    rollout of 29 has ended makes 538."""
    graph, _, ranks = paper("stagebreaker")
    work = 24 * (29.0 + 12.5 + 73.3) + 2 * (100.0 + 12 * 9.0)
    assert work / 6 == pytest.approx(529, abs=1)
    assert best_bound(graph, ranks, FIGURE_16, judge_batch=12) == Bound(pytest.approx((work + 2 * 29.0) / 6), "ranks")


def test_the_controller_s_work_is_on_the_path() -> None:
    class Slow(StatedCosts):
        def run(self, tasks: Sequence[Task], rank: int) -> float:
            return 5.0 if rank == CONTROLLER else 1.0

    graph = Graph([Task("reward/0", Kind.REWARD), Task("update/0", Kind.UPDATE, values=("reward/0",))])
    assert bounds(graph, TWO, Slow({}), judge_batch=1)["path"] == 6.0
