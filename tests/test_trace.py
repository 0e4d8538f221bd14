"""What a trace says of a rank: how busy it was, and what it waited for."""

from random import Random

import pytest

from asyncflow.core.dispatch import Move, Run
from asyncflow.core.graph import DEVICE, Graph, Kind, Task
from asyncflow.core.plan import CONTROLLER
from asyncflow.core.simulate import simulate
from asyncflow.core.trace import TRANSFER, Span, Trace, busy_share, waited_for
from asyncflow.testing import HashedDurations, random_step

GRAPH = Graph(
    [
        Task("rollout/0", Kind.ROLLOUT),
        Task("decode/0", Kind.DECODE, inputs=("rollout/0.path",)),
        Task("score/0", Kind.SCORE, inputs=("decode/0.frames",)),
        Task("score/apart", Kind.SCORE, inputs=("decode/0.frames",), judge="a", apart=True),
        Task("reward/0", Kind.REWARD, values=("score/0", "score/apart")),
        Task("barrier/0", Kind.BARRIER, after=("reward/0",)),
        Task("replay/0", Kind.REPLAY, inputs=("rollout/0.path",), after=("barrier/0",)),
        Task("rollout/1", Kind.ROLLOUT),
        Task("update/0", Kind.UPDATE, values=("replay/0",)),
    ]
)


def trace(*spans: tuple[str, int, float, float], moves: tuple[tuple[str, int, int, float, float], ...] = ()) -> Trace:
    """A trace of (task, rank, start, end) and of transfers (tensor, source, target, start, end)."""
    made = Trace()
    tickets: dict[str, int] = {}
    for task, rank, start, end in spans:
        made.ran(Run(tickets.setdefault(task, len(tickets) + 1), (task,), (rank,)), GRAPH, rank, start, end)
    for number, (tensor, source, target, start, end) in enumerate(moves, 1):
        made.moved(Move(number, tensor, source, target), start, end)
    made.sort()
    return made


def test_the_busy_share_is_the_part_of_the_step_in_which_a_task_ran():
    made = trace(("rollout/0", 0, 1.0, 3.0), ("decode/0", 0, 3.0, 4.0), ("score/0", 1, 4.0, 8.0))
    assert [busy_share(made, rank) for rank in (0, 1, 2)] == [3 / 8, 4 / 8, 0.0]
    assert busy_share(Trace(), 0) == 0.0


def test_transfers_do_not_make_a_rank_busy_but_last():
    made = trace(("rollout/0", 0, 0.0, 2.0), moves=(("rollout/0.path", 0, 1, 2.0, 4.0),))
    assert made.seconds == 4.0
    assert busy_share(made, 0) == 0.5


def test_spans_are_sorted_by_command_and_rank():
    made = trace(("rollout/0", 1, 1.0, 2.0), ("decode/0", 0, 0.0, 1.0), moves=(("rollout/0.path", 1, 0, 2.0, 4.0),))
    assert made.spans == [
        Span(1, DEVICE, "rollout", ("rollout/0",), 1.0, 2.0, 1),
        Span(0, DEVICE, "decode", ("decode/0",), 0.0, 1.0, 2),
        Span(0, TRANSFER, "path", ("rollout/0",), 2.0, 4.0, 1),
        Span(1, TRANSFER, "path", ("rollout/0",), 2.0, 4.0, 1),
    ]


def test_a_gap_is_charged_to_the_task_that_ended_last():
    made = trace(("rollout/0", 0, 0.0, 3.0), ("decode/0", 1, 3.0, 4.0))
    assert waited_for(made, GRAPH, 1) == {"rollout": 3.0}
    assert waited_for(made, GRAPH, 0) == {"end of step": 1.0}


def test_a_gap_is_charged_to_the_transfer_that_came_after_it():
    made = trace(("rollout/0", 0, 0.0, 3.0), ("decode/0", 1, 5.0, 6.0), moves=(("rollout/0.path", 0, 1, 3.0, 5.0),))
    assert waited_for(made, GRAPH, 1) == {"transfer": 5.0}


def test_a_transfer_to_others_is_nothing_to_wait_for():
    made = trace(
        ("rollout/0", 0, 0.0, 1.0),
        ("score/0", 1, 0.0, 2.0),
        ("reward/0", CONTROLLER, 2.0, 2.0),
        ("barrier/0", CONTROLLER, 2.0, 2.0),
        ("replay/0", 0, 4.0, 5.0),
        moves=(("rollout/0.path", 0, 1, 1.0, 3.0),),
    )
    assert waited_for(made, GRAPH, 0) == {"score": 3.0}


def test_what_the_controller_computes_is_charged_to_what_it_waited_for():
    made = trace(
        ("score/0", 1, 0.0, 5.0),
        ("reward/0", CONTROLLER, 5.0, 5.0),
        ("barrier/0", CONTROLLER, 5.0, 5.0),
        ("rollout/0", 0, 0.0, 2.0),
        ("replay/0", 0, 5.0, 7.0),
    )
    assert waited_for(made, GRAPH, 0) == {"score": 3.0}


def test_a_gang_that_waits_for_another_rank_is_charged_to_the_gang():
    made = trace(
        ("replay/0", 0, 0.0, 2.0),
        ("rollout/1", 1, 0.0, 5.0),
        ("update/0", 0, 5.0, 6.0),
        ("update/0", 1, 5.0, 6.0),
    )
    assert waited_for(made, GRAPH, 0) == {"gang": 3.0}
    assert waited_for(made, GRAPH, 1) == {}


def test_a_gang_that_waits_for_its_needs_is_charged_to_them():
    made = trace(
        ("rollout/1", 0, 0.0, 1.0), ("replay/0", 1, 0.0, 5.0), ("update/0", 0, 5.0, 6.0), ("update/0", 1, 5.0, 6.0)
    )
    assert waited_for(made, GRAPH, 0) == {"replay": 4.0}


def test_a_device_waits_for_a_judge_that_is_apart():
    """Even one of its own rank, which keeps it no busier."""
    made = trace(
        ("decode/0", 0, 0.0, 1.0), ("score/apart", 0, 1.0, 5.0), ("reward/0", CONTROLLER, 5.0, 5.0),
        ("barrier/0", CONTROLLER, 5.0, 5.0), ("replay/0", 0, 5.0, 8.0),
    )  # fmt: skip
    assert waited_for(made, GRAPH, 0) == {"score": 4.0}
    assert (busy_share(made, 0), busy_share(made, 0, "judge a")) == (0.5, 0.5)


def test_a_gap_without_a_reason_is_the_dispatch():
    made = trace(("rollout/0", 0, 0.25, 1.0), ("rollout/1", 0, 1.5, 2.0))
    assert waited_for(made, GRAPH, 0) == {"dispatch": 0.75}


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_is_busy_or_waits_for_something(seed: int):
    """In a simulation nothing is idle without a reason, and the reasons account for all idle time."""
    graph, plan = random_step(Random(seed), ranks=3, size=30)
    made = simulate(graph, plan, HashedDurations(seed, (1.0, 2.0, 3.0)))
    for rank in range(3):
        waits = waited_for(made, graph, rank)
        assert sum(waits.values()) + busy_share(made, rank) * made.seconds == pytest.approx(made.seconds)
        assert all(seconds > 0 for seconds in waits.values())


def test_an_idle_rank_waits_for_the_end_of_the_step():
    assert waited_for(trace(("rollout/0", 0, 0.0, 2.0)), GRAPH, 1) == {"end of step": 2.0}
