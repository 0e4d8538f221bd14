"""What is executed is what was simulated: the same trace, order and ties included."""

from math import inf
from random import Random

import pytest

from asyncflow.core.dispatch import Run
from asyncflow.core.graph import DEVICE, Graph, Kind, Task
from asyncflow.core.plan import CONTROLLER, Plan
from asyncflow.core.schedules import NAMES, Name, cluster, schedule
from asyncflow.core.simulate import simulate
from asyncflow.core.trace import TRANSFER, Trace
from asyncflow.testing import HashedDurations, random_step, rl_step, run_virtually

TIES = (0.0, 1.0, 2.0)
FLOATS = tuple(n / 7 for n in range(1, 20))


class Fixed:
    """Durations by kind and by part."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds

    def run(self, tasks, rank: int) -> float:
        return self.seconds.get(tasks[0].kind, 0.0)

    def move(self, tensor: str, source: int, target: int) -> float:
        return self.seconds.get(tensor.rpartition(".")[2], 0.0)


def spans(trace: Trace, rank: int, lane: str) -> list[tuple[tuple[str, ...], float, float]]:
    return [(span.tasks, span.start, span.end) for span in trace.spans if (span.rank, span.lane) == (rank, lane)]


@pytest.mark.parametrize("choices", [TIES, FLOATS], ids=["ties", "floats"])
def test_a_random_step_is_executed_as_it_was_simulated(choices):
    for seed in range(150):
        random = Random(seed)
        graph, plan = random_step(random, ranks=random.randint(1, 4), size=random.randint(1, 40))
        durations = HashedDurations(seed, choices)
        assert run_virtually(graph, plan, durations).trace == simulate(graph, plan, durations), f"seed {seed}"


@pytest.mark.parametrize("forward_replays", [False, True], ids=["one-replay", "two-replays"])
@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_is_executed_as_it_was_simulated(name: Name, forward_replays: bool):
    for seed in range(25):
        random = Random(seed)
        ranks = random.randint(1 if name == "colocated" else 2, 4)
        judges = 0 if name == "colocated" else random.randint(1, ranks - 1)
        dataflow = rl_step(
            groups=random.randint(1, 4), batches=random.randint(1, 2), mini_batches=random.randint(1, 2),
            judges={"here": False, "apart": True},
        )  # fmt: skip
        roles = cluster(name, ranks, judges)
        graph, plan = schedule(
            name, dataflow, roles, forward_replays=forward_replays, judge_batch=random.randint(1, 3)
        )
        for choices in (TIES, FLOATS):
            durations = HashedDurations(seed, choices)
            assert run_virtually(graph, plan, durations).trace == simulate(graph, plan, durations), f"seed {seed}"


def test_the_commands_are_the_same_too():
    graph, plan = random_step(Random(5), ranks=3, size=30)
    result = run_virtually(graph, plan, HashedDurations(5, TIES))
    started = [command for _, made in result.log for command in made if isinstance(command, Run)]
    spans = simulate(graph, plan, HashedDurations(5, TIES)).spans
    assert {(run.ticket, run.tasks) for run in started} == {(s.number, s.tasks) for s in spans if s.lane != TRANSFER}


def test_a_transfer_waits_for_the_lanes_of_both_its_ends():
    tasks = [Task(f"rollout/{n}", Kind.ROLLOUT) for n in range(2)]
    tasks += [Task(f"decode/{n}", Kind.DECODE, inputs=(f"rollout/{n}.path",)) for n in range(2)]
    graph = Graph(tasks)
    plan = Plan({"rollout/0": (0,), "rollout/1": (1,), "decode/0": (2,), "decode/1": (2,)}, tuple(graph.tasks))
    trace = simulate(graph, plan, Fixed(rollout=3.0, path=2.0, decode=1.0))
    assert spans(trace, 2, TRANSFER) == [(("rollout/0",), 3.0, 5.0), (("rollout/1",), 5.0, 7.0)]
    assert spans(trace, 2, DEVICE) == [(("decode/0",), 5.0, 6.0), (("decode/1",), 7.0, 8.0)]
    assert trace.seconds == 8.0


def test_a_gang_holds_the_transfer_lanes_of_its_ranks():
    tasks = [
        Task("rollout/0", Kind.ROLLOUT),
        Task("update/0", Kind.UPDATE, after=("rollout/0",)),
        Task("decode/0", Kind.DECODE, inputs=("rollout/0.path",), after=("reward/0",)),
        Task("reward/0", Kind.REWARD, values=("rollout/0",)),
        Task("replay/0", Kind.REPLAY, shape="long"),
        Task("score/0", Kind.SCORE, inputs=("replay/0.frames",), judge="x"),
    ]
    graph = Graph(tasks)
    places = {"rollout/0": (0,), "update/0": (0, 1), "decode/0": (2,), "reward/0": (CONTROLLER,)}
    plan = Plan({**places, "replay/0": (2,), "score/0": (0,)}, tuple(graph.tasks))
    trace = simulate(graph, plan, Fixed(rollout=1.0, update=5.0, replay=3.0, frames=1.0, path=1.0))
    assert spans(trace, 0, TRANSFER) == [(("rollout/0",), 1.0, 2.0), (("replay/0",), 6.0, 7.0)]


def judged_by(*apart: bool) -> Trace:
    """A rank that decodes, judges two videos by as many judges as there are arguments, and replays."""
    tasks = [Task("decode/0", Kind.DECODE)]
    for number, is_apart in enumerate(apart):
        judge = {"inputs": ("decode/0.frames",), "judge": f"number {number}", "apart": is_apart}
        tasks += [Task(f"score/{number}/{video}", Kind.SCORE, **judge) for video in (0, 1)]
    graph = Graph([*tasks, Task("replay/0", Kind.REPLAY)])
    plan = Plan(dict.fromkeys(graph.tasks, (0,)), tuple(graph.tasks))
    return simulate(graph, plan, Fixed(decode=1.0, score=3.0, replay=4.0))


def test_judges_that_are_apart_judge_at_once_while_the_device_goes_on():
    """Each on a lane of its own, one batch after another; those that are not take turns on the device."""
    trace = judged_by(True, True)
    assert spans(trace, 0, DEVICE) == [(("decode/0",), 0.0, 1.0), (("replay/0",), 1.0, 5.0)]
    for number in (0, 1):
        first, second = f"score/{number}/0", f"score/{number}/1"
        assert spans(trace, 0, f"judge number {number}") == [((first,), 1.0, 4.0), ((second,), 4.0, 7.0)]
    assert trace.seconds == 7.0 and trace.lanes() == [(0, DEVICE), (0, "judge number 0"), (0, "judge number 1")]
    assert judged_by(True, False).seconds == 1.0 + 2 * 3.0 + 4.0
    assert judged_by(False, False).seconds == 1.0 + 4 * 3.0 + 4.0


def test_a_step_that_takes_too_long_is_given_up():
    """And one that does not is simulated as without a limit, be the limit its very seconds."""
    for seed in range(60):
        graph, plan = random_step(Random(seed), ranks=3, size=30)
        durations = HashedDurations(seed, FLOATS)
        whole = simulate(graph, plan, durations)
        assert simulate(graph, plan, durations, limit=whole.seconds) == whole, f"seed {seed}"
        assert simulate(graph, plan, durations, limit=whole.seconds * 0.999).seconds > whole.seconds * 0.999


def test_a_rank_with_too_much_to_do_ends_a_simulation_before_it_begins():
    graph = Graph([Task("rollout/0", Kind.ROLLOUT), Task("rollout/1", Kind.ROLLOUT)])
    plan = Plan({"rollout/0": (0,), "rollout/1": (0,)}, tuple(graph.tasks))
    assert simulate(graph, plan, Fixed(rollout=2.0), limit=3.0) == Trace(seconds=inf)
    assert simulate(graph, plan, Fixed(rollout=2.0), limit=4.0).seconds == 4.0


def test_a_plan_that_deadlocks_is_refused():
    graph = Graph([Task("rollout/0", Kind.ROLLOUT)])
    with pytest.raises(AssertionError, match="deadlocks"):
        simulate(graph, Plan({"rollout/0": (0,)}, ()), Fixed())
