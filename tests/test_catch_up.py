"""Ranks that judge may catch up with the updates: the actors wait for none of them, and all end with the same bits."""

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from algorithms.dancegrpo import DanceGRPO, DanceGRPOConfig
from algorithms.resume import Saved
from algorithms.step import step_graph
from algorithms.train import dataflow
from asyncflow import checkpoint
from asyncflow.config import resolve
from asyncflow.core.catch_up import adapted, variants
from asyncflow.core.dispatch import Begin, Dispatcher, Done, Drop, Move, Moved, Run
from asyncflow.core.graph import Graph, Kind, Task
from asyncflow.core.plan import Cluster, Plan
from asyncflow.core.schedules import NAMES, cluster, schedule
from asyncflow.core.search import Choice, planned
from asyncflow.core.simulate import simulate
from asyncflow.testing import HashedDurations, rl_step, run_virtually
from engines.rewards.registry import parse_rewards


def late(graph: Graph, plan: Plan, ranks: Cluster) -> tuple[Graph, Plan]:
    """The variant that catches up, with its plan."""
    _, variant = variants(graph, ranks)
    return variant, adapted(plan, variant, ranks)


def made() -> tuple[Graph, Plan, Cluster]:
    """Two mini-batches, with references and recomputed log-probabilities, on two actors and two judges."""
    dataflow = step_graph(
        2, 4, mini_batches=2, task_batch=1, rewards=parse_rewards(["colour"]), reference=True, recompute_old=True
    )
    ranks = cluster("stagebreaker", 4, 2)
    return *late(*schedule("stagebreaker", dataflow, ranks, judge_batch=4), ranks), ranks


def before(graph: Graph, name: str) -> set[str]:
    """Everything that must have ended before a task starts."""
    found: set[str] = set()
    left = [name]
    while left:
        new = graph[left.pop()].predecessors - found
        found |= new
        left += new
    return found


def test_every_judge_catches_up_with_every_update_in_order():
    """By what the gang of the actors has summed; nothing of the schedule's own graph changes."""
    graph, plan, ranks = made()
    assert [(task.id, task.inputs, task.after, plan.ranks[task.id]) for task in graph.of(Kind.CATCH_UP)] == [
        ("catch-up/0/2", ("update/0.total",), (), (2,)),
        ("catch-up/1/2", ("update/1.total",), ("catch-up/0/2",), (2,)),
        ("catch-up/0/3", ("update/0.total",), (), (3,)),
        ("catch-up/1/3", ("update/1.total",), ("catch-up/0/3",), (3,)),
    ]
    assert {plan.ranks[name] for name in graph.gangs} == {(0, 1)}
    plan.validate(graph, ranks)
    own = Graph(task for task in graph if task.kind is not Kind.CATCH_UP)
    assert variants(own, ranks)[0] is own
    assert variants(graph, ranks) == (graph,)


def test_old_log_probabilities_are_those_of_before_the_first_update():
    """On a judge, too: it does not catch up before the last of them."""
    graph, _, _ = made()
    old = {task.id for task in graph.of(Kind.OLD_LOG_PROB)}
    assert old
    for task in graph.of(Kind.CATCH_UP):
        assert old <= before(graph, task.id)


def test_a_judge_that_catches_up_replays_nothing():
    """A plan in which it does, or in which an update waits for it, is of the other variant."""
    graph, plan, ranks = made()
    assert plan.fits(graph, ranks)
    for wrong in ({"replay/0/0": (2,)}, {"update/0": (0, 1, 2, 3)}, {"catch-up/0/2": (0,)}):
        other = structs.replace(plan, ranks=plan.ranks | wrong)
        assert not other.fits(graph, ranks)
        with pytest.raises(AssertionError):
            other.validate(graph, ranks)
    moved = planned(graph, plan, ranks, Choice(4, decodes=3, references=5, old_log_probs=2))
    moved.validate(graph, ranks)


def test_a_total_is_kept_on_one_rank_until_the_last_has_caught_up():
    """On the gang's first, once the whole gang has made it; it goes to each rank that needs it, and then is dropped."""
    ranks = cluster("stagebreaker", 4, 2)
    own = Graph([Task("update/0", Kind.UPDATE)]), Plan({"update/0": ranks.policy}, ("update/0",))
    d, total = Dispatcher(*late(*own, ranks)), "update/0.total"
    assert d.on(Begin()) == [Run(1, ("update/0",), (0, 1), keep=(total,), sequence=1)]
    assert d.on(Done(1, 0)) == []
    assert d.on(Done(1, 1)) == [Move(2, total, 0, 2), Move(3, total, 0, 3)]
    assert d.on(Moved(2)) == [Run(2, ("catch-up/0/2",), (2,))]
    assert d.on(Done(2, 2)) == [Drop(total, 2)]
    assert d.on(Moved(3)) == [Drop(total, 0), Run(3, ("catch-up/0/3",), (3,))]
    assert not d.finished
    assert d.on(Done(3, 3)) == [Drop(total, 3)]
    assert d.finished


