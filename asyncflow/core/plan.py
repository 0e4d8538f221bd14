"""Where each task runs and which ready task goes first: the part of a schedule that is not edges.

Schedules make plans; the dispatcher follows them to the letter.
"""

import msgspec

from asyncflow.core.graph import LOCAL_KINDS, Graph, Kind

CONTROLLER = -1
"""The controller's place in plans and traces: it computes scalars beside the ranks, on a lane of its own."""


class Cluster(msgspec.Struct, frozen=True):
    """The ranks of a run by role. `policy` ranks hold DiT, LoRA and optimizer; `judges` hold the rewards."""

    policy: tuple[int, ...]
    judges: tuple[int, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, in increasing order."""
        return tuple(sorted({*self.policy, *self.judges}))


class Plan(msgspec.Struct, frozen=True):
    """`ranks[task]` is the one rank that runs it, or all of a gang's; earlier in `order` goes first among ready tasks.

    A rank that judges takes up to `judge_batch` ready tasks of one judge as one batch.
    """

    ranks: dict[str, tuple[int, ...]]
    order: tuple[str, ...]
    judge_batch: int = 1

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
                able = cluster.judges if task.kind in (Kind.SCORE, Kind.COMPARE) else cluster.policy
                assert rank in able, f"{task.id} cannot run on rank {rank}"
