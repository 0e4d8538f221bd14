"""The simulator: drives the dispatcher with a heap instead of processes, and returns the trace it would leave.

Invariant: for equal durations the controller's trace is this one, order and ties included. Of the events that fall on
one moment, what the controller computed comes first, since it knows that at once, then the others in the order in which
they were scheduled.
"""

from collections import defaultdict
from heapq import heappop, heappush
from itertools import count
from math import inf

from asyncflow.core.cost import Durations
from asyncflow.core.dispatch import Abort, Begin, Cancel, Command, Dispatcher, Done, Drop, Event, Move, Moved, Run
from asyncflow.core.graph import JUDGE_KINDS, Graph
from asyncflow.core.plan import CONTROLLER, Plan
from asyncflow.core.trace import Trace

ROUNDING = 1e-9
"""The relative error that a sum of seconds may have."""


def simulate(graph: Graph, plan: Plan, durations: Durations, *, limit: float = inf) -> Trace:
    """The trace of one step in which every task and transfer takes what `durations` says.

    A rank launches its transfers in the order of their numbers, one at a time, and a transfer needs both its ends; a
    gang's collective holds its ranks' transfer lanes until the gang ends. A step of more than `limit` seconds is given
    up as soon as a rank has too much left to do, and its trace says that it took forever.
    """
    limit *= 1 + ROUNDING
    left = _work(graph, plan, durations) if limit < inf else defaultdict(float)
    if max(left.values(), default=0.0) > limit:
        return Trace(seconds=inf)
    trace = Trace()
    dispatcher = Dispatcher(graph, plan)
    heap: list[tuple[float, bool, int, Event]] = []
    order = count()
    lane_free: dict[int, float] = defaultdict(float)

    def carry_out(command: Command, now: float) -> None:
        match command:
            case Run():
                tasks = [graph[name] for name in command.tasks]
                for rank in command.ranks:
                    seconds = durations.run(tasks, rank)
                    end = now + seconds
                    trace.ran(command, graph, rank, now, end)
                    if tasks[0].kind not in JUDGE_KINDS:
                        left[rank] -= seconds
                    if end + (0.0 if tasks[0].apart else left[rank]) > limit:
                        trace.seconds = inf
                    if command.sequence:
                        lane_free[rank] = max(lane_free[rank], end)
                    heappush(heap, (end, rank != CONTROLLER, next(order), Done(command.ticket, rank)))
            case Move(sequence, tensor, source, target):
                start = max(now, lane_free[source], lane_free[target])
                end = start + durations.move(tensor, source, target)
                lane_free[source] = lane_free[target] = end
                trace.moved(command, start, end)
                heappush(heap, (end, True, next(order), Moved(sequence)))
            case Drop() | Cancel() | Abort():
                pass

    for command in dispatcher.on(Begin()):
        carry_out(command, 0.0)
    while heap and trace.seconds < inf:
        now, *_, event = heappop(heap)
        for command in dispatcher.on(event):
            carry_out(command, now)
    assert dispatcher.finished or trace.seconds == inf, "the plan deadlocks: tasks are left, and nothing runs"
    trace.sort()
    return trace


def _work(graph: Graph, plan: Plan, durations: Durations) -> dict[int, float]:
    """The seconds that each rank must run; not those of judging, which depend on the batches."""
    work: dict[int, float] = defaultdict(float)
    for task in graph:
        if task.kind not in JUDGE_KINDS:
            for rank in plan.ranks[task.id]:
                work[rank] += durations.run([task], rank)
    return work
