"""The simulator: drives the dispatcher with a heap instead of processes, and returns the trace it would leave.

Invariant: for equal durations the controller's trace is this one, order and ties included. Of the events that fall on
one moment, what the controller computed comes first, since it knows that at once, then the others in the order in which
they were scheduled.
"""

from collections import defaultdict
from heapq import heappop, heappush
from itertools import count

from asyncflow.core.cost import Durations
from asyncflow.core.dispatch import Abort, Begin, Command, Dispatcher, Done, Drop, Event, Move, Moved, Run
from asyncflow.core.graph import Graph
from asyncflow.core.plan import CONTROLLER, Plan
from asyncflow.core.trace import Trace


def simulate(graph: Graph, plan: Plan, durations: Durations) -> Trace:
    """The trace of one step in which every task and transfer takes what `durations` says.

    A rank launches its transfers in the order of their numbers, one at a time, and a transfer needs both its ends; a
    gang's collective holds its ranks' transfer lanes until the gang ends.
    """
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
                    end = now + durations.run(tasks, rank)
                    trace.ran(command, graph, rank, now, end)
                    if command.sequence:
                        lane_free[rank] = max(lane_free[rank], end)
                    heappush(heap, (end, rank != CONTROLLER, next(order), Done(command.ticket, rank)))
            case Move(sequence, tensor, source, target):
                start = max(now, lane_free[source], lane_free[target])
                end = start + durations.move(tensor, source, target)
                lane_free[source] = lane_free[target] = end
                trace.moved(command, start, end)
                heappush(heap, (end, True, next(order), Moved(sequence)))
            case Drop() | Abort():
                pass

    for command in dispatcher.on(Begin()):
        carry_out(command, 0.0)
    while heap:
        now, *_, event = heappop(heap)
        for command in dispatcher.on(event):
            carry_out(command, now)
    assert dispatcher.finished, "the plan deadlocks: tasks are left, and nothing runs"
    trace.sort()
    return trace
