"""How long tasks and transfers take: measured durations and the estimate made from them, or what a person states.

The controller feeds a table with every step's trace; the simulator asks it. All times are seconds.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, linear_regression, median, quantiles
from typing import Annotated, NamedTuple, Protocol

import msgspec

from asyncflow.core.graph import LOCAL_KINDS, Graph, Kind, Task
from asyncflow.core.trace import SUM, TRANSFER, Trace

Seconds = Annotated[float, msgspec.Meta(ge=0)]

ANY = ""
"""In place of a rank: all of them."""


class Durations(Protocol):
    """What the simulator asks."""

    def run(self, tasks: Sequence[Task], rank: int) -> float:
        """Seconds that `rank` needs for `tasks`, which are one judge batch if they are several."""

    def move(self, tensor: str, source: int, target: int) -> float:
        """Seconds from the launch of a transfer to its arrival."""


class BatchSeconds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a judge batch takes: `batch` seconds, and `each` more for every task in it."""

    batch: Seconds
    each: Seconds

    def of(self, size: int) -> float:
        """Seconds of a batch of `size` tasks."""
        return self.batch + self.each * size


class Spread(NamedTuple):
    """What was measured of one row of a table, on all ranks together, in seconds."""

    what: str
    """A kind, with a judge's name as kind/judge; of a transfer kind.part, the kind of the task that made the tensor."""
    shape: str
    batch: int
    median: float
    p5: float
    p95: float
    number: int


class CostTable(msgspec.Struct):
    """The last `keep` durations of each (rank, kind, shape, judge, batch) and of each kind of transfer.

    Of a gang's sum that of the rank which came last counts, since the others waited. It is a part of what the update
    takes, too.
    """

    runs: dict[str, list[float]] = {}
    moves: dict[str, list[float]] = {}
    keep: int = 32

    def observe(self, trace: Trace, graph: Graph) -> None:
        """Add the durations of a measured step, but for what stopped early."""
        moved: dict[tuple[int, str], float] = {}
        for span in trace.spans:
            task = graph[span.tasks[0]]
            if span.lane == TRANSFER:  # it stands on all its ranks
                transfer = span.number, f"{task.kind}.{span.name}"
                moved[transfer] = min(moved.get(transfer, math.inf), span.end - span.start)
            elif not span.cancelled:
                key = run_key(span.rank, task, len(span.tasks))
                self.runs[key] = [*self.runs.get(key, []), span.end - span.start][-self.keep :]
        for (_, key), seconds in moved.items():
            self.moves[key] = [*self.moves.get(key, []), seconds][-self.keep :]

    def estimates(self) -> "Estimates":
        """What the table says now, for a simulation or many."""
        return Estimates(self.runs, self.moves)

    def spreads(self) -> list[Spread]:
        """Medians and percentiles of all that was measured, in the order in which it first was."""
        rows: dict[tuple[str, str, int], list[float]] = defaultdict(list)
        for key, seconds in self.runs.items():
            _, row, size = _parts(key)
            kind, shape, judge = row.split("|")
            if kind not in LOCAL_KINDS:
                rows[f"{kind}/{judge}" if judge else kind, shape, size] += seconds
        for part, seconds in self.moves.items():
            rows[part, "", 1] += seconds
        return [_spread(*row, seconds) for row, seconds in rows.items()]