def test_without_ranks_that_judge_and_train_there_is_one_variant():
    for name in NAMES:
        ranks = cluster(name, 3, 0 if name == "colocated" else 1)
        assert len(variants(rl_step(groups=2, batches=1), ranks)) == (2 if name == "stagebreaker" else 1)


@pytest.mark.parametrize("choices", [(0.0, 1.0, 2.0), tuple(n / 7 for n in range(1, 20))], ids=["ties", "floats"])
def test_catching_up_is_executed_as_it_was_simulated(choices: tuple[float, ...]):
    """And no rank keeps a gradient for itself: nothing is left in the stores."""
    for seed in range(20):
        ranks = cluster("stagebreaker", 2 + seed % 3, 1 + seed % 2 * (seed % 3 > 0))
        graph, plan = late(*schedule("stagebreaker", rl_step(3, 2, mini_batches=3), ranks, judge_batch=2), ranks)
        durations = HashedDurations(seed, choices)
        result = run_virtually(graph, plan, durations)
        assert result.trace == simulate(graph, plan, durations), f"seed {seed}"


def test_updates_start_while_judges_are_busy():
    """Where all policy ranks take part the first waits for both batches of scores; where it catches up for its own."""

    class Slow(HashedDurations):
        def run(self, tasks, rank: int) -> float:
            return {Kind.SCORE: 10.0, Kind.UPDATE: 1.0, Kind.CATCH_UP: 1.0}.get(tasks[0].kind, 0.0)

    ranks = cluster("stagebreaker", 2, 1)
    own = schedule("stagebreaker", rl_step(groups=2, batches=1, mini_batches=2), ranks, judge_batch=2)
    for (graph, plan), kind, starts in (
        (own, Kind.UPDATE, ([20.0, 21.0], [20.0, 21.0])),
        (late(*own, ranks), Kind.CATCH_UP, ([10.0, 20.0], [20.0, 21.0])),
    ):
        trace = simulate(graph, plan, Slow(0, (0.0,)))
        assert [span.start for span in trace.on(0) if span.name == Kind.UPDATE] == starts[0]
        assert [span.start for span in trace.on(1) if span.name == kind] == starts[1]
        assert trace.seconds == 22.0


@pytest.fixture
def run_of_one(recipe, run_ranks, tmp_path: Path) -> Path:
    """The run directory of four steps on one rank, with references and recomputed log-probabilities."""
    run = tmp_path / "one"
    options = [*recipe, "--steps=4", "--kl=0.1", "--old-log-probs=recomputed", f"--out={run}"]
    codes, output = run_ranks(1, options, tmp_path / "output")
    assert codes == [0], output
    return run


def plant(run: Path, ranks: Cluster) -> Path:
    """Have a run's second checkpoint say that its search found a plan in which judges catch up."""
    config = resolve(DanceGRPOConfig, {}, str(run / "config.toml"))
    rewards = parse_rewards(config.reward)
    algorithm = DanceGRPO(config, tuple(reward.weight for reward in rewards))
    graph, plan = late(*schedule("stagebreaker", dataflow(config, algorithm, rewards), ranks, judge_batch=3), ranks)
    found = checkpoint.load(run / "checkpoints" / "step-000002")
    saved = msgspec.convert(found.meta, Saved)
    saved.progress.plan = planned(graph, plan, ranks, Choice(3, decodes=3, references=5, old_log_probs=3))
    return checkpoint.save(run.parent / "planted", 2, found.files, msgspec.json.decode(msgspec.json.encode(saved)))


def test_ranks_that_catch_up_have_the_bits_of_one_rank(run_of_one, recipe, run_ranks, tmp_path):
    """After every step on every rank, though they take references and old log-probabilities of the weights between."""
    planted = plant(run_of_one, cluster("stagebreaker", 3, 2))
    options = [f"--config={run_of_one / 'config.toml'}", f"--resume={planted}", f"--out={tmp_path / 'three'}"]
    codes, output = run_ranks(3, [*options, "--schedule=stagebreaker", "--reward-ranks=2"], tmp_path / "output")
    assert codes == [0, 0, 0], output
    one, three = (
        {line["step"]: line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
        for run in (run_of_one, tmp_path / "three")
    )
    for step in (3, 4):
        assert three[step]["weights/sha256"] == one[step]["weights/sha256"]
        trace = json.loads((tmp_path / "three" / "trace" / f"step-{step:06d}.json").read_text())
        ran = Counter(event["name"] for event in trace["traceEvents"] if event["ph"] == "X")
        assert ran["catch-up"] == 4, ran
        assert three[step]["timing_s/bound"] <= three[step]["timing_s/simulated"] * (1 + 1e-9)
