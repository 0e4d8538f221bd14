"""What ran when: the record of a step, measured or simulated, and what can be read off it.

Invariant: on one lane of a rank spans do not overlap. The controller and the simulator make traces of this one type.
"""

import msgspec

from asyncflow.core.dispatch import Move, Run
from asyncflow.core.graph import DEVICE, LOCAL_KINDS, Graph
from asyncflow.core.plan import CONTROLLER

TRANSFER = "transfer"
SUM = "sum"


class Span(msgspec.Struct, frozen=True):
    """One command on one lane, from `start` to `end` in seconds since the step began.

    `lane` is that of its tasks or "transfer"; a transfer stands on the lanes of both its ends, and a gang's sum, with
    the wait for the last of its ranks, on those of all. `name` is a kind, the part of a tensor that moves, or "sum".
    `tasks` are the tasks that ran, or the one that made the tensor. What was `cancelled` stopped early.
    """

    rank: int
    lane: str
    name: str
    tasks: tuple[str, ...]
    start: float
    end: float
    number: int
    cancelled: bool = False


class Trace(msgspec.Struct):
    """The spans of one step in the order of the dispatcher's commands, and how many seconds the step took.

    `invalid` gives the reason for each task whose outcome is invalid.
    """

    spans: list[Span] = []
    seconds: float = 0.0
    invalid: dict[str, str] = {}

    def ran(self, run: Run, graph: Graph, rank: int, start: float, end: float, *, cancelled: bool = False) -> None:
        """Record a run command on one of its ranks."""
        task = graph[run.tasks[0]]
        self.spans.append(Span(rank, task.lane, task.kind, run.tasks, start, end, run.ticket, cancelled))
        self.seconds = max(self.seconds, end)

    def moved(self, move: Move, start: float, end: float) -> None:
        """Record a transfer on both its ranks."""
        owner, _, part = move.tensor.rpartition(".")
        for rank in (move.source, move.target):
            self.spans.append(Span(rank, TRANSFER, part, (owner,), start, end, move.sequence))
        self.seconds = max(self.seconds, end)

    def summed(self, run: Run, rank: int, start: float, end: float) -> None:
        """Record a gang's sum on one of its ranks."""
        self.spans.append(Span(rank, TRANSFER, SUM, run.tasks, start, end, run.sequence))

    def sort(self) -> None:
        """Put the spans in the order of the commands: by kind of lane, then by ticket or sequence number."""
        self.spans.sort(key=lambda span: (span.lane, span.number, span.rank))

    def on(self, rank: int, lane: str = DEVICE) -> list[Span]:
        """The spans of one of a rank's lanes, by time."""
        return sorted((s for s in self.spans if (s.rank, s.lane) == (rank, lane)), key=lambda s: (s.start, s.number))

    def lanes(self) -> list[tuple[int, str]]:
        """The lanes on which ranks ran tasks, with the rank of each: its device first."""
        return sorted({(s.rank, s.lane) for s in self.spans if s.lane != TRANSFER and s.rank != CONTROLLER})


def busy_share(trace: Trace, rank: int, lane: str = DEVICE) -> float:
    """The part of the step, from 0 to 1, in which the rank's lane ran a task."""
    return sum(span.end - span.start for span in trace.on(rank, lane)) / trace.seconds if trace.seconds else 0.0


def waited_for(trace: Trace, graph: Graph, rank: int) -> dict[str, float]:
    """The idle seconds of a rank's device by what they were spent waiting for.

    The gap before a span is charged to what came last: the kind of the task it needed, "transfer" if the move of an
    input was later still, "gang" if it waited for the other ranks of a gang to be idle, "dispatch" if nothing was
    missing but the word to start. The gap after a rank's last task is "end of step".
    """
    ends = {name: span.end for span in trace.spans if span.lane != TRANSFER for name in span.tasks}
    made_here = {name for span in trace.on(rank) for name in span.tasks}
    moves = {
        f"{span.tasks[0]}.{span.name}": span.end
        for span in trace.spans
        if span.lane == TRANSFER and span.rank == rank and span.tasks[0] not in made_here
    }

    def last_input(name: str) -> tuple[float, str]:
        task = graph[name]
        came = [(moves[tensor], "transfer") for tensor in task.inputs if tensor in moves]
        for other in sorted(task.predecessors & ends.keys()):
            kind = graph[other].kind  # barriers and scalars take no time: what they waited for is the reason
            reason = last_input(other)[1] if kind in LOCAL_KINDS else str(kind)
            came.append((ends[other], reason))
        return max(came, default=(0.0, "dispatch"))

    waits: dict[str, float] = {}
    free = 0.0
    for span in trace.on(rank):
        if span.start > free:
            gang = [
                (max((s.end for s in trace.on(other.rank) if s.end <= span.start), default=0.0), "gang")
                for other in trace.spans
                if other.lane == DEVICE and other.number == span.number and other.rank != rank
            ]
            reason = max([(free, "dispatch"), *map(last_input, span.tasks), *gang], key=lambda pair: pair[0])[1]
            waits[reason] = waits.get(reason, 0.0) + span.start - free
        free = max(free, span.end)
    if trace.seconds > free:
        waits["end of step"] = trace.seconds - free
    return waits
