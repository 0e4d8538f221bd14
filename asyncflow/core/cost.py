"""How long tasks and transfers take: measured durations and the estimate made from them, or what a person states.

The controller feeds a table with every step's trace; the simulator asks it. All times are seconds.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Annotated, Protocol

import msgspec

from asyncflow.core.graph import LOCAL_KINDS, Graph, Task
from asyncflow.core.trace import DEVICE, Trace

Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Durations(Protocol):
    """What the simulator asks."""

    def run(self, tasks: Sequence[Task], rank: int) -> float:
        """Seconds that `rank` needs for `tasks`, which are one judge batch if they are several."""

    def move(self, tensor: str, source: int, target: int) -> float:
        """Seconds from the launch of a transfer to its arrival."""


class CostTable(msgspec.Struct):
    """The last `keep` durations of each (rank, kind, shape, batch) and of each kind of transfer.

    Costs are kept for each rank, since GPUs may be unequal; a rank that never ran such a task is thought to take what
    the others take. A judge batch of a size that was not seen is estimated on the line through the medians of the sizes
    that were; from one size alone, in proportion. A tensor that never moved is thought to take what the slowest took.
    """

    runs: dict[str, list[float]] = {}
    moves: dict[str, list[float]] = {}
    keep: int = 32

    def observe(self, trace: Trace, graph: Graph) -> None:
        """Add the durations of a measured step."""
        for span in trace.spans:
            task = graph[span.tasks[0]]
            if span.lane == DEVICE:
                key = run_key(span.rank, task, len(span.tasks))
                self.runs[key] = [*self.runs.get(key, []), span.end - span.start][-self.keep :]
            else:
                key = f"{task.kind}.{span.name}"
                self.moves[key] = [*self.moves.get(key, []), span.end - span.start][-self.keep :]

    def estimates(self) -> "Estimates":
        """What the table says now, for a simulation or many."""
        return Estimates(
            {key: median(seconds) for key, seconds in self.runs.items()},
            {key: median(seconds) for key, seconds in self.moves.items()},
        )


class Estimates:
    """The medians of a table, as `Durations`."""

    def __init__(self, runs: dict[str, float], moves: dict[str, float]) -> None:
        self.medians = runs | moves
        """Everything that was measured, by the rows of the table."""
        self._moves = moves
        self._slowest_move = max(moves.values(), default=0.0)
        batches: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for key, seconds in runs.items():
            rank, kind, shape, judge, size = key.split("|")
            for row in (f"{rank}|{kind}|{shape}|{judge}", f"{kind}|{shape}|{judge}"):
                batches[row][int(size)].append(seconds)
        self._batches = {
            row: sorted((size, median(seconds)) for size, seconds in sizes.items()) for row, sizes in batches.items()
        }

    def run(self, tasks: Sequence[Task], rank: int) -> float:
        """See `Durations`. Raises KeyError if no task of this kind and shape was measured, but for the controller's."""
        task, size = tasks[0], len(tasks)
        key = run_key(rank, task, size)
        if key in self.medians:
            return self.medians[key]
        row = f"{task.kind}|{task.shape}|{task.judge}"
        known = self._batches.get(f"{rank}|{row}") or self._batches.get(row)
        if not known and task.kind in LOCAL_KINDS:
            return 0.0
        if not known:
            raise KeyError(f"no cost was measured for {task.kind} {task.shape!r}")
        (small, fast), (large, slow) = known[0], known[-1]
        if small == large:
            return fast * size / small
        return max(0.0, fast + (slow - fast) * (size - small) / (large - small))

    def move(self, tensor: str, source: int, target: int) -> float:
        """See `Durations`; the ranks are of one host and one kind of link, so they do not matter."""
        owner, _, part = tensor.rpartition(".")
        kind = owner.partition("/")[0]
        return self._moves.get(f"{kind}.{part}", self._slowest_move)


class BatchSeconds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a judge batch takes: `batch` seconds, and `each` more for every task in it."""

    batch: Seconds
    each: Seconds


class StatedCosts:
    """Durations by kind, or by kind/judge, as a person writes them, and of any transfer; alike for all ranks.

    What the controller computes takes no time.
    """

    def __init__(self, seconds: Mapping[str, float | BatchSeconds], transfer: float = 0.0) -> None:
        self._seconds, self._transfer = seconds, transfer

    def run(self, tasks: Sequence[Task], rank: int) -> float:
        """See `Durations`. Raises KeyError if nothing is stated of this kind."""
        task = tasks[0]
        if task.kind in LOCAL_KINDS:
            return 0.0
        stated = self._seconds.get(f"{task.kind}/{task.judge}", self._seconds.get(task.kind))
        if stated is None:
            raise KeyError(f"no cost is stated for {task.kind}")
        if isinstance(stated, BatchSeconds):
            return stated.batch + stated.each * len(tasks)
        return stated * len(tasks)

    def move(self, tensor: str, source: int, target: int) -> float:
        """See `Durations`."""
        return self._transfer


def run_key(rank: int, task: Task, size: int) -> str:
    """The row of a table for `size` tasks like `task` on `rank`."""
    return f"{rank}|{task.kind}|{task.shape}|{task.judge}|{size}"
