"""The cost table gives back what was measured, and says so when nothing was."""

from random import Random

import msgspec
import pytest

from asyncflow.core.cost import BatchSeconds, CostTable, Spread, StatedCosts
from asyncflow.core.dispatch import Move, Run
from asyncflow.core.graph import DEVICE, Graph, Kind, Task
from asyncflow.core.plan import CONTROLLER
from asyncflow.core.schedules import cluster, schedule
from asyncflow.core.simulate import simulate
from asyncflow.core.trace import Span, Trace
from asyncflow.testing import HashedDurations, random_step, rl_step

SCORES = [Task(f"score/{n}", Kind.SCORE, shape="5s", judge="quality") for n in range(8)]
GRAPH = Graph([*SCORES, Task("decode/0", Kind.DECODE, inputs=("rollout/0.path",)), Task("rollout/0", Kind.ROLLOUT)])


def observed(*durations: tuple[int, float], table: CostTable | None = None) -> CostTable:
    """A table that has seen score batches of some sizes take some seconds on rank 2."""
    table = table or CostTable()
    for size, seconds in durations:
        trace = Trace()
        trace.ran(Run(1, tuple(task.id for task in SCORES[:size]), (2,)), GRAPH, 2, 10.0, 10.0 + seconds)
        table.observe(trace, GRAPH)
    return table


def test_a_cost_is_the_median_of_what_was_measured():
    assert observed((1, 3.0), (1, 1.0), (1, 100.0)).estimates().run(SCORES[:1], 2) == 3.0


def test_only_the_last_durations_count():
    table = observed((1, 100.0), (1, 1.0), (1, 2.0), (1, 3.0), table=CostTable(keep=3)).estimates()
    assert table.run(SCORES[:1], 2) == 2.0


def test_other_batches_lie_on_the_line_through_those_that_were_seen():
    table = observed((2, 3.0), (4, 4.0)).estimates()
    assert [table.run(SCORES[:n], 2) for n in (1, 2, 3, 4, 6)] == [2.5, 3.0, 3.5, 4.0, 5.0]


def test_from_one_size_others_are_in_proportion():
    """Which says nothing of what a batch takes by itself."""
    assert observed((2, 3.0)).estimates().run(SCORES[:4], 2) == 6.0
    assert observed((2, 3.0)).estimates().judging == {}


def test_the_number_of_digits_of_a_size_does_not_matter():
    table = observed((2, 3.0)).estimates()
    assert table.run([SCORES[0]] * 20, 2) == 30.0


def test_a_transfer_costs_by_what_moves():
    trace = Trace()
    trace.moved(Move(1, "rollout/0.path", 0, 1), 1.0, 1.5)
    table = CostTable()
    table.observe(trace, GRAPH)
    assert table.estimates().move("rollout/7.path", 3, 2) == 0.5


def test_a_transfer_that_was_not_seen_is_as_slow_as_the_slowest():
    trace = Trace()
    trace.moved(Move(1, "rollout/0.path", 0, 1), 1.0, 1.5)
    trace.moved(Move(2, "decode/0.frames", 0, 1), 1.0, 3.0)
    table = CostTable()
    assert table.estimates().move("rollout/7.log", 0, 1) == 0.0
    table.observe(trace, GRAPH)
    assert table.estimates().move("rollout/7.log", 0, 1) == 2.0


def test_a_rank_that_was_not_seen_takes_what_the_others_take():
    table = observed((2, 3.0), (4, 4.0)).estimates()
    assert [table.run(SCORES[:n], 7) for n in (2, 3, 4)] == [3.0, 3.5, 4.0]


@pytest.mark.parametrize(
    "change", [{"shape": "9s"}, {"judge": "motion"}, {"kind": Kind.COMPARE}], ids=["shape", "judge", "kind"]
)
def test_what_was_not_measured_is_unknown(change: dict[str, str]):
    task = msgspec.structs.replace(SCORES[0], **change)
    with pytest.raises(KeyError, match=rf"no cost was measured for {task.kind} '{task.shape}'"):
        observed((1, 1.0)).estimates().run([task], 2)


