"""How long tasks and transfers take: measured durations, and the estimate made from them.

The controller feeds a table with every step's trace; the simulator asks it. All times are seconds.
"""

from collections.abc import Sequence
from statistics import median
from typing import Protocol

import msgspec

from asyncflow.core.graph import Graph, Task
from asyncflow.core.trace import DEVICE, Trace


class Durations(Protocol):
    """What the simulator asks."""

    def run(self, tasks: Sequence[Task], rank: int) -> float:
        """Seconds that `rank` needs for `tasks`, which are one judge batch if they are several."""

    def move(self, tensor: str, source: int, target: int) -> float:
        """Seconds from the launch of a transfer to its arrival."""


class CostTable(msgspec.Struct):
    """The last `keep` durations of each (rank, kind, shape, batch) and of each kind of transfer.

    Costs are kept for each rank, since GPUs may be unequal. A judge batch of a size that was not seen is estimated on
    the line through the medians of the sizes that were; from one size alone, in proportion.
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

    def run(self, tasks: Sequence[Task], rank: int) -> float:
        """See `Durations`. Raises KeyError if no task of this rank, kind and shape was measured."""
        size = len(tasks)
        key = run_key(rank, tasks[0], size)
        if key in self.runs:
            return median(self.runs[key])
        stem = run_key(rank, tasks[0], 0).removesuffix("0")
        known = sorted((int(k.removeprefix(stem)), median(v)) for k, v in self.runs.items() if k.startswith(stem))
        if not known:
            raise KeyError(f"no cost was measured for {tasks[0].kind} {tasks[0].shape!r} on rank {rank}")
        (small, fast), (large, slow) = known[0], known[-1]
        if small == large:
            return fast * size / small
        return fast + (slow - fast) * (size - small) / (large - small)

    def move(self, tensor: str, source: int, target: int) -> float:
        """See `Durations`; the ranks are of one host and one kind of link, so they do not matter."""
        owner, _, part = tensor.rpartition(".")
        kind = owner.partition("/")[0]
        key = f"{kind}.{part}"
        if key not in self.moves:
            raise KeyError(f"no cost was measured for moving {key}")
        return median(self.moves[key])


def run_key(rank: int, task: Task, size: int) -> str:
    """The row of a table for `size` tasks like `task` on `rank`."""
    return f"{rank}|{task.kind}|{task.shape}|{task.judge}|{size}"
