"""An RL step as a graph of tasks, declared once and read by the controller, the simulator and the report.

Invariant: a `Graph` is acyclic and every reference in it resolves; it never changes. Algorithms build the true
dataflow, schedules derive graphs with more edges and tasks from it.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

import msgspec


class Kind(StrEnum):
    """What a task does; tasks of one kind and shape cost the same."""

    ROLLOUT = "rollout"
    DECODE = "decode"
    EXPORT = "export"
    SCORE = "score"
    COMPARE = "compare"
    REWARD = "reward"
    ADVANTAGE = "advantage"
    REFERENCE = "reference"
    OLD_LOG_PROB = "old-log-prob"
    FORWARD = "forward"
    REPLAY = "replay"
    UPDATE = "update"
    CATCH_UP = "catch-up"
    CHECKPOINT = "checkpoint"
    BARRIER = "barrier"


LOCAL_KINDS = frozenset({Kind.REWARD, Kind.ADVANTAGE, Kind.BARRIER})
"""Kinds that the controller computes itself: scalars in, scalars out."""

JUDGE_KINDS = frozenset({Kind.SCORE, Kind.COMPARE})
"""Kinds of which a reward rank may take several ready tasks as one batch."""

DEVICE = "device"
"""The lane of a rank for all that its own engine computes."""


class Task(msgspec.Struct, frozen=True, dict=True):
    """One unit of work.

    An `id` is `<kind>/<position>`. `inputs` name tensors, as `<task id>.<part>`; the rank that made a tensor, of a gang
    the first, keeps it, and the dispatcher has it moved where it is read. `values` name tasks whose small results
    (log-probabilities, scores, advantages) this one needs; they travel with the control messages. `after` only orders.
    `candidates` are positions in the task's group, and `judge` names the reward. What is `apart` leaves the rank's
    device alone, since a server, other processes or the CPU compute it: it is on a lane of that judge's own.
    """

    id: str
    kind: Kind
    shape: str = ""
    inputs: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    group: int = -1
    mini_batch: int = -1
    candidates: tuple[int, ...] = ()
    judge: str = ""
    apart: bool = False

    @cached_property
    def lane(self) -> str:
        """The lane of its rank that it occupies; what shares one runs one after another."""
        return f"judge {self.judge}" if self.apart else DEVICE

    @cached_property
    def predecessors(self) -> frozenset[str]:
        """Ids of all tasks that must be finished before this one starts."""
        return frozenset((*map(producer, self.inputs), *self.values, *self.after))


def producer(tensor: str) -> str:
    """The id of the task that makes `tensor`, which is named `<task id>.<part>`."""
    return tensor.rpartition(".")[0]


class Graph:
    """Tasks in the order they were declared, which is also their order of priority unless a plan says otherwise.

    `successors[task]` are the tasks that wait for it, `consumers[tensor]` the tasks that read a tensor,
    `makers[tensor]` the one that makes it, `outputs[task]` the tensors of a task that somebody reads, sorted; `gangs`
    are the tasks that several ranks run. It `catches_up` if some ranks take part in no update but take the same step
    later.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks: dict[str, Task] = {}
        for task in tasks:
            assert task.id not in self.tasks, f"task {task.id} is declared twice"
            self.tasks[task.id] = task
        self.gangs = frozenset(task.id for task in self.tasks.values() if task.kind is Kind.UPDATE)
        self.catches_up = any(task.kind is Kind.CATCH_UP for task in self.tasks.values())
        self.successors: dict[str, list[str]] = {name: [] for name in self.tasks}
        self.consumers: dict[str, list[str]] = {}
        for task in self.tasks.values():
            assert not task.apart or task.kind in JUDGE_KINDS, f"{task.id} is no judgement, so its rank computes it"
            for name in sorted(task.predecessors):
                assert name in self.tasks, f"task {task.id} waits for {name}, which is not in the graph"
                self.successors[name].append(task.id)
            for tensor in task.inputs:
                maker = self.tasks[producer(tensor)].kind
                assert maker not in LOCAL_KINDS, f"{task.id} reads {tensor}, but no {maker} makes any"
                self.consumers.setdefault(tensor, []).append(task.id)
        self.makers = {tensor: producer(tensor) for tensor in self.consumers}
        self.outputs: dict[str, tuple[str, ...]] = dict.fromkeys(self.tasks, ())
        for tensor in sorted(self.consumers):
            self.outputs[self.makers[tensor]] += (tensor,)
        try:
            TopologicalSorter({name: task.predecessors for name, task in self.tasks.items()}).prepare()
        except CycleError as error:
            raise AssertionError(f"the graph has a cycle: {' -> '.join(error.args[1])}") from None

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks.values())

    def __getitem__(self, name: str) -> Task:
        return self.tasks[name]

    def __len__(self) -> int:
        return len(self.tasks)

    def of(self, *kinds: Kind) -> list[Task]:
        """The tasks of these kinds, in order."""
        return [task for task in self if task.kind in kinds]

    def edges(self) -> int:
        """How many edges the graph has."""
        return sum(len(task.predecessors) for task in self)