def test_a_table_survives_json():
    table = observed((1, 1.5), (3, 2.0))
    assert msgspec.json.decode(msgspec.json.encode(table), type=CostTable) == table


def test_two_tables_share_nothing():
    observed((1, 1.0))
    assert CostTable() == CostTable(runs={}, moves={})


class ByKind:
    """Durations that a table can hold: by rank, kind and size of batch, and by what moves; the controller's too."""

    def run(self, tasks, rank: int) -> float:
        return HashedDurations(7, (1.0, 2.5, 4.25)).run([Task("x", tasks[0].kind)] * len(tasks), abs(rank))

    def move(self, tensor: str, source: int, target: int) -> float:
        return {"path": 0.25, "frames": 0.5}[tensor.rpartition(".")[2]]


def test_a_simulated_step_teaches_the_table_to_simulate_it_again():
    graph, plan = schedule("async-reward", rl_step(3, 2, 2), cluster("async-reward", 3, 1), judge_batch=3)
    trace = simulate(graph, plan, ByKind())
    table = CostTable()
    table.observe(trace, graph)
    assert simulate(graph, plan, table.estimates()) == trace


def test_every_span_of_a_random_step_has_a_cost_afterwards():
    graph, plan = random_step(Random(3), ranks=3, size=40)
    trace = simulate(graph, plan, HashedDurations(3, (1.0, 2.0)))
    table = CostTable()
    table.observe(trace, graph)
    table = table.estimates()
    for span in trace.spans:
        if span.lane == DEVICE:
            assert table.run([graph[name] for name in span.tasks], span.rank) >= 0.0
        else:
            assert table.move(f"{span.tasks[0]}.{span.name}", 0, 1) >= 1.0


@pytest.mark.parametrize(("medians", "line"), [
    ({1: 109.0, 4: 136.0, 8: 172.0}, BatchSeconds(100.0, 9.0)),
    ({1: 2.0, 2: 3.0, 3: 7.0}, BatchSeconds(0.0, 29 / 14)),
    ({2: 3.0, 4: 1.0}, BatchSeconds(2.0, 0.0)),
])  # fmt: skip
def test_what_a_judge_s_batches_take_is_a_line(medians: dict[int, float], line: BatchSeconds):
    """Least squares through all sizes; it neither falls nor begins below 0, whatever noise the medians have."""
    fitted = observed(*medians.items()).estimates().judging["score/quality"]
    assert (fitted.batch, fitted.each) == pytest.approx((line.batch, line.each))


def test_what_a_judge_that_is_apart_takes_is_measured_too():
    """Else no step with it could be predicted, nor a plan be searched."""
    graph = Graph([msgspec.structs.replace(task, apart=True) for task in SCORES] + list(GRAPH)[len(SCORES) :])
    trace, table = Trace(), CostTable()
    trace.ran(Run(1, ("score/0", "score/1"), (2,)), graph, 2, 10.0, 13.0)
    table.observe(trace, graph)
    assert [span.lane for span in trace.spans] == ["judge quality"]
    assert table.estimates().run([graph["score/0"], graph["score/1"]], 2) == 3.0


def test_a_size_that_was_seen_often_pulls_the_line():
    """As much as its number says; an outlier among its durations does not, since its median stands for them."""
    once = observed((1, 1.0), (2, 2.0), (4, 10.0)).estimates().judging["score/quality"]
    often = observed((1, 1.0), (2, 2.0), (2, 2.0), (2, 900.0), (4, 10.0)).estimates().judging["score/quality"]
    assert abs(often.of(2) - 2.0) < abs(once.of(2) - 2.0)


def test_a_rank_that_saw_one_size_takes_the_line_of_all():
    table = observed((2, 3.0), (4, 4.0))
    table.observe(Trace([Span(5, DEVICE, "score", ("score/0", "score/1"), 0.0, 3.0, 1)]), GRAPH)
    assert [table.estimates().run(SCORES[:n], 5) for n in (2, 6)] == [3.0, pytest.approx(5.0)]


