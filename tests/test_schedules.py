"""Schedules add barriers, replays and places to the dataflow, and change nothing else."""

import re
from collections import Counter

import pytest

from algorithms.step import step_graph
from asyncflow.core.bounds import best_bound
from asyncflow.core.cost import StatedCosts
from asyncflow.core.graph import DEVICE, JUDGE_KINDS, LOCAL_KINDS, Graph, Kind, Task
from asyncflow.core.plan import Cluster, Plan
from asyncflow.core.schedules import NAMES, Name, cluster, schedule
from asyncflow.core.search import search
from asyncflow.core.simulate import simulate
from asyncflow.core.trace import Span
from asyncflow.testing import HashedDurations, rl_step
from engines.rewards.registry import WeightedReward, parse_rewards
from engines.rewards.testing import BaseDuel

BARRIERED: tuple[Name, ...] = ("colocated", "async-reward")
UNBARRIERED: tuple[Name, ...] = ("async-train", "merged-replay", "stagebreaker")
DATAFLOW = rl_step(groups=4, batches=2, mini_batches=2)
BEFORE_SCORING = (Kind.ROLLOUT, Kind.DECODE)
TRAINING = (Kind.FORWARD, Kind.REPLAY)


def made(name: Name, *, forward_replays: bool = False) -> tuple[Graph, Plan, Cluster]:
    ranks = cluster(name, 4, 0 if name == "colocated" else 2)
    graph, plan = schedule(name, DATAFLOW, ranks, forward_replays=forward_replays, judge_batch=2)
    return graph, plan, ranks


def simulated(name: Name, seed: int) -> list[Span]:
    graph, plan, _ = made(name, forward_replays=True)
    return [span for span in simulate(graph, plan, HashedDurations(seed, (1.0, 2.0, 5.0))).spans if span.lane == DEVICE]


def bounds(spans: list[Span], *kinds: Kind) -> tuple[float, float]:
    return (
        min(span.start for span in spans if span.name in kinds),
        max(span.end for span in spans if span.name in kinds),
    )


def ancestors(graph: Graph, name: str) -> set[str]:
    found: set[str] = set()
    left = [name]
    while left:
        for other in graph[left.pop()].predecessors - found:
            found.add(other)
            left.append(other)
    return found


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", BARRIERED)
def test_training_begins_when_all_is_scored(name: Name, seed: int):
    spans = simulated(name, seed)
    assert bounds(spans, *TRAINING)[0] >= bounds(spans, *JUDGE_KINDS)[1]


@pytest.mark.parametrize("name", BARRIERED)
def test_references_and_old_log_probabilities_are_training(name: Name):
    """They wait for the scores like replays, and stay with their micro-batch."""
    dataflow = step_graph(
        4, 4, mini_batches=2, task_batch=2, rewards=parse_rewards(["colour"]), reference=True, recompute_old=True
    )
    ranks = cluster(name, 4, 0 if name == "colocated" else 2)
    graph, plan = schedule(name, dataflow, ranks)
    held = graph.of(Kind.REFERENCE, Kind.OLD_LOG_PROB)
    assert Counter(task.kind for task in held) == {Kind.REFERENCE: 8, Kind.OLD_LOG_PROB: 4}
    for task in held:
        assert "barrier/scoring" in task.after
        assert plan.ranks[task.id] == plan.ranks[f"rollout/{task.id.partition('/')[2]}"]


@pytest.mark.parametrize("name", UNBARRIERED)
def test_no_replay_of_the_first_mini_batch_waits_for_a_score(name: Name):
    graph, _, _ = made(name)
    replays = [task for task in graph.of(*TRAINING) if task.mini_batch == 0]
    assert replays
    for replay in replays:
        assert not {graph[other].kind for other in ancestors(graph, replay.id)} & JUDGE_KINDS
    trained = {task.group for task in replays}
    judged = {graph[other].group for other in ancestors(graph, "update/0") if graph[other].kind in JUDGE_KINDS}
    assert judged == trained


@pytest.mark.parametrize("name", UNBARRIERED)
def test_training_runs_while_judges_still_score(name: Name):
    spans = simulated(name, 0)
    assert bounds(spans, *TRAINING)[0] < bounds(spans, *JUDGE_KINDS)[1]


@pytest.mark.parametrize("seed", range(10))
def test_colocated_scores_when_all_is_decoded(seed: int):
    spans = simulated("colocated", seed)
    assert bounds(spans, *JUDGE_KINDS)[0] >= bounds(spans, *BEFORE_SCORING)[1]


def test_async_reward_scores_while_others_are_rolled_out():
    spans = simulated("async-reward", 0)
    assert bounds(spans, *JUDGE_KINDS)[0] < bounds(spans, *BEFORE_SCORING)[1]


