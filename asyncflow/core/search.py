"""Finds the plan of the `stagebreaker` schedule: which decodes and replays move from actors to reward ranks.

Every split is simulated by the dispatcher that will run it, so what is chosen is what happens. Pure; the training loop
calls it once costs are known.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import cycle, product

import msgspec

from asyncflow.core.cost import Durations
from asyncflow.core.graph import JUDGE_KINDS, Graph, Kind, Task, producer
from asyncflow.core.plan import Cluster, Plan
from asyncflow.core.simulate import simulate


def search(graph: Graph, plan: Plan, ranks: Cluster, durations: Durations) -> tuple[Plan, float]:
    """The best plan and its simulated seconds; among equals the one found first, which moves least.

    All splits of decode and of replay between actors and reward ranks are tried (StageBreaker paper, section 4.3), each
    with judges that take what is there and with judges that wait for a full batch.
    """
    decodes, replays = len(graph.of(Kind.DECODE)), len(graph.of(Kind.REPLAY))
    best, seconds = plan, simulate(graph, plan, durations).seconds
    for wait, moved_decodes, moved_replays in product((1, plan.judge_batch), range(decodes + 1), range(replays + 1)):
        waiting = msgspec.structs.replace(plan, judge_wait=wait)
        candidate = split(graph, waiting, ranks, moved_decodes, moved_replays)
        took = simulate(graph, candidate, durations).seconds
        if took < seconds:
            best, seconds = candidate, took
    return best, seconds


def split(graph: Graph, plan: Plan, ranks: Cluster, decodes: int, replays: int) -> Plan:
    """`plan` with this many decodes and replays moved to the judges.

    Decodes of the first rollouts move, since an actor decodes its last video itself while judges are busy; replays of
    the last mini-batch move first, since judges are free by then. A moved video is judged where it is decoded.
    """
    places = dict(plan.ranks)
    judges = cycle(ranks.judges)
    for task in graph.of(Kind.DECODE)[:decodes]:
        places[task.id] = (next(judges),)
    for task in graph:
        if task.kind in JUDGE_KINDS:
            (maker,) = places[producer(task.inputs[0])]
            if maker in ranks.judges:
                places[task.id] = (maker,)
    for task in list(_last_mini_batch_first(graph))[:replays]:
        places[task.id] = (next(judges),)
    return msgspec.structs.replace(plan, ranks=places)


def _last_mini_batch_first(graph: Graph) -> Iterator[Task]:
    by_mini_batch: dict[int, list[Task]] = defaultdict(list)
    for task in graph.of(Kind.REPLAY):
        by_mini_batch[task.mini_batch].append(task)
    for mini_batch in sorted(by_mini_batch, reverse=True):
        yield from by_mini_batch[mini_batch]
