"""Finds the plan of the `stagebreaker` schedule: which decodes and replays move from actors to reward ranks.

Every split is simulated by the dispatcher that will run it, so what is chosen is what happens. Pure; the training loop
calls it once costs are known.
"""

from collections import defaultdict
from itertools import cycle, product

import msgspec

from asyncflow.core.cost import Durations
from asyncflow.core.graph import JUDGE_KINDS, Graph, Kind, Task, producer
from asyncflow.core.plan import Cluster, Plan
from asyncflow.core.simulate import simulate


def search(graph: Graph, plan: Plan, ranks: Cluster, durations: Durations) -> tuple[Plan, float]:
    """The best plan and its simulated seconds; among equals the one found first, which moves least.

    Every split of the decodes is tried with every share of the last mini-batches' replays, each with judges that take
    what is there and with judges that wait for a full batch (StageBreaker paper, section 4.3).
    """
    best, seconds = plan, simulate(graph, plan, durations).seconds
    for wait, decodes, (batches, replays) in product(
        (1, plan.judge_batch), range(len(graph.of(Kind.DECODE)) + 1), _shares(graph)
    ):
        waiting = msgspec.structs.replace(plan, judge_wait=wait)
        candidate = split(graph, waiting, ranks, decodes, batches, replays)
        took = simulate(graph, candidate, durations).seconds
        if took < seconds:
            best, seconds = candidate, took
    return best, seconds


def split(graph: Graph, plan: Plan, ranks: Cluster, decodes: int, batches: int = 0, replays: int = 0) -> Plan:
    """`plan` with so many decodes moved to the judges, and so many replays of each of the last mini-batches.

    Decodes of the first rollouts move, since an actor decodes its last video itself while judges are busy; replays of
    the last mini-batches move, since judges are free by then. A moved video is judged where it is decoded.
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
    for mini_batch in list(reversed(_replays(graph)))[:batches]:
        for task in mini_batch[:replays]:
            places[task.id] = (next(judges),)
    return msgspec.structs.replace(plan, ranks=places)


def _replays(graph: Graph) -> list[list[Task]]:
    """The replays of each mini-batch."""
    by_mini_batch: dict[int, list[Task]] = defaultdict(list)
    for task in graph.of(Kind.REPLAY):
        by_mini_batch[task.mini_batch].append(task)
    return [tasks for _, tasks in sorted(by_mini_batch.items())]


def _shares(graph: Graph) -> list[tuple[int, int]]:
    """How many of the last mini-batches give replays away, and how many each: none first, then ever more."""
    sizes = [len(tasks) for tasks in reversed(_replays(graph))]
    shares = [(batches, each) for batches in range(1, len(sizes) + 1) for each in range(1, max(sizes[:batches]) + 1)]
    return [(0, 0), *shares]