def test_the_spread_of_what_was_measured():
    """Of all ranks together, by kind, judge, shape and batch; a transfer counts once, though it has two ends."""
    table = observed((2, 3.0), (2, 1.0), (2, 2.0))
    trace = Trace()
    trace.moved(Move(1, "rollout/0.path", 0, 1), 1.0, 1.5)
    trace.ran(Run(2, ("score/0", "score/1"), (3,)), GRAPH, 3, 0.0, 22.0)
    table.observe(trace, GRAPH)
    scores, moves = table.spreads()
    assert scores == Spread("score/quality", "5s", 2, 2.5, pytest.approx(1.15), pytest.approx(19.15), 4)
    assert moves == Spread("rollout.path", "", 1, 0.5, 0.5, 0.5, 1)


def test_the_sum_of_a_gang_is_what_it_took_the_rank_that_came_last():
    """The others waited for that one; nor is it a guess for tensors that never moved."""
    graph, trace, table = Graph([Task("update/0", Kind.UPDATE)]), Trace(), CostTable()
    run = Run(1, ("update/0",), (0, 1), sequence=4)
    for rank, began in ((0, 1.0), (1, 4.5)):
        trace.ran(run, graph, rank, 0.0, 6.0)
        trace.summed(run, rank, began, 5.0)
    table.observe(trace, graph)
    assert table.spreads()[-1] == Spread("update.sum", "", 1, 0.5, 0.5, 0.5, 1)
    assert table.estimates().move("rollout/0.path", 0, 1) == 0.0


def test_a_rank_that_never_caught_up_takes_what_an_update_takes():
    """Its own, or that of others if it took part in none; until it has, or until somebody states it."""
    tasks = [Task("update/0", Kind.UPDATE), Task("catch-up/0/2", Kind.CATCH_UP)]
    update, catch_up = tasks
    graph, trace, table = Graph(tasks), Trace(), CostTable()
    trace.ran(Run(1, ("update/0",), (0, 1)), graph, 0, 0.0, 2.0)
    trace.ran(Run(1, ("update/0",), (0, 1)), graph, 1, 0.0, 4.0)
    table.observe(trace, graph)
    assert [table.estimates().run([catch_up], rank) for rank in (0, 1, 2)] == [2.0, 4.0, 3.0]
    caught_up = Trace()
    caught_up.ran(Run(2, ("catch-up/0/2",), (2,)), graph, 2, 0.0, 1.0)
    table.observe(caught_up, graph)
    assert [table.estimates().run([task], 3) for task in (catch_up, update)] == [1.0, 3.0]
    assert StatedCosts({"update": 2.0}).run([catch_up], 2) == 2.0
    assert StatedCosts({"update": 2.0, "catch-up": 0.5}).run([catch_up], 2) == 0.5


def test_what_stopped_early_is_no_cost():
    table = CostTable()
    table.observe(Trace([Span(2, DEVICE, "score", ("score/0",), 0.0, 1.0, 1, cancelled=True)]), GRAPH)
    assert table == CostTable()


def test_what_the_controller_computes_need_not_be_measured():
    assert CostTable().estimates().run([Task("barrier/scoring", Kind.BARRIER)], CONTROLLER) == 0.0


def test_stated_costs():
    """By kind, by judge where that is stated, for each task or for a batch; the same on every rank."""
    costs = StatedCosts({"score": 2.0, "score/quality": BatchSeconds(10.0, 1.0), "decode": 3.0}, transfer=0.5)
    other = msgspec.structs.replace(SCORES[0], judge="motion")
    assert [costs.run(SCORES[:n], 0) for n in (1, 3)] == [11.0, 13.0]
    assert [costs.run([other] * n, 1) for n in (1, 3)] == [2.0, 6.0]
    assert costs.run([GRAPH["decode/0"]], 2) == 3.0
    assert costs.run([Task("advantage/0", Kind.ADVANTAGE)], CONTROLLER) == 0.0
    assert costs.move("rollout/0.path", 0, 1) == 0.5
    with pytest.raises(KeyError, match="no cost is stated for rollout"):
        costs.run([GRAPH["rollout/0"]], 0)
