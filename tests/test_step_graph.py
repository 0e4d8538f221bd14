"""The graph of a step holds the dataflow and nothing else: what it lacks is what lets schedules overlap."""

from itertools import combinations

import pytest

from algorithms.step import evaluation_graph, micro_batches, step_graph
from asyncflow.core.graph import JUDGE_KINDS, Graph, Kind
from engines.rewards.registry import WeightedReward
from engines.rewards.testing import BaseDuel, Brightness, BrightnessDuel

POINTWISE = [WeightedReward(Brightness(), 1.0)]
PAIRWISE = [WeightedReward(BrightnessDuel(), 1.0)]
BASE = [WeightedReward(BaseDuel(), 1.0)]


def graph(
    groups=4, group_size=4, *, mini_batches=1, task_batch=2, rewards=POINTWISE, global_statistics=False,
    reference=False, recompute_old=False,
) -> Graph:  # fmt: skip
    return step_graph(
        groups, group_size, mini_batches=mini_batches, task_batch=task_batch, rewards=rewards,
        global_statistics=global_statistics, reference=reference, recompute_old=recompute_old,
    )


def ancestors(made: Graph, name: str) -> set[str]:
    """Everything that must end before task `name` starts."""
    found: set[str] = set()
    todo = [name]
    while todo:
        new = made[todo.pop()].predecessors - found
        found |= new
        todo += new
    return found


def test_a_replay_never_waits_for_a_score():
    """Unit gradients need the trajectory alone; that no score is among their inputs is the point of the runtime."""
    made = graph(rewards=[*POINTWISE, *PAIRWISE])
    judged = {task.id for task in made.of(*JUDGE_KINDS, Kind.REWARD, Kind.ADVANTAGE, Kind.DECODE)}
    assert judged
    for replay in made.of(Kind.REPLAY):
        place = replay.id.partition("/")[2]
        assert ancestors(made, replay.id) == {f"rollout/{place}"}
        assert replay.inputs == (f"rollout/{place}.noisy", f"rollout/{place}.clean")


def test_a_reference_feeds_its_replay_and_waits_for_the_trajectory_alone():
    """The frozen policy's predictions need neither score nor update, in any mini-batch."""
    made = graph(mini_batches=2, reference=True)
    assert len(made.of(Kind.REFERENCE)) == len(made.of(Kind.REPLAY))
    for reference in made.of(Kind.REFERENCE):
        place = reference.id.partition("/")[2]
        assert reference.inputs == (f"rollout/{place}.noisy", f"rollout/{place}.clean")
        assert reference.predecessors == {f"rollout/{place}"}
        assert made.consumers[f"{reference.id}.velocity"] == [f"replay/{place}"]


def test_recomputed_old_units_are_those_before_the_first_update():
    """The first mini-batch finds its own while it replays; passes for the others need no score and precede update 0."""
    made = graph(mini_batches=2, recompute_old=True)
    passes = {task.id for task in made.of(Kind.OLD_LOG_PROB)}
    assert passes == {f"old-log-prob/{group}/{first}" for group in (2, 3) for first in (0, 2)}
    assert passes <= made["update/0"].predecessors
    assert made["replay/0/0"].values == ()
    assert made["replay/2/0"].values == ("old-log-prob/2/0",)
    assert set(made["update/1"].values) >= passes
    assert not {name for name in made["update/0"].values if name.startswith("rollout")}
    for task in made.of(Kind.OLD_LOG_PROB):
        assert task.predecessors == {f"rollout/{task.id.partition('/')[2]}"}


def test_an_update_waits_for_its_mini_batch_alone():
    """Its gradients, the old and new units and the advantages of its own whole groups, and no others'."""
    made = graph(mini_batches=2)
    for mini_batch, groups in enumerate([(0, 1), (2, 3)]):
        update = made[f"update/{mini_batch}"]
        places = [f"{group}/{first}" for group in groups for first in (0, 2)]
        assert update.inputs == tuple(f"replay/{place}.gradients" for place in places)
        needed = {f"{kind}/{place}" for kind in ("rollout", "replay") for place in places}
        assert set(update.values) == needed | {f"advantage/{group}" for group in groups}


def test_the_second_mini_batch_is_replayed_under_the_updated_weights():
    """Its replays and its update come after the first update; the first's wait for none."""
    made = graph(mini_batches=2)
    for task in made.of(Kind.REPLAY, Kind.UPDATE):
        assert task.after == (("update/0",) if task.mini_batch else ())
    assert all("update" not in name for task in made.of(Kind.ROLLOUT, Kind.DECODE) for name in task.predecessors)