class Estimates:
    """The medians of a table, as `Durations`, and what follows from them for what was not measured.

    Costs are kept for each rank, since GPUs may be unequal; a rank that never ran such a task is thought to take what
    the others take. A judge batch of a size that was not seen lies on the line that fits the others. A tensor that
    never moved is thought to take what the slowest took, and a rank that never caught up what an update takes.
    """

    def __init__(self, runs: Mapping[str, Sequence[float]], moves: Mapping[str, Sequence[float]]) -> None:
        self.medians = {key: median(seconds) for key, seconds in (*runs.items(), *moves.items())}
        """Everything that was measured, by the rows of the table."""
        tensors = (part for part in moves if not part.endswith(f".{SUM}"))
        self._slowest_move = max((self.medians[part] for part in tensors), default=0.0)
        sizes: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for key, seconds in runs.items():
            rank, row, size = _parts(key)
            sizes[rank, row][size] += seconds
            sizes[ANY, row][size] += seconds
        self._lines = {
            (rank, row): _line(sizes[ANY, row] if len(seen) == 1 < len(sizes[ANY, row]) else seen)
            for (rank, row), seen in sizes.items()
        }
        kinds = {row: row.split("|") for rank, row in sizes if rank == ANY and len(sizes[rank, row]) > 1}
        self.judging = {f"{kind}/{judge}": self._lines[ANY, row] for row, (kind, _, judge) in kinds.items()}
        """By kind/judge the line that fits its batches, where more than one size of them was seen, on all ranks."""

    def run(self, tasks: Sequence[Task], rank: int) -> float:
        """See `Durations`. Raises KeyError if no task of this kind and shape was measured, but for the controller's."""
        task = tasks[0]
        seconds = self.row(run_key(rank, task, len(tasks)))
        if seconds is None and task.kind not in LOCAL_KINDS:
            raise KeyError(f"no cost was measured for {task.kind} {task.shape!r}")
        return seconds or 0.0

    def row(self, key: str) -> float | None:
        """The seconds of a row of the table, whether it is there or not; None if nothing like it is."""
        if key in self.medians or "|" not in key:
            return self.medians.get(key)
        rank, row, size = _parts(key)
        rows = (row, row.replace(Kind.CATCH_UP, Kind.UPDATE))
        lines = (self._lines.get(place) for row in rows for place in ((rank, row), (ANY, row)))
        line = next(filter(None, lines), None)
        return line.of(size) if line else None

    def move(self, tensor: str, source: int, target: int) -> float:
        """See `Durations`; the ranks are of one host and one kind of link, so they do not matter."""
        owner, _, part = tensor.rpartition(".")
        kind = owner.partition("/")[0]
        return self.medians.get(f"{kind}.{part}", self._slowest_move)


def _spread(what: str, shape: str, batch: int, seconds: Sequence[float]) -> Spread:
    cuts = quantiles(seconds, n=20, method="inclusive") if len(seconds) > 1 else seconds
    return Spread(what, shape, batch, median(seconds), cuts[0], cuts[-1], len(seconds))


def _parts(key: str) -> tuple[str, str, int]:
    """The rank, the kind with shape and judge, and the size of the batch."""
    rank, _, rest = key.partition("|")
    row, _, size = rest.rpartition("|")
    return rank, row, int(size)


def _line(sizes: Mapping[int, Sequence[float]]) -> BatchSeconds:
    """Least squares through the medians of the sizes, each as often as it was seen; neither part is below 0.

    From one size the others are in proportion.
    """
    seen = [(size, median(seconds)) for size, seconds in sizes.items() for _ in seconds]
    if len(sizes) > 1:
        each, batch = linear_regression(*zip(*seen, strict=True))
        if each < 0.0:
            return BatchSeconds(fmean(seconds for _, seconds in seen), 0.0)
        if batch >= 0.0:
            return BatchSeconds(batch, each)
    return BatchSeconds(0.0, sum(n * seconds for n, seconds in seen) / sum(n * n for n, _ in seen))


class StatedCosts:
    """Durations by kind, or by kind/judge, as a person writes them, and of any transfer; alike for all ranks.

    What the controller computes takes no time; a catch-up takes what an update does, unless it is stated.
    """

    def __init__(self, seconds: Mapping[str, float | BatchSeconds], transfer: float = 0.0) -> None:
        self._seconds, self._transfer = seconds, transfer

    def run(self, tasks: Sequence[Task], rank: int) -> float:
        """See `Durations`. Raises KeyError if nothing is stated of this kind."""
        task = tasks[0]
        if task.kind in LOCAL_KINDS:
            return 0.0
        like = (Kind.CATCH_UP, Kind.UPDATE) if task.kind is Kind.CATCH_UP else (f"{task.kind}/{task.judge}", task.kind)
        stated = next((self._seconds[kind] for kind in like if kind in self._seconds), None)
        if stated is None:
            raise KeyError(f"no cost is stated for {task.kind}")
        if isinstance(stated, BatchSeconds):
            return stated.of(len(tasks))
        return stated * len(tasks)

    def move(self, tensor: str, source: int, target: int) -> float:
        """See `Durations`."""
        return self._transfer


def run_key(rank: int, task: Task, size: int) -> str:
    """The row of a table for `size` tasks like `task` on `rank`."""
    return f"{rank}|{task.kind}|{task.shape}|{task.judge}|{size}"
