"""Finds the plan of `stagebreaker`: what moves to the judges, how they batch, what goes first, whether they catch up.

Every plan that is considered is simulated by the dispatcher that would run it, so what is chosen is what happens. Pure;
the training loop calls it once costs are known.
"""

from collections import ChainMap, defaultdict
from itertools import cycle, product
from typing import Any, NamedTuple

import msgspec

from asyncflow.core.catch_up import adapted, variants
from asyncflow.core.cost import Durations
from asyncflow.core.graph import JUDGE_KINDS, Graph, Kind, Task, producer
from asyncflow.core.plan import Cluster, Plan
from asyncflow.core.simulate import simulate

ROUNDS = 4
"""How often each decision is looked at again, in the light of the others."""

FIRST: tuple[frozenset[Kind], ...] = (
    frozenset(),
    frozenset({Kind.ROLLOUT}),
    JUDGE_KINDS,
    frozenset({Kind.REFERENCE, Kind.OLD_LOG_PROB, Kind.REPLAY}),
)
"""Kinds that may go first among a rank's ready tasks; the others keep the order of the plan that is improved."""


class Choice(msgspec.Struct, frozen=True):
    """What the search decides: tasks that move to the judges, the judges' batches, and the kinds that go `first`.

    `by_group` a rank judges all videos of a group, by one judge, instead of some by all: in larger batches, but later.
    The first `decodes` move, since an actor decodes its last video itself while judges are busy; `replays` of each of
    the last `batches` mini-batches, since judges are free by then; and `references` and `old_log_probs`, first those
    whose replay moved.
    """

    judge_batch: int
    patient: bool = False
    by_group: bool = False
    decodes: int = 0
    batches: int = 0
    replays: int = 0
    references: int = 0
    old_log_probs: int = 0
    first: frozenset[Kind] = frozenset()

    @property
    def moves(self) -> int:
        """How many tasks move."""
        return self.decodes + self.batches * self.replays + self.references + self.old_log_probs


class Found(NamedTuple):
    """A variant of the graph, the best plan for it, and the seconds that it is simulated to take."""

    graph: Graph
    plan: Plan
    seconds: float


def search(graph: Graph, plan: Plan, ranks: Cluster, durations: Durations) -> Found:
    """The best that was found; among equals the plan that moves least, of the first variant.

    `plan` is the schedule's own. For each variant every split of the decodes is tried with every share of the last
    mini-batches' replays (StageBreaker paper, section 4.3), then the other decisions, at most three together, and again
    until nothing gets better.
    """
    tried = (
        Found(variant, *_improved(variant, adapted(plan, variant, ranks), ranks, durations))
        for variant in variants(graph, ranks)
    )
    return min(tried, key=lambda found: found.seconds)


def _improved(graph: Graph, plan: Plan, ranks: Cluster, durations: Durations) -> tuple[Plan, float]:
    best = Choice(plan.judge_batch)
    found, seconds = plan, simulate(graph, plan, durations).seconds
    tried = {best}
    for changes in _decisions(graph, plan, ranks) * ROUNDS:
        for change in changes:
            choice = msgspec.structs.replace(best, **ChainMap(*change))
            if choice in tried:
                continue
            tried.add(choice)
            candidate = planned(graph, plan, ranks, choice)
            took = simulate(graph, candidate, durations, limit=seconds).seconds
            if (took, choice.moves) < (seconds, best.moves):
                best, found, seconds = choice, candidate, took
    return found, seconds


def planned(graph: Graph, plan: Plan, ranks: Cluster, choice: Choice) -> Plan:
    """`plan`, changed as `choice` says. What moves goes round the judges.

    A video is judged where it is decoded, unless its whole group is judged in one place, for each judge another one.
    """
    places = dict(plan.ranks)
    judges = cycle(ranks.judges)
    for task in graph.of(Kind.DECODE)[: choice.decodes]:
        places[task.id] = (next(judges),)
    turns: defaultdict[tuple[int, str], int] = defaultdict(cycle(ranks.judges).__next__)
    for task in graph.of(*JUDGE_KINDS):
        (maker,) = places[producer(task.inputs[0])]
        if choice.by_group:
            places[task.id] = (turns[task.group, task.judge],)
        elif maker in ranks.judges:
            places[task.id] = (maker,)
    moved: dict[tuple[int, tuple[int, ...]], int] = {}
    for mini_batch in list(reversed(_replays(graph)))[: choice.batches]:
        for task in mini_batch[: choice.replays]:
            moved[task.group, task.candidates] = next(judges)
            places[task.id] = (moved[task.group, task.candidates],)
    for kind, count in ((Kind.REFERENCE, choice.references), (Kind.OLD_LOG_PROB, choice.old_log_probs)):
        for task in sorted(graph.of(kind), key=lambda task: (task.group, task.candidates) not in moved)[:count]:
            batch = task.group, task.candidates
            places[task.id] = (moved[batch] if batch in moved else next(judges),)
    order = tuple(sorted(plan.order, key=lambda name: graph[name].kind not in choice.first))
    return Plan(places, order, choice.judge_batch, choice.judge_batch if choice.patient else 1)


Change = tuple[dict[str, Any], ...]
"""Fields of a `Choice` and their values."""


def _decisions(graph: Graph, plan: Plan, ranks: Cluster) -> list[list[Change]]:
    """What is decided together: the changes to try, in each field that which moves least first."""
    wait = [{"patient": patient} for patient in (False, True)]
    spread = [{"by_group": by_group} for by_group in (False, True)[: len(ranks.judges)]]
    decodes = _counts("decodes", graph.of(Kind.DECODE))
    replays = [{"batches": batches, "replays": each} for batches, each in _shares(graph)]
    references = _counts("references", graph.of(Kind.REFERENCE))
    old = _counts("old_log_probs", graph.of(Kind.OLD_LOG_PROB))
    sizes = {plan.judge_batch, *(2**power for power in range(plan.judge_batch.bit_length()))}
    batch = [{"judge_batch": size} for size in sorted(sizes, reverse=True)]
    first = [{"first": kinds} for kinds in FIRST]
    together = (
        (wait, spread, decodes),
        (wait, decodes, replays), (wait, batch, first), (wait, references, replays), (wait, references, decodes),
        (wait, old, replays), (wait, old, decodes), (old, references),
    )  # fmt: skip
    return [list(product(*fields)) for fields in together]


def _counts(field: str, tasks: list[Task]) -> list[dict[str, Any]]:
    return [{field: count} for count in range(len(tasks) + 1)]


def _replays(graph: Graph) -> list[list[Task]]:
    """The replays of each mini-batch."""
    by_mini_batch: dict[int, list[Task]] = defaultdict(list)
    for task in graph.of(Kind.REPLAY):
        by_mini_batch[task.mini_batch].append(task)
    return [tasks for _, tasks in sorted(by_mini_batch.items())]


def _shares(graph: Graph) -> list[tuple[int, int]]:
    """How many of the last mini-batches give replays away, and how many each: none first, then ever more.

    Only none where judges catch up: then an update would lack what they replayed.
    """
    sizes = [] if graph.catches_up else [len(tasks) for tasks in reversed(_replays(graph))]
    shares = [(batches, each) for batches in range(1, len(sizes) + 1) for each in range(1, max(sizes[:batches]) + 1)]
    return [(0, 0), *shares]
