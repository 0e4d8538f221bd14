"""Where each task runs and which ready task goes first: the part of a schedule that is not edges.

Schedules make plans; the dispatcher follows them to the letter.
"""

import msgspec

from asyncflow.core.graph import JUDGE_KINDS, LOCAL_KINDS, Graph, Kind, Task

CONTROLLER = -1
"""The controller's place in plans and traces: it computes scalars beside the ranks, on a lane of its own."""


class Cluster(msgspec.Struct, frozen=True):
    """The ranks of a run by role, each in increasing order.

    `actors` roll out; `policy` ranks, which include them, hold DiT, LoRA, optimizer and VAE; `judges` hold the rewards.
    """

    actors: tuple[int, ...]
    policy: tuple[int, ...]
    judges: tuple[int, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, in increasing order."""
        return tuple(sorted({*self.policy, *self.judges}))

    @property
    def late(self) -> tuple[int, ...]:
        """The policy ranks that do not act: they may catch up with an update instead of taking part in it."""
        return tuple(rank for rank in self.policy if rank not in self.actors)


class Plan(msgspec.Struct, frozen=True):
    """`ranks[task]` is the one rank that runs it, or all of a gang's; earlier in `order` goes first among ready tasks.

    A rank that judges takes up to `judge_batch` ready tasks of one judge as one batch. It waits until `judge_wait` of
    them are ready, or all that are left for it, or until nothing else runs.
    """

    ranks: dict[str, tuple[int, ...]]
    order: tuple[str, ...]
    judge_batch: int = 1
    judge_wait: int = 1

    def fits(self, graph: Graph, cluster: Cluster) -> bool:
        """Whether this is a plan of `graph` for `cluster`; one from a checkpoint may be of other ranks or options."""
        if sorted(self.order) != sorted(graph.tasks):
            return False
        places = ((task, self.ranks[task.id], able(task, graph, cluster)) for task in graph)
        return all(here == there if task.id in graph.gangs else set(here) <= set(there) for task, here, there in places)

    def validate(self, graph: Graph, cluster: Cluster) -> None:
        """Check that every task has a place that can run it; a violation is a bug of the schedule."""
        assert sorted(self.order) == sorted(graph.tasks), "the order must name every task once"
        for task in graph:
            ranks = self.ranks[task.id]
            if task.kind in LOCAL_KINDS:
                assert ranks == (CONTROLLER,), f"{task.id} runs on the controller, not on {ranks}"
                assert not task.inputs, f"{task.id} runs on the controller, which holds no tensors"
            elif task.id in graph.gangs:
                gang = able(task, graph, cluster)
                assert ranks == gang, f"{task.id} is a gang task of the ranks {gang}, not of {ranks}"
            else:
                (rank,) = ranks
                assert rank in able(task, graph, cluster), f"{task.id} cannot run on rank {rank}"


def able(task: Task, graph: Graph, cluster: Cluster) -> tuple[int, ...]:
    """The ranks that can run `task` of `graph`: for a gang all that do, for others those to choose from.

    Where ranks that do not act catch up with the updates, they are not in the gang, and what they replay would be lost.
    """
    if task.kind in LOCAL_KINDS:
        return (CONTROLLER,)
    if task.kind in JUDGE_KINDS:
        return cluster.judges
    if task.kind is Kind.CATCH_UP:
        return cluster.late
    acting = {Kind.ROLLOUT, Kind.FORWARD, Kind.REPLAY, Kind.UPDATE} if graph.catches_up else {Kind.ROLLOUT}
    return cluster.actors if task.kind in acting else cluster.policy
