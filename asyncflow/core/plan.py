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
        gangs, others = cluster.policy, (task for task in graph if task.id not in graph.gangs)
        return all(self.ranks[name] == gangs for name in graph.gangs) and all(
            set(self.ranks[task.id]) <= set(able(task, cluster)) for task in others
        )

    def validate(self, graph: Graph, cluster: Cluster) -> None:
        """Check that every task has a place that can run it; a violation is a bug of the schedule."""
        assert sorted(self.order) == sorted(graph.tasks), "the order must name every task once"
        for task in graph:
            ranks = self.ranks[task.id]
            if task.kind in LOCAL_KINDS:
                assert ranks == (CONTROLLER,), f"{task.id} runs on the controller, not on {ranks}"
                assert not task.inputs, f"{task.id} runs on the controller, which holds no tensors"
            elif task.kind is Kind.UPDATE:
                assert ranks == cluster.policy, f"{task.id} is a gang task of all policy ranks, not of {ranks}"
            else:
                (rank,) = ranks
                assert rank in able(task, cluster), f"{task.id} cannot run on rank {rank}"


def able(task: Task, cluster: Cluster) -> tuple[int, ...]:
    """The ranks that can run `task`: for a gang all that do, for others those to choose from."""
    if task.kind in LOCAL_KINDS:
        return (CONTROLLER,)
    if task.kind in JUDGE_KINDS:
        return cluster.judges
    return cluster.actors if task.kind is Kind.ROLLOUT else cluster.policy
