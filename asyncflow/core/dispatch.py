"""The dispatcher: the one place that decides what runs next, as a pure state machine `on(event) -> [command]`.

Invariants: a command depends on the events so far and on nothing else; a task starts once, after everything it waits
for has ended and its tensors are on its rank; a rank has a lane for its device and one for each judge that is apart,
and each runs one command at a time; everything that moves takes the next number of one sequence, so that every rank can
launch its share in increasing order without a cycle; a tensor is dropped from a rank exactly once, after its last use
there.

`simulate` drives it with a heap, `Controller` with asyncio. Both must feed events in the order they happen.
"""

from bisect import insort
from collections import Counter
from collections.abc import Mapping

import msgspec

from asyncflow.core.graph import JUDGE_KINDS, LOCAL_KINDS, Graph, Kind, producer
from asyncflow.core.plan import Plan

_INDIVISIBLE = LOCAL_KINDS | JUDGE_KINDS | {Kind.UPDATE}
"""Kinds that always run to their end: they take no time, are a batch for several, or a collective."""


class Begin(msgspec.Struct, frozen=True):
    """The step begins."""


class Done(msgspec.Struct, frozen=True):
    """The run command `ticket` ended on `rank`; `invalid` gives a reason for each outcome that is no number.

    `cancelled`: it stopped because of a cancel command and made nothing.
    """

    ticket: int
    rank: int
    invalid: Mapping[str, str] = {}
    cancelled: bool = False


class Moved(msgspec.Struct, frozen=True):
    """Transfer number `sequence` arrived."""

    sequence: int


class Unneeded(msgspec.Struct, frozen=True):
    """Nothing will be made of these tasks' results: those that have not started never will, others may be cancelled."""

    tasks: tuple[str, ...]


class Failed(msgspec.Struct, frozen=True):
    """The run command `ticket` raised on `rank`."""

    ticket: int
    rank: int
    reason: str


class RankLost(msgspec.Struct, frozen=True):
    """A rank's process or connection is gone."""

    rank: int
    reason: str


class Run(msgspec.Struct, frozen=True):
    """Run `tasks` (several: one judge batch) on `ranks` (several: a gang); the first keeps the tensors named in `keep`.

    A gang's collective takes number `sequence`, which is 0 for other tasks.
    """

    ticket: int
    tasks: tuple[str, ...]
    ranks: tuple[int, ...]
    keep: tuple[str, ...] = ()
    sequence: int = 0


class Move(msgspec.Struct, frozen=True):
    """Send `tensor` from `source` to `target` as transfer number `sequence`."""

    sequence: int
    tensor: str
    source: int
    target: int


class Drop(msgspec.Struct, frozen=True):
    """Forget `tensor` on `rank`."""

    tensor: str
    rank: int


class Cancel(msgspec.Struct, frozen=True):
    """Stop the run command `ticket` on `rank` where it can be stopped; it may end as if nothing had been said."""

    ticket: int
    rank: int


class Abort(msgspec.Struct, frozen=True):
    """End the step everywhere."""

    reason: str


Place = tuple[int, str]
"""A rank, and one of its lanes."""

Event = Begin | Done | Moved | Unneeded | Failed | RankLost
Command = Run | Move | Drop | Cancel | Abort