@pytest.mark.parametrize("forward_replays", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_keeps_the_dataflow(name: Name, forward_replays: bool):
    graph, plan, ranks = made(name, forward_replays=forward_replays)
    plan.validate(graph, ranks)
    for task in DATAFLOW:
        there = graph[task.id]
        assert task.predecessors <= there.predecessors
        assert (task.kind, task.inputs, task.group, task.judge) == (there.kind, there.inputs, there.group, there.judge)
        assert set(task.values) <= set(there.values)
    assert {task.kind for task in graph if task.id not in DATAFLOW.tasks} <= {Kind.BARRIER, Kind.FORWARD}


@pytest.mark.parametrize("name", [*BARRIERED, "async-train"])
def test_every_replay_follows_its_forward_twin_whose_value_the_update_reads(name: Name):
    graph, plan, _ = made(name, forward_replays=True)
    replays = graph.of(Kind.REPLAY)
    for replay in replays:
        twin = graph[replay.id.replace("replay/", "forward/")]
        assert twin.kind is Kind.FORWARD
        assert twin.id in replay.after
        assert twin.inputs == replay.inputs
        assert plan.ranks[twin.id] == plan.ranks[replay.id]
        (update,) = (task for task in graph.of(Kind.UPDATE) if replay.id in task.values)
        assert twin.id in update.values
    assert len(graph.of(Kind.FORWARD)) == len(replays)


def test_who_has_forward_replays():
    assert {name for name in NAMES if made(name)[0].of(Kind.FORWARD)} == {"async-train"}
    with_them = {name for name in NAMES if made(name, forward_replays=True)[0].of(Kind.FORWARD)}
    assert with_them == {*BARRIERED, "async-train"}


@pytest.mark.parametrize("name", NAMES)
def test_a_micro_batch_stays_on_its_rank_and_all_ranks_have_equally_many(name: Name):
    graph, plan, ranks = made(name, forward_replays=True)
    homes: dict[tuple[int, tuple[int, ...]], set[int]] = {}
    for task in graph:
        if task.kind not in LOCAL_KINDS | JUDGE_KINDS | {Kind.UPDATE}:
            homes.setdefault((task.group, task.candidates), set()).update(plan.ranks[task.id])
    assert {len(home) for home in homes.values()} == {1}
    equal = dict.fromkeys(ranks.actors, 8 // len(ranks.actors))
    assert Counter(rank for home in homes.values() for rank in home) == equal


def test_colocated_judges_where_the_frames_are():
    tasks = [Task(f"decode/{n}", Kind.DECODE, group=n) for n in range(3)]
    tasks += [Task(f"score/{n}", Kind.SCORE, inputs=(f"decode/{n}.frames",), group=n) for n in (2, 1)]
    _, plan = schedule("colocated", Graph(tasks), cluster("colocated", 3, 0))
    assert [plan.ranks[f"decode/{n}"] for n in range(3)] == [(0,), (1,), (2,)]
    assert [plan.ranks[f"score/{n}"] for n in (1, 2)] == [(1,), (2,)]


def test_async_reward_gives_its_judges_equally_many_videos():
    graph, plan, ranks = made("async-reward")
    judged = {task.inputs[0]: plan.ranks[task.id] for task in graph.of(*JUDGE_KINDS)}
    assert all(judged[task.inputs[0]] == plan.ranks[task.id] for task in graph.of(*JUDGE_KINDS)), "frames move once"
    assert Counter(rank for (rank,) in judged.values()) == dict.fromkeys(ranks.judges, 4)


@pytest.mark.parametrize("name", NAMES)
def test_rollouts_that_nobody_replays(name: Name):
    """With the base model's videos replays are spread as evenly as without, and every step ends, as searched, too."""
    ranks, rewards = cluster(name, 4, 0 if name == "colocated" else 2), [WeightedReward(BaseDuel(), 1.0)]
    dataflow = step_graph(2, 5, mini_batches=2, task_batch=1, rewards=rewards)
    graph, plan = schedule(name, dataflow, ranks)
    plan.validate(graph, ranks)
    replays = Counter(plan.ranks[task.id][0] for task in graph.of(Kind.REPLAY))
    assert sorted(replays) == list(ranks.actors) and max(replays.values()) - min(replays.values()) <= 1
    costs = StatedCosts(dict.fromkeys(("rollout", "decode", "compare", "forward", "replay", "update"), 1.0))
    seconds = simulate(graph, plan, costs).seconds
    assert search(graph, plan, ranks, costs).seconds <= seconds
    assert best_bound(graph, ranks, costs, judge_batch=plan.judge_batch).seconds <= seconds


def test_an_update_is_a_gang_of_all_policy_ranks_and_a_checkpoint_belongs_to_the_first():
    dataflow = Graph([*DATAFLOW, Task("checkpoint/0", Kind.CHECKPOINT, after=("update/1",))])
    _, plan = schedule("async-reward", dataflow, cluster("async-reward", 4, 2))
    assert plan.ranks["update/0"] == (0, 1)
    assert plan.ranks["checkpoint/0"] == (0,)


def test_a_dataflow_without_scores_needs_no_barrier():
    dataflow = Graph([Task("rollout/0", Kind.ROLLOUT, group=0)])
    graph, _ = schedule("colocated", dataflow, cluster("colocated", 1, 0))
    assert list(graph.tasks) == ["rollout/0"]


def test_roles():
    assert cluster("colocated", 2, 0) == Cluster(actors=(0, 1), policy=(0, 1), judges=(0, 1))
    for name in ("async-reward", "async-train", "merged-replay"):
        assert cluster(name, 5, 2) == Cluster(actors=(0, 1, 2), policy=(0, 1, 2), judges=(3, 4))
    assert cluster("stagebreaker", 5, 2) == Cluster(actors=(0, 1, 2), policy=(0, 1, 2, 3, 4), judges=(3, 4))
    assert cluster("async-reward", 5, 2).ranks == cluster("colocated", 5, 0).ranks == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("name", "ranks", "reward_ranks", "complaint"),
    [
        ("colocated", 0, 0, "a run needs at least 1 rank, got 0"),
        ("colocated", 2, 1, "the colocated schedule has no reward ranks, got 1; every rank judges"),
        ("async-reward", 2, 0, "0 reward ranks of 2 ranks cannot be"),
        ("async-reward", 2, 2, "2 reward ranks of 2 ranks cannot be"),
        ("async-reward", 1, 1, "the async-reward schedule needs at least 1 reward rank and at least 1 actor"),
    ],
)
def test_roles_that_cannot_be_are_refused(name: Name, ranks: int, reward_ranks: int, complaint: str):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        cluster(name, ranks, reward_ranks)
