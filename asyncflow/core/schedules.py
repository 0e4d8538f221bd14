"""The schedules: from the true dataflow of a step, a graph with the edges a schedule adds, and a placement.

Invariant: a schedule only adds edges and forward-only replays; it never removes or changes what the dataflow needs, so
every schedule trains on the same gradients. The training loop and the benches call `schedule`.
"""

from itertools import cycle
from typing import Literal, get_args

import msgspec

from asyncflow.core.graph import JUDGE_KINDS, LOCAL_KINDS, Graph, Kind, Task
from asyncflow.core.plan import CONTROLLER, Cluster, Plan

Name = Literal["colocated", "async-reward", "async-train", "merged-replay", "stagebreaker"]
NAMES: tuple[Name, ...] = get_args(Name)
TRAINING = (Kind.REFERENCE, Kind.OLD_LOG_PROB, Kind.FORWARD, Kind.REPLAY)
"""What a system that works in stages does after scoring."""


def cluster(name: Name, ranks: int, reward_ranks: int) -> Cluster:
    """Who does what: `colocated` ranks do everything; otherwise the last `reward_ranks` judge and the others act.

    Raises ValueError with one sentence if that cannot be.
    """
    if ranks < 1:
        raise ValueError(f"a run needs at least 1 rank, got {ranks}")
    everyone = tuple(range(ranks))
    if name == "colocated":
        if reward_ranks:
            raise ValueError(f"the colocated schedule has no reward ranks, got {reward_ranks}; every rank judges")
        return Cluster(actors=everyone, policy=everyone, judges=everyone)
    if not 1 <= reward_ranks < ranks:
        raise ValueError(
            f"the {name} schedule needs at least 1 reward rank and at least 1 actor: "
            f"{reward_ranks} reward ranks of {ranks} ranks cannot be"
        )
    actors, judges = everyone[: ranks - reward_ranks], everyone[ranks - reward_ranks :]
    return Cluster(actors=actors, policy=everyone if name == "stagebreaker" else actors, judges=judges)


def schedule(
    name: Name, dataflow: Graph, ranks: Cluster, *, forward_replays: bool = False, judge_batch: int = 8
) -> tuple[Graph, Plan]:
    """The graph and the plan of `dataflow` under schedule `name`.

    From the StageBreaker paper, section 5.5. colocated: barriers between rollout (with decode), scoring and training.
    async-reward: judges on their own ranks take videos as they come; a barrier between scoring and training.
    async-train: without that barrier. merged-replay: without the forward-only replays that async-train always has, and
    the first two with `forward_replays`. stagebreaker: reward ranks are policy ranks too; `search` finds who does what,
    and whether an update waits for them.
    """
    tasks = list(dataflow)
    if name == "async-train" or (forward_replays and name in ("colocated", "async-reward")):
        tasks = _with_forward_replays(tasks)
    if name == "colocated":
        tasks = _with_barrier(tasks, "rollout", (Kind.ROLLOUT, Kind.DECODE), tuple(JUDGE_KINDS))
    if name in ("colocated", "async-reward"):
        tasks = _with_barrier(tasks, "scoring", (Kind.ADVANTAGE,), TRAINING)
    graph = Graph(tasks)
    return graph, Plan(_place(graph, ranks), tuple(graph.tasks), judge_batch)


def _with_forward_replays(tasks: list[Task]) -> list[Task]:
    """Before each replay its forward-only twin, whose log-probabilities the update then uses."""
    result: list[Task] = []
    for task in tasks:
        if task.kind is Kind.REPLAY:
            twin = msgspec.structs.replace(task, id=_forward(task.id), kind=Kind.FORWARD)
            result += [twin, msgspec.structs.replace(task, after=(*task.after, twin.id))]
        elif task.kind is Kind.UPDATE:
            replays = [name for name in task.values if name.startswith(f"{Kind.REPLAY}/")]
            result.append(msgspec.structs.replace(task, values=(*task.values, *map(_forward, replays))))
        else:
            result.append(task)
    return result


def _forward(replay: str) -> str:
    return f"{Kind.FORWARD}/{replay.partition('/')[2]}"


def _with_barrier(tasks: list[Task], name: str, before: tuple[Kind, ...], after: tuple[Kind, ...]) -> list[Task]:
    """Let all tasks of the kinds `after` wait for all of the kinds `before`, through one barrier task."""
    barrier = Task(
        f"{Kind.BARRIER}/{name}", Kind.BARRIER, after=tuple(task.id for task in tasks if task.kind in before)
    )
    held = [task.kind in after for task in tasks]
    if not barrier.after or not any(held):
        return tasks
    result = [
        msgspec.structs.replace(task, after=(*task.after, barrier.id)) if waits else task
        for task, waits in zip(tasks, held, strict=True)
    ]
    result.insert(held.index(True), barrier)
    return result


def _place(graph: Graph, ranks: Cluster) -> dict[str, tuple[int, ...]]:
    """Micro-batches go round the actors and stay there; judging is where the frames are, or goes round judges."""
    actors, judges = cycle(ranks.actors), cycle(ranks.judges)
    places: dict[str, tuple[int, ...]] = {}
    home: dict[tuple[int, tuple[int, ...]], int] = {}
    judge_of: dict[str, int] = {}
    for task in graph:
        if task.kind in LOCAL_KINDS:
            places[task.id] = (CONTROLLER,)
        elif task.kind is Kind.UPDATE:
            places[task.id] = ranks.policy
        elif task.kind is Kind.CHECKPOINT:
            places[task.id] = ranks.policy[:1]
        elif task.kind in JUDGE_KINDS:
            videos = task.inputs[0]
            if videos not in judge_of:
                (maker,) = places[videos.rpartition(".")[0]]
                judge_of[videos] = maker if maker in ranks.judges else next(judges)
            places[task.id] = (judge_of[videos],)
        else:
            batch = (task.group, task.candidates)
            if batch not in home:
                home[batch] = next(actors)
            places[task.id] = (home[batch],)
    return places