class Dispatcher:
    """Orders one step of `graph` as `plan` says."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph = graph
        self.plan = plan
        self.log: list[tuple[Event, tuple[Command, ...]]] = []
        self.aborted = False
        self._commands: list[Command] = []
        """What the event at hand has led to so far."""
        self._finished: set[str] = set()
        self._skipped: set[str] = set()
        self._waiting_for = {task.id: set(task.predecessors) for task in graph}
        self._missing: dict[str, set[str]] = {task.id: set() for task in graph}
        self._priority = {name: position for position, name in enumerate(plan.order)}
        self._places = {task.id: [(rank, task.lane) for rank in plan.ranks[task.id]] for task in graph}
        """The lanes that each task occupies: of a gang all, else one."""
        self._ready: dict[Place, list[str]] = {place: [] for places in self._places.values() for place in places}
        self._uses: Counter[tuple[str, int]] = Counter()
        self._home = {tensor: plan.ranks[maker][0] for tensor, maker in graph.makers.items()}
        """The rank that makes each tensor."""
        for task in graph:
            for tensor in task.inputs:
                home = self._home[tensor]
                # A gang reads its inputs where they lie.
                rank = home if task.id in graph.gangs else plan.ranks[task.id][0]
                self._uses[tensor, rank] += 1
                if rank != home:
                    self._missing[task.id].add(tensor)
        self._to_judge = Counter(
            (plan.ranks[task.id][0], task.kind, task.judge) for task in graph if task.kind in JUDGE_KINDS
        )
        self._running: dict[int, Run] = {}
        self._running_on: dict[int, set[int]] = {}
        self._started: set[str] = set()
        self._cancelled: set[int] = set()
        """The run commands that were told to stop."""
        self._moving: dict[int, Move] = {}
        self._on_its_way: set[tuple[str, int]] = set()
        self._busy: set[Place] = set()
        self._changed: set[Place] = set()
        """Lanes that became idle or were given something ready since the last look."""
        self._ticket = 0
        self.sequence = 0
        """The last number given to something that moves."""

    @property
    def finished(self) -> bool:
        """Whether every task has ended or is not needed and nothing is on its way."""
        return len(self._finished) == len(self.graph) and not self._moving

    def has_ended(self, ticket: int) -> bool:
        """Whether the run command `ticket` ended on all its ranks."""
        return ticket not in self._running

    def on(self, event: Event) -> list[Command]:
        """Take one event; return what to do now, in this order."""
        self._commands = []
        if not self.aborted:
            self._react(event)
        self.log.append((event, tuple(self._commands)))
        return self._commands

    def story(self, name: str) -> list[tuple[Event, tuple[Command, ...]]]:
        """Everything that happened to task `name` or its tensors, in order, for tests and for people who debug."""
        tickets = {c.ticket for _, made in self.log for c in made if isinstance(c, Run) and name in c.tasks}
        moves = {c.sequence for _, made in self.log for c in made if isinstance(c, Move) and producer(c.tensor) == name}

        def concerns(item: Event | Command) -> bool:
            match item:
                case Run(ticket=ticket) | Cancel(ticket=ticket) | Done(ticket=ticket) | Failed(ticket=ticket):
                    return ticket in tickets
                case Move(sequence=sequence) | Moved(sequence=sequence):
                    return sequence in moves
                case Drop(tensor=tensor):
                    return producer(tensor) == name
                case Unneeded(tasks=tasks):
                    return name in tasks
                case _:
                    return False

        story = ((event, tuple(filter(concerns, made))) for event, made in self.log)
        return [(event, made) for event, made in story if made or concerns(event)]

    def _react(self, event: Event) -> None:
        match event:
            case Begin():
                for name in self.plan.order:
                    self._queue_if_ready(name)
            case Done(ticket=ticket, rank=rank, cancelled=cancelled):
                assert not cancelled or ticket in self._cancelled, f"run command {ticket} was not told to stop"
                place = rank, self.graph[self._running[ticket].tasks[0]].lane
                self._busy.discard(place)
                self._changed.add(place)
                self._running_on[ticket].discard(rank)
                if not self._running_on[ticket]:
                    del self._running_on[ticket]
                    over = self._forgo if cancelled else self._finish
                    for name in self._running.pop(ticket).tasks:
                        over(name)
            case Moved(sequence=sequence):
                move = self._moving.pop(sequence)
                self._on_its_way.discard((move.tensor, move.target))
                for name in self.graph.consumers[move.tensor]:
                    if move.target in self.plan.ranks[name] and move.tensor in self._missing[name]:
                        self._missing[name].discard(move.tensor)
                        self._queue_if_ready(name)
                self._release(move.tensor, move.source)
                if not self._uses[move.tensor, move.target]:  # its consumers were skipped while it travelled
                    self._commands.append(Drop(move.tensor, move.target))
            case Unneeded(tasks=tasks):
                for name in tasks:
                    self._skip(name)
                self._cancel(tasks)
            case Failed(reason=reason) | RankLost(reason=reason):
                self.aborted = True
                self._commands.append(Abort(reason))
                return
        self._start(self.plan.judge_wait)
        if not self._running and not self._moving:  # judges wait for what needs the very batch they gather
            self._changed.update(place for place, ready in self._ready.items() if ready)
            self._start(1)

    def _finish(self, name: str) -> None:
        """A task ended: let its tensors go where they are needed, and its inputs go if it was their last user."""
        self._finished.add(name)
        for successor in self.graph.successors[name]:
            self._waiting_for[successor].discard(name)
            self._queue_if_ready(successor)
        self._release_inputs(name)
        for tensor in self.graph.outputs[name]:
            source = self._home[tensor]
            targets = {
                rank
                for consumer in self.graph.consumers[tensor]
                if consumer not in self.graph.gangs and consumer not in self._skipped
                for rank in self.plan.ranks[consumer]
            }
            for target in sorted(targets - {source}):
                self.sequence += 1
                self._uses[tensor, source] += 1
                move = Move(self.sequence, tensor, source, target)
                self._moving[move.sequence] = move
                self._on_its_way.add((tensor, target))
                self._commands.append(move)
            if not self._uses[tensor, source]:  # all who wanted it were skipped
                self._commands.append(Drop(tensor, source))

    def _skip(self, name: str) -> None:
        """Never run `name`, unless it has started."""
        if name in self._finished or name in self._started:
            return
        self._forget_judging((name,))
        for place in self._places[name]:
            if name in self._ready[place]:
                self._ready[place].remove(name)
                self._changed.add(place)  # a gang no longer reserves it
        self._forgo(name)

    def _cancel(self, tasks: tuple[str, ...]) -> None:
        """Stop those of `tasks` that are running and whose results nobody needs."""
        for run in self._running.values():
            name = run.tasks[0]
            if name not in tasks or self.graph[name].kind in _INDIVISIBLE or run.ticket in self._cancelled:
                continue
            if self._starved_without(name) <= self._skipped:
                self._cancelled.add(run.ticket)
                self._commands.append(Cancel(run.ticket, run.ranks[0]))

    def _forgo(self, name: str) -> None:
        """`name` makes nothing: what needs its results never runs; tasks that only come after it go on."""
        self._finished.add(name)
        self._skipped.add(name)
        self._release_inputs(name)
        starved = self._starved_without(name)
        for successor in self.graph.successors[name]:
            self._waiting_for[successor].discard(name)
            if successor in starved:
                self._skip(successor)
            else:
                self._queue_if_ready(successor)

    def _starved_without(self, name: str) -> set[str]:
        """The tasks that cannot run without the results of `name`; a gang takes what there is."""
        return {
            successor
            for successor in self.graph.successors[name]
            if successor not in self.graph.gangs
            if name in self.graph[successor].values or name in map(producer, self.graph[successor].inputs)
        }

    def _release_inputs(self, name: str) -> None:
        for tensor in self.graph[name].inputs:
            rank = self._home[tensor] if name in self.graph.gangs else self.plan.ranks[name][0]
            self._release(tensor, rank)

    def _release(self, tensor: str, rank: int) -> None:
        """One use of `tensor` on `rank` is over; drop it there after the last, unless it never got there."""
        self._uses[tensor, rank] -= 1
        maker = self.graph.makers[tensor]
        made = maker in self._finished and maker not in self._skipped
        if made and not self._uses[tensor, rank] and (tensor, rank) not in self._on_its_way:
            self._commands.append(Drop(tensor, rank))

    def _queue_if_ready(self, name: str) -> None:
        if not self._waiting_for[name] and not self._missing[name] and name not in self._finished:
            for place in self._places[name]:
                insort(self._ready[place], name, key=self._priority.__getitem__)
                self._changed.add(place)

    def _start(self, judge_wait: int) -> None:
        """Start the first ready task of every idle lane. A ready gang reserves its ranks until all of them are idle."""
        changed, self._changed = sorted(self._changed), set()
        for place in changed:
            ready = self._ready[place]
            if place in self._busy or not ready:
                continue
            gang = next(filter(self.graph.gangs.__contains__, ready), None)
            if gang is None:
                tasks = self._first(place[0], ready, judge_wait)
            else:
                tasks = (gang,) if self._busy.isdisjoint(self._places[gang]) else ()
            if tasks:
                self._commands.append(self._run(tasks))

    def _first(self, rank: int, ready: list[str], judge_wait: int) -> tuple[str, ...]:
        """The first ready task of a lane, or its first judge batch that is large enough; none if all are too small."""
        small: set[tuple[Kind, str]] = set()
        for name in ready:
            task = self.graph[name]
            judge = task.kind, task.judge
            if task.kind not in JUDGE_KINDS:
                return (name,)
            if judge in small:
                continue
            alike = [n for n in ready if (self.graph[n].kind, self.graph[n].judge) == judge]
            if len(alike) >= min(judge_wait, self._to_judge[rank, *judge]):
                return tuple(alike[: self.plan.judge_batch])
            small.add(judge)
        return ()

    def _run(self, tasks: tuple[str, ...]) -> Run:
        gang = tasks[0] in self.graph.gangs
        ranks = self.plan.ranks[tasks[0]]
        self._ticket += 1
        self.sequence += gang
        keep = tuple(tensor for name in tasks for tensor in self.graph.outputs[name])
        run = Run(self._ticket, tasks, ranks, keep, self.sequence if gang else 0)
        places = self._places[tasks[0]]
        for place in places:
            self._ready[place] = [name for name in self._ready[place] if name not in tasks]
        self._started.update(tasks)
        self._forget_judging(tasks)
        self._busy.update(places)
        self._running[run.ticket] = run
        self._running_on[run.ticket] = set(ranks)
        return run

    def _forget_judging(self, tasks: tuple[str, ...]) -> None:
        """These tasks are no longer waited for by a judge that gathers a batch."""
        for name in tasks:
            task = self.graph[name]
            if task.kind in JUDGE_KINDS:
                (place,) = self._places[name]
                self._to_judge[place[0], task.kind, task.judge] -= 1
                self._changed.add(place)  # those that are ready may now be all that are left
