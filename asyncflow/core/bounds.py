"""Lower bounds on the seconds of a step: what no placement and no order of a graph's tasks can beat.

Invariant: a bound is at most what `simulate` says of any plan of the cluster whose judge batches are no larger than
`judge_batch`, if durations depend on kind, shape, judge, size of a batch and rank alone, as those of a cost table do.
The best one holds for every variant of the graph; the training loop logs it beside what it predicts, and `asyncflow
plan` prints it.

The head of a task is the longest path before it and its tail the longest path after it, in seconds; each task counts
with the least it takes on any rank that can run it.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from graphlib import TopologicalSorter
from typing import NamedTuple

from asyncflow.core.catch_up import variants
from asyncflow.core.cost import Durations
from asyncflow.core.graph import JUDGE_KINDS, LOCAL_KINDS, Graph, Kind, Task, producer
from asyncflow.core.plan import Cluster, able

CUTS = (Kind.BARRIER, Kind.UPDATE)
"""What is before such a task and what is after it cannot overlap."""


class Bound(NamedTuple):
    """At least so many seconds, and the name of what says so: one of `bounds`, or several, a part of the step each."""

    seconds: float
    by: str


def bounds(graph: Graph, cluster: Cluster, durations: Durations, *, judge_batch: int) -> dict[str, float]:
    """Lower bounds on the seconds of a step, by name. Raises what `durations` raises.

    `path`: the longest chain of tasks, and of transfers between ranks that cannot be one. `ranks`, `policy`, `actors`,
    `judges`: the work that only the devices of these can do, shared evenly, after what each must wait for and before
    what must follow. A kind, with a judge's name: one rank gets at least its share of these tasks, rounded up.
    """
    return _Work(graph, cluster, durations, judge_batch).bounds(graph.tasks)


def best_bound(graph: Graph, cluster: Cluster, durations: Durations, *, judge_batch: int) -> Bound:
    """The largest lower bound that holds for every variant of `graph`."""
    works = (_Work(variant, cluster, durations, judge_batch) for variant in variants(graph, cluster))
    return min(map(_best, works), key=_seconds)


def _best(work: "_Work") -> Bound:
    """The largest lower bound: of the whole graph, or summed over the parts between its barriers and updates."""
    graph = work.graph
    best = work.best(graph.tasks)
    cuts = [name for name in work.order if graph[name].kind in CUTS]
    after = {cut: _reach(cut, graph.successors.__getitem__) for cut in cuts}
    reached: dict[str, Bound] = {}
    for cut in cuts:
        until = _reach(cut, lambda name: graph[name].predecessors) | {cut}
        ways = [work.best(until)]
        ways += [_add(reached[name], work.best(until & after[name])) for name in reached if name in until]
        reached[cut] = max(ways, key=_seconds)
        best = max(best, _add(reached[cut], work.best(after[cut])), key=_seconds)
    return best


def _seconds(bound: Bound) -> float:
    return bound.seconds


def _add(one: Bound, other: Bound) -> Bound:
    return Bound(one.seconds + other.seconds, f"{one.by}, {other.by}") if other.seconds else one


def _reach(start: str, neighbours: Callable[[str], Iterable[str]]) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        new = set(neighbours(left.pop())) - found
        found |= new
        left += new
    return found


class Row(NamedTuple):
    """What tasks that cost the same have in common; a judge takes those of any shape in one batch."""

    kind: Kind
    shape: str
    judge: str
    apart: bool


class _Work:
    """What the tasks of a graph take at least, and the bounds of any part of it."""

    def __init__(self, graph: Graph, cluster: Cluster, durations: Durations, judge_batch: int) -> None:
        self.order = list(TopologicalSorter({task.id: task.predecessors for task in graph}).static_order())
        self.graph = graph
        self._able = {task.kind: able(task, graph, cluster) for task in graph}
        roles = {"ranks": cluster.ranks, "policy": cluster.policy, "actors": cluster.actors, "judges": cluster.judges}
        first = {ranks: name for name, ranks in reversed(roles.items())}  # of roles that are the same ranks
        self._roles = {name: ranks for name, ranks in roles.items() if first[ranks] == name}
        rows: dict[Row, list[Task]] = defaultdict(list)
        for task in graph:
            rows[_row(task)].append(task)
        self._least = {
            row: self._at_least(tasks, durations, judge_batch if row.kind in JUDGE_KINDS else 1)
            for row, tasks in rows.items()
        }
        self._gang = {
            name: {rank: durations.run([graph[name]], rank) for rank in self._able[Kind.UPDATE]}
            for name in graph.gangs
        }
        self._seconds = {task.id: self._least[_row(task)][1] for task in graph}
        self._seconds |= {name: max(seconds.values()) for name, seconds in self._gang.items()}
        self._before: dict[str, dict[str, float]] = {}
        """Of each task what it waits for, and how long a tensor must travel in between."""
        self._after: dict[str, dict[str, float]] = {name: {} for name in graph.tasks}
        for task in graph:
            lags = dict.fromkeys(task.predecessors, 0.0)
            for tensor in task.inputs if task.id not in graph.gangs else ():
                maker = producer(tensor)
                lags[maker] = max(lags[maker], self._travel(tensor, task, durations))
            self._before[task.id] = lags
            for name, lag in lags.items():
                self._after[name][task.id] = lag

    def best(self, part: Collection[str]) -> Bound:
        """The largest of `bounds`."""
        name, seconds = max(self.bounds(part).items(), key=lambda bound: bound[1])
        return Bound(seconds, name)

    def bounds(self, part: Collection[str]) -> dict[str, float]:
        """See the function; of the tasks in `part` by themselves."""
        heads = self._longest(self.order, self._before, part)
        tails = self._longest(reversed(self.order), self._after, part)
        found = {"path": max((heads[name] + self._seconds[name] + tails[name] for name in part), default=0.0)}
        rows: dict[Row, list[str]] = defaultdict(list)
        for name in part:
            rows[_row(self.graph[name])].append(name)
        early = {row: min(map(heads.__getitem__, names)) for row, names in rows.items()}
        late = {row: min(map(tails.__getitem__, names)) for row, names in rows.items()}
        gangs = [name for name in part if name in self._gang]
        for role, ranks in self._roles.items():
            # Each rank is idle before the first and after the last task that counts here. One that gets none of
            # them is idle for the whole step, which is no shorter than a path through any task it could have run.
            inside = [
                row
                for row in rows
                if not row.apart and (row.kind is Kind.UPDATE or set(self._able[row.kind]) <= set(ranks))
            ]
            work = sum(self._least[row][len(rows[row])] for row in inside if row.kind is not Kind.UPDATE)
            work += sum(self._gang[name].get(rank, 0.0) for name in gangs for rank in ranks)
            for rank in ranks:
                mine = [row for row in inside if rank in self._able[row.kind]]
                work += min((early[row] for row in mine), default=0.0) + min((late[row] for row in mine), default=0.0)
            found[role] = work / len(ranks)
        for row, names in rows.items():
            if row.kind not in LOCAL_KINDS and row.kind is not Kind.UPDATE:
                share = -(-len(names) // len(self._able[row.kind]))
                name = f"{row.kind}/{row.judge}" if row.judge else str(row.kind)
                found[name] = max(found.get(name, 0.0), early[row] + self._least[row][share] + late[row])
        return found

    def _at_least(self, tasks: list[Task], durations: Durations, largest: int) -> list[float]:
        """The least seconds of work that 0, 1, 2, ... tasks of a row are, in any batches on any ranks."""
        alike = {task.shape: task for task in tasks}.values()
        sizes = range(1, min(largest, len(tasks)) + 1)
        batch = {
            size: min(durations.run([task] * size, rank) for task in alike for rank in self._able[task.kind])
            for size in sizes
        }
        least = [0.0]
        for count in range(1, len(tasks) + 1):  # the last batch may hold more than are counted, but never takes less
            least.append(min(seconds + least[max(count - size, 0)] for size, seconds in batch.items()))
        return least

    def _travel(self, tensor: str, reader: Task, durations: Durations) -> float:
        """The seconds of a transfer that no placement can avoid."""
        sources, targets = self._able[self.graph[producer(tensor)].kind], self._able[reader.kind]
        if set(sources) & set(targets):
            return 0.0
        return min(durations.move(tensor, source, target) for source in sources for target in targets)

    def _longest(
        self, order: Iterable[str], edges: dict[str, dict[str, float]], part: Collection[str]
    ) -> dict[str, float]:
        """The seconds of the longest path to each task of `part`, along `edges`, without the task itself."""
        longest: dict[str, float] = {}
        for name in order:
            if name in part:
                ways = (longest[o] + self._seconds[o] + lag for o, lag in edges[name].items() if o in part)
                longest[name] = max(ways, default=0.0)
        return longest


def _row(task: Task) -> Row:
    return Row(task.kind, "" if task.kind in JUDGE_KINDS else task.shape, task.judge, task.apart)