def test_a_mini_batch_holds_whole_groups():
    for mini_batches in (1, 2, 4):
        made = graph(mini_batches=mini_batches)
        for group in range(4):
            members = {task.mini_batch for task in made if task.group == group and task.kind in (Kind.REPLAY,)}
            assert members == {group // (4 // mini_batches)}


@pytest.mark.parametrize("rewards", [POINTWISE, PAIRWISE])
def test_statistics_decide_what_an_advantage_waits_for(rewards):
    for group in range(4):
        assert graph(rewards=rewards)[f"advantage/{group}"].values == (f"reward/{group}",)
        everyone = tuple(f"reward/{other}" for other in range(4))
        assert graph(rewards=rewards, global_statistics=True)[f"advantage/{group}"].values == everyone


def test_each_candidate_is_scored_by_each_reward():
    made = graph(2, 3, rewards=POINTWISE)
    scored = [(task.group, *task.candidates, task.inputs) for task in made.of(Kind.SCORE)]
    assert scored == [
        (group, candidate, (f"decode/{group}/{candidate // 2 * 2}.frames",))
        for group in (0, 1)
        for candidate in range(3)
    ]
    scores = tuple(f"score/brightness/1/{candidate}" for candidate in range(3))
    assert made["reward/1"].values == (*scores, "rollout/1/0", "rollout/1/2")


def test_a_pairwise_reward_compares_every_pair_with_both_videos():
    """A comparison reads both frames, or the one micro-batch that holds both."""
    made = graph(1, 4, rewards=PAIRWISE)
    compared = {task.candidates: task.inputs for task in made.of(Kind.COMPARE)}
    assert set(compared) == set(combinations(range(4), 2))
    assert compared[0, 3] == ("decode/0/0.frames", "decode/0/2.frames")
    assert compared[2, 3] == ("decode/0/2.frames",)
    assert not made.of(Kind.SCORE)
    assert len([name for name in made["reward/0"].values if name.startswith("compare")]) == 6


def test_the_base_models_video_is_compared_with_and_never_trained():
    """One for each group, in a micro-batch of its own, before all candidates; the other tasks are those without it."""
    with_it, without = (
        graph(mini_batches=2, reference=True, recompute_old=True, rewards=rewards)
        for rewards in ([*POINTWISE, *BASE], POINTWISE)
    )
    bases = [task for task in with_it if task.candidates == (4,)]
    assert bases == [with_it[f"{kind}/{group}/4"] for group in range(4) for kind in ("rollout", "decode")]
    assert bases == list(with_it)[:8]
    for rollout, decode in zip(bases[::2], bases[1::2], strict=True):
        assert (rollout.shape, decode.shape) == ("b1-base", "b1")
        assert with_it.outputs[rollout.id] == (f"{rollout.id}.clean",)
        compared = [task for task in with_it.of(Kind.COMPARE) if task.group == rollout.group]
        assert with_it.consumers[f"{decode.id}.frames"] == [task.id for task in compared]
        assert {task.candidates for task in compared} == {*((c, 4) for c in range(4)), *((4, c) for c in range(4))}
        assert rollout.id in with_it[f"reward/{rollout.group}"].values
    others = [task for task in with_it if task not in bases and task.kind not in (Kind.COMPARE, Kind.REWARD)]
    assert others == [task for task in without if task.kind is not Kind.REWARD]


def test_micro_batches_cover_a_group_once():
    """In order, in runs of the task batch; only the last may be shorter, and a shape says how many it holds."""
    assert micro_batches(7, 3) == [(0, 1, 2), (3, 4, 5), (6,)]
    assert micro_batches(2, 8) == [(0, 1)]
    made = graph(1, 7, task_batch=3)
    for kind in (Kind.ROLLOUT, Kind.DECODE, Kind.REPLAY):
        tasks = made.of(kind)
        assert [task.candidates for task in tasks] == micro_batches(7, 3)
        assert [task.shape for task in tasks] == ["b3", "b3", "b1"]


def test_an_evaluation_samples_scores_and_shows():
    """No replay and no update; only the micro-batches with the first videos are written."""
    made = evaluation_graph(6, 3, task_batch=2, rewards=POINTWISE)
    assert {task.kind for task in made} == {Kind.ROLLOUT, Kind.DECODE, Kind.SCORE, Kind.EXPORT}
    assert [task.candidates for task in made.of(Kind.EXPORT)] == [(0, 1), (2, 3)]
    assert len(made.of(Kind.SCORE)) == 6


def test_an_evaluation_compares_with_the_base_models_videos():
    """Each sample with the video at its place behind all samples, in both orders; only samples are scored and shown."""
    made = evaluation_graph(3, 1, task_batch=2, rewards=[*POINTWISE, *PAIRWISE])
    assert [(task.candidates, task.shape) for task in made.of(Kind.ROLLOUT)] == [
        ((0, 1), "b2"), ((3, 4), "b2-base"), ((2,), "b1"), ((5,), "b1-base"),
    ]  # fmt: skip
    compared = [task.candidates for task in made.of(Kind.COMPARE)]
    assert compared == [(0, 3), (3, 0), (1, 4), (4, 1), (2, 5), (5, 2)]
    assert made["compare/brightness-duel/0/4-1"].inputs == ("decode/0/3.frames", "decode/0/0.frames")
    assert [task.candidates for task in made.of(Kind.SCORE)] == [(0,), (1,), (2,)]
    assert [task.candidates for task in made.of(Kind.EXPORT)] == [(0, 1)]
