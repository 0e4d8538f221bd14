"""The variant of a graph in which no update waits for a rank that judges: such a rank catches up, within the step.

Invariant: a rank that catches up takes the steps that the actors took, in their order, each from the gradient that the
update's gang has summed. So after the step all policy ranks have the same weights; until it has caught up a rank has
older ones, and replays nothing. `search` compares the variants of a graph, and a bound holds for all of them.
"""

from msgspec import structs

from asyncflow.core.graph import Graph, Kind, Task
from asyncflow.core.plan import Cluster, Plan


def variants(graph: Graph, cluster: Cluster) -> tuple[Graph, ...]:
    """`graph`, and the one whose updates are the actors' alone, where there are policy ranks that do not act."""
    if graph.catches_up or not cluster.late:
        return (graph,)
    tasks = list(graph)
    for rank in cluster.late:
        before: tuple[str, ...] = ()
        for update in graph.of(Kind.UPDATE):
            name = f"{Kind.CATCH_UP}/{update.id.partition('/')[2]}/{rank}"
            total = (f"{update.id}.total",)
            tasks.append(Task(name, Kind.CATCH_UP, inputs=total, after=before, mini_batch=update.mini_batch))
            before = (name,)
    return graph, Graph(tasks)


def adapted(plan: Plan, graph: Graph, cluster: Cluster) -> Plan:
    """`plan`, which moves nothing, for a variant of its graph; there every rank catches up when it has time."""
    if not graph.catches_up:
        return plan
    catching_up = {task.id: (rank_of(task),) for task in graph.of(Kind.CATCH_UP)}
    places = {**plan.ranks, **dict.fromkeys(graph.gangs, cluster.actors), **catching_up}
    return structs.replace(plan, ranks=places, order=(*plan.order, *catching_up))


def rank_of(catch_up: Task) -> int:
    """The rank that a catch-up is for, which ends its name."""
    return int(catch_up.id.rpartition("/")[2])
