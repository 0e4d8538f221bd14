"""The dispatcher keeps its promises on any graph, in any order of events, whatever becomes unneeded on the way."""

from collections import Counter
from random import Random

import pytest

from asyncflow.core.dispatch import (
    Abort,
    Begin,
    Cancel,
    Command,
    Dispatcher,
    Done,
    Drop,
    Event,
    Failed,
    Move,
    Moved,
    RankLost,
    Run,
    Unneeded,
)
from asyncflow.core.graph import DEVICE, JUDGE_KINDS, LOCAL_KINDS, Graph, Kind, Task, producer
from asyncflow.core.plan import CONTROLLER, Plan
from asyncflow.testing import random_step


class Checker:
    """Follows a dispatcher from outside, with its own books, and lets events happen in an order given by lot."""

    def __init__(self, graph: Graph, plan: Plan, random: Random, unneeded: float) -> None:
        self.graph, self.plan, self.random, self.unneeded = graph, plan, random, unneeded
        self.dispatcher = Dispatcher(graph, plan)
        self.lanes: dict[tuple[int, str], int] = {}  # the ticket that runs on each busy lane
        self.runs: dict[int, Run] = {}
        self.ran: Counter[str] = Counter()
        self.over: set[str] = set()
        self.skipped: set[str] = set()
        self.told: set[int] = set()  # the tickets of what was told to stop
        self.stopped: set[str] = set()  # what did, all of it also skipped
        self.held: Counter[tuple[str, int]] = Counter()
        self.dropped: Counter[tuple[str, int]] = Counter()
        self.moving: dict[int, Move] = {}
        self.moved: Counter[tuple[str, int]] = Counter()
        self.sequence = 0
        self.log: list[tuple[Event, tuple[Command, ...]]] = []

    def run(self) -> None:
        self.feed(Begin())
        while events := self.possible():
            self.feed(self.random.choice(events))
            if self.random.random() < self.unneeded:
                self.skip(self.random.choices(list(self.graph.tasks), k=self.random.randint(1, 2)))
        assert self.dispatcher.finished
        assert not self.held, f"never dropped: {self.held}"
        assert set(self.ran) == self.graph.tasks.keys() - self.skipped | self.stopped
        assert max(self.ran.values(), default=1) == 1
        assert max(self.moved.values(), default=1) == 1
        assert max(self.dropped.values(), default=1) == 1
        assert self.dispatcher.sequence == self.sequence

    def possible(self) -> list[Event]:
        done: list[Event] = [Done(ticket, rank) for (rank, _), ticket in self.lanes.items()]
        done += [Done(ticket, rank, cancelled=True) for (rank, _), ticket in self.lanes.items() if ticket in self.told]
        return done + [Moved(sequence) for sequence in self.moving]

    def skip(self, names: list[str]) -> None:
        """What the definition says: those that have not started, and all that needs their results but gangs.

        Of those that run, the ones whose results nobody is left to need are told to stop.
        """
        pending = list(names)
        while pending:
            name = pending.pop()
            if name not in self.ran and name not in self.skipped:
                self.skipped.add(name)
                pending += self.needing(name)
        running = {self.runs[ticket].tasks[0]: ticket for ticket in self.lanes.values()}
        told = {
            ticket
            for name, ticket in running.items()
            if name in names and self.graph[name].kind not in {*LOCAL_KINDS, *JUDGE_KINDS, Kind.UPDATE}
            if not set(self.needing(name)) - self.skipped
        }
        before = set(self.told)
        self.feed(Unneeded(tuple(names)))
        assert self.told == before | told

    def needing(self, name: str) -> list[str]:
        return [
            task.id
            for task in self.graph
            if task.kind is not Kind.UPDATE and name in {*task.values, *map(producer, task.inputs)}
        ]

    def feed(self, event: Event) -> None:
        match event:
            case Done(ticket, rank, cancelled=True):
                del self.lanes[rank, self.lane(ticket)]
                self.stopped.update(self.runs[ticket].tasks)
                self.skipped.update(self.runs[ticket].tasks)
            case Done(ticket, rank):
                del self.lanes[rank, self.lane(ticket)]
                run = self.runs[ticket]
                if ticket not in self.lanes.values():
                    self.over.update(run.tasks)
                    self.held.update((tensor, run.ranks[0]) for tensor in run.keep)
            case Moved(sequence):
                move = self.moving.pop(sequence)
                self.held[move.tensor, move.target] += 1
        commands = self.dispatcher.on(event)
        self.log.append((event, tuple(commands)))
        for command in commands:
            self.check(command)
        self.check_nothing_idles()

    def check(self, command: Command) -> None:
        match command:
            case Run():
                self.check_run(command)
            case Move(sequence, tensor, source, target):
                assert sequence == self.sequence + 1
                self.sequence = sequence
                assert self.held[tensor, source] == 1
                readers = [task for task in self.readers(tensor, target) if task.kind is not Kind.UPDATE]
                assert source != target and readers, f"{command} is not needed"
                self.moving[sequence] = command
                self.moved[tensor, target] += 1
            case Drop(tensor, rank):
                assert self.held.pop((tensor, rank), 0) == 1, f"{tensor} is not on rank {rank}"
                assert not self.readers(tensor, rank), f"{tensor} is still needed on rank {rank}"
                assert not [m for m in self.moving.values() if (m.tensor, m.source) == (tensor, rank)]
                self.dropped[tensor, rank] += 1
            case Cancel(ticket, rank):
                assert ticket == self.lanes[rank, self.lane(ticket)] and ticket not in self.told
                self.told.add(ticket)
            case Abort():
                raise AssertionError("nothing failed")

    def check_run(self, run: Run) -> None:
        first = self.graph[run.tasks[0]]
        self.runs[run.ticket] = run
        assert run.ticket == len(self.runs)
        assert run.ranks == self.plan.ranks[first.id]
        lanes = [(rank, first.lane) for rank in run.ranks]
        assert not self.lanes.keys() & set(lanes), f"{run} starts on a busy lane"
        assert run.keep == tuple(tensor for name in run.tasks for tensor in self.graph.outputs[name])
        if first.kind is Kind.UPDATE:
            assert run.sequence == self.sequence + 1
            self.sequence = run.sequence
        else:
            assert run.sequence == 0
        if len(run.tasks) > 1:
            assert first.kind in JUDGE_KINDS and len(run.tasks) <= self.plan.judge_batch
            assert {(self.graph[n].kind, self.graph[n].judge, self.plan.ranks[n]) for n in run.tasks} == {
                (first.kind, first.judge, run.ranks)
            }
        for name in run.tasks:
            task = self.graph[name]
            assert task.predecessors <= self.over | self.skipped, f"{name} starts before its needs"
            if task.kind is not Kind.UPDATE:
                assert all(self.held[tensor, run.ranks[0]] == 1 for tensor in task.inputs), f"{name} lacks tensors"
        self.ran.update(run.tasks)
        self.lanes.update(dict.fromkeys(lanes, run.ticket))

    def lane(self, ticket: int) -> str:
        return self.graph[self.runs[ticket].tasks[0]].lane

    def readers(self, tensor: str, rank: int) -> list[Task]:
        """The tasks that still have to read `tensor` on `rank`."""
        home = self.plan.ranks[producer(tensor)][0]
        return [
            task
            for task in self.graph
            if tensor in task.inputs
            and task.id not in self.over | self.skipped
            and rank == (home if task.kind is Kind.UPDATE else self.plan.ranks[task.id][0])
        ]

    def check_nothing_idles(self) -> None:
        """A lane is idle only if none of its tasks could run, if it is kept for a gang, or if it gathers a batch."""
        lanes = {(rank, task.lane) for task in self.graph for rank in self.plan.ranks[task.id]}
        for rank, lane in lanes - self.lanes.keys():
            here = (task for task in self.graph if task.lane == lane and rank in self.plan.ranks[task.id])
            ready = list(filter(self.could_run, here))
            if ready:
                gangs = [task.id for task in ready if task.kind is Kind.UPDATE]
                if not gangs and self.gathers(rank, ready):
                    continue
                assert gangs, f"{ready} could run on rank {rank}"
                first = min(gangs, key=self.plan.order.index)
                assert {rank for rank, lane in self.lanes if lane == DEVICE} & set(self.plan.ranks[first]), first

    def gathers(self, rank: int, ready: list[Task]) -> bool:
        """Whether a judge has too few of each sort ready, more to come, and others that work meanwhile."""
        if not self.lanes and not self.moving:
            return False
        if not {task.kind for task in ready} <= JUDGE_KINDS:
            return False
        return all(
            count < self.plan.judge_wait and count < len(self.left(rank, *sort))
            for sort, count in Counter((task.kind, task.judge) for task in ready).items()
        )

    def left(self, rank: int, kind: Kind, judge: str) -> list[Task]:
        """The tasks of a judge that have neither begun nor been skipped."""
        return [
            task
            for task in self.graph.of(kind)
            if task.judge == judge
            and self.plan.ranks[task.id] == (rank,)
            and task.id not in {*self.ran, *self.skipped}
        ]

    def could_run(self, task: Task) -> bool:
        here = self.plan.ranks[task.id][0]
        lacks = task.kind is not Kind.UPDATE and any(not self.held[tensor, here] for tensor in task.inputs)
        begun = task.id in self.ran or task.id in self.skipped
        return not begun and not lacks and task.predecessors <= self.over | self.skipped


@pytest.mark.parametrize("unneeded", [0.0, 0.15], ids=["all-needed", "some-unneeded"])
def test_a_random_step_keeps_every_promise(unneeded: float):
    stopped = 0
    for seed in range(300):
        random = Random(seed)
        graph, plan = random_step(random, ranks=random.randint(1, 4), size=random.randint(1, 40))
        try:
            checker = Checker(graph, plan, random, unneeded)
            checker.run()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        stopped += len(checker.stopped)
    assert bool(stopped) == bool(unneeded)


def test_the_same_events_give_the_same_commands():
    graph, plan = random_step(Random(1), ranks=3, size=40)
    logs = []
    for _ in range(2):
        checker = Checker(graph, plan, Random(2), unneeded=0.1)
        checker.run()
        logs.append(checker.log)
    assert logs[0] == logs[1] == checker.dispatcher.log


def step(*tasks: Task, judge_batch: int = 1, **ranks: int | tuple[int, ...]) -> Dispatcher:
    """A dispatcher of `tasks` in this order of priority; `ranks` says where each kind runs."""
    places = {task.id: ranks[task.kind] for task in tasks}
    plan = Plan({name: at if isinstance(at, tuple) else (at,) for name, at in places.items()}, (*places,), judge_batch)
    return Dispatcher(Graph(tasks), plan)


def test_a_task_starts_where_its_input_has_arrived():
    d = step(
        Task("rollout/0", Kind.ROLLOUT),
        Task("decode/0", Kind.DECODE, inputs=("rollout/0.path",)),
        Task("replay/0", Kind.REPLAY, inputs=("rollout/0.path",)),
        rollout=0,
        decode=1,
        replay=0,
    )
    assert d.on(Begin()) == [Run(1, ("rollout/0",), (0,), keep=("rollout/0.path",))]
    assert d.on(Done(1, 0)) == [Move(1, "rollout/0.path", 0, 1), Run(2, ("replay/0",), (0,))]
    assert d.on(Done(2, 0)) == []
    assert d.on(Moved(1)) == [Drop("rollout/0.path", 0), Run(3, ("decode/0",), (1,))]
    assert d.on(Done(3, 1)) == [Drop("rollout/0.path", 1)]
    assert d.finished


def test_a_judge_gathers_a_batch_and_does_other_work_meanwhile():
    """With two to wait for it takes a decode before a single score, then both scores, and the last one by itself."""
    decodes = [Task(f"decode/{n}", Kind.DECODE) for n in range(3)]
    scores = [Task(f"score/{n}", Kind.SCORE, inputs=(f"decode/{n}.frames",)) for n in range(3)]
    tasks = [*scores, *decodes]
    plan = Plan({task.id: (0,) for task in tasks}, tuple(task.id for task in tasks), judge_batch=2, judge_wait=2)
    d = Dispatcher(Graph(tasks), plan)
    ran = []
    commands = d.on(Begin())
    while commands:
        (run,) = [command for command in commands if isinstance(command, Run)]
        ran.append(run.tasks)
        commands = d.on(Done(run.ticket, 0))
        if d.finished:
            break
    assert ran == [("decode/0",), ("decode/1",), ("score/0", "score/1"), ("decode/2",), ("score/2",)]


def test_a_judge_does_not_wait_for_what_needs_its_batch():
    """Two scores to wait for, of which one comes after the other: the first goes alone once nothing else runs."""
    scores = [Task("score/0", Kind.SCORE), Task("score/1", Kind.SCORE, after=("score/0",))]
    tasks = [*scores, Task("rollout/0", Kind.ROLLOUT)]
    plan = Plan({"score/0": (0,), "score/1": (0,), "rollout/0": (1,)}, ("score/0", "score/1", "rollout/0"), 2, 2)
    d = Dispatcher(Graph(tasks), plan)
    assert d.on(Begin()) == [Run(1, ("rollout/0",), (1,))]
    assert d.on(Done(1, 1)) == [Run(2, ("score/0",), (0,))]
    assert d.on(Done(2, 0)) == [Run(3, ("score/1",), (0,))]


def test_earlier_in_the_order_goes_first_among_ready_tasks():
    tasks = [Task(f"rollout/{n}", Kind.ROLLOUT) for n in range(3)]
    plan = Plan({task.id: (0,) for task in tasks}, ("rollout/2", "rollout/0", "rollout/1"))
    d = Dispatcher(Graph(tasks), plan)
    started = [d.on(event)[0].tasks for event in (Begin(), Done(1, 0), Done(2, 0))]
    assert started == [("rollout/2",), ("rollout/0",), ("rollout/1",)]


def test_a_judge_takes_ready_tasks_of_one_judge_as_one_batch():
    judged = [("a", 0), ("b", 1), ("a", 2), ("a", 3), ("a", 4)]
    d = step(*(Task(f"score/{n}", Kind.SCORE, judge=judge) for judge, n in judged), judge_batch=3, score=0)
    assert d.on(Begin()) == [Run(1, ("score/0", "score/2", "score/3"), (0,))]
    assert d.on(Done(1, 0, {"score/2": "no answer"})) == [Run(2, ("score/1",), (0,))]
    assert d.on(Done(2, 0)) == [Run(3, ("score/4",), (0,))]


def test_other_tasks_are_never_batched():
    d = step(*(Task(f"decode/{n}", Kind.DECODE) for n in range(2)), judge_batch=8, decode=0)
    assert d.on(Begin()) == [Run(1, ("decode/0",), (0,))]


def test_a_ready_gang_reserves_its_ranks_and_starts_on_all_at_once():
    d = step(
        Task("update/0", Kind.UPDATE, after=("rollout/0",)),
        Task("rollout/0", Kind.ROLLOUT),
        Task("replay/0", Kind.REPLAY),
        Task("rollout/1", Kind.ROLLOUT),
        update=(0, 1),
        rollout=0,
        replay=1,
    )
    assert d.on(Begin()) == [Run(1, ("rollout/0",), (0,)), Run(2, ("replay/0",), (1,))]
    assert d.on(Done(1, 0)) == []  # rollout/1 could run, but the gang is ready and rank 1 is busy
    assert d.on(Done(2, 1)) == [Run(3, ("update/0",), (0, 1), sequence=1)]
    assert d.on(Done(3, 1)) == []
    assert not d.has_ended(3)
    assert d.on(Done(3, 0)) == [Run(4, ("rollout/1",), (0,))]
    assert d.has_ended(3)


def test_unneeded_skips_what_needs_the_result_and_not_what_merely_comes_after():
    d = step(
        Task("rollout/0", Kind.ROLLOUT),
        Task("replay/0", Kind.REPLAY, inputs=("rollout/0.path",)),
        Task("reward/0", Kind.REWARD, values=("replay/0",)),
        Task("decode/0", Kind.DECODE, after=("replay/0",)),
        Task("update/0", Kind.UPDATE, inputs=("replay/0.gradients",), after=("decode/0",)),
        rollout=0,
        replay=0,
        reward=CONTROLLER,
        decode=1,
        update=(0, 1),
    )
    d.on(Begin())
    assert d.on(Unneeded(("replay/0",))) == [Run(2, ("decode/0",), (1,))]
    assert d.on(Done(1, 0)) == [Drop("rollout/0.path", 0)]
    assert d.on(Done(2, 1)) == [Run(3, ("update/0",), (0, 1), sequence=1)]
    assert d.on(Done(3, 0)) == d.on(Done(3, 1)) == []
    assert d.finished


def test_a_rank_that_a_gang_reserved_goes_on_when_the_gang_is_not_needed():
    d = step(
        Task("update/0", Kind.UPDATE, after=("rollout/0",)),
        Task("rollout/0", Kind.ROLLOUT),
        Task("replay/0", Kind.REPLAY),
        Task("rollout/1", Kind.ROLLOUT),
        update=(0, 1),
        rollout=0,
        replay=1,
    )
    d.on(Begin())
    assert d.on(Done(1, 0)) == []
    assert d.on(Unneeded(("update/0",))) == [Run(3, ("rollout/1",), (0,))]


def replaying() -> Dispatcher:
    """A step whose replay runs, as command 2, and is the only one to need what the rollout made."""
    d = step(
        Task("rollout/0", Kind.ROLLOUT),
        Task("replay/0", Kind.REPLAY, inputs=("rollout/0.path",)),
        Task("rollout/1", Kind.ROLLOUT, after=("replay/0",)),
        Task("update/0", Kind.UPDATE, inputs=("replay/0.gradients",), values=("replay/0",), after=("rollout/1",)),
        rollout=0,
        replay=0,
        update=(0, 1),
    )
    d.on(Begin())
    assert d.on(Done(1, 0)) == [Run(2, ("replay/0",), (0,), keep=("replay/0.gradients",))]
    return d


def test_an_unneeded_task_that_runs_is_told_to_stop_once_and_then_made_nothing():
    d = replaying()
    assert d.on(Unneeded(("replay/0",))) == [Cancel(2, 0)]
    assert d.on(Unneeded(("replay/0",))) == []
    assert not d.finished
    assert d.on(Done(2, 0, cancelled=True)) == [Drop("rollout/0.path", 0), Run(3, ("rollout/1",), (0,))]
    assert d.on(Done(3, 0)) == [Run(4, ("update/0",), (0, 1), sequence=1)]
    assert d.on(Done(4, 0)) == d.on(Done(4, 1)) == []  # no gradients to drop
    assert d.finished
    assert d.story("replay/0") == [
        (Done(1, 0), (Run(2, ("replay/0",), (0,), keep=("replay/0.gradients",)),)),
        (Unneeded(("replay/0",)), (Cancel(2, 0),)),
        (Unneeded(("replay/0",)), ()),
        (Done(2, 0, cancelled=True), ()),
    ]


def test_a_task_that_ended_before_it_was_told_to_stop_has_made_what_others_read():
    """Both orders of the race: its end is on its way when it is told, or has arrived when it becomes unneeded."""
    ended, unneeded = Done(2, 0), Unneeded(("replay/0",))
    for events, told in (((unneeded, ended), [Cancel(2, 0)]), ((ended, unneeded), [])):
        d = replaying()
        commands = [command for event in events for command in d.on(event)]
        assert [command for command in commands if isinstance(command, Cancel)] == told
        assert Drop("rollout/0.path", 0) in commands
        d.on(Done(3, 0))
        assert d.on(Done(4, 0)) + d.on(Done(4, 1)) == [Drop("replay/0.gradients", 0)]
        assert d.finished


def test_what_was_made_in_time_for_nobody_is_dropped():
    d = step(
        Task("rollout/0", Kind.ROLLOUT), Task("decode/0", Kind.DECODE, inputs=("rollout/0.path",)), rollout=0, decode=1
    )
    d.on(Begin())
    assert d.on(Unneeded(("rollout/0", "decode/0"))) == [Cancel(1, 0)]
    assert d.on(Done(1, 0)) == [Drop("rollout/0.path", 0)]
    assert d.finished


def test_a_task_whose_results_others_need_runs_to_its_end():
    d = step(
        Task("rollout/0", Kind.ROLLOUT), Task("decode/0", Kind.DECODE, inputs=("rollout/0.path",)), rollout=0, decode=0
    )
    d.on(Begin())
    assert d.on(Unneeded(("rollout/0",))) == []
    assert d.on(Done(1, 0)) == [Run(2, ("decode/0",), (0,))]


def test_judge_batches_gangs_and_scalars_are_never_told_to_stop():
    d = step(
        Task("score/0", Kind.SCORE), Task("reward/0", Kind.REWARD), Task("update/0", Kind.UPDATE),
        score=2, reward=CONTROLLER, update=(0, 1),
    )  # fmt: skip
    assert len(d.on(Begin())) == 3
    assert d.on(Unneeded(("score/0", "reward/0", "update/0"))) == []


def test_nothing_stops_that_was_not_told_to():
    with pytest.raises(AssertionError, match="run command 2 was not told to stop"):
        replaying().on(Done(2, 0, cancelled=True))


def test_what_travels_to_a_skipped_task_is_dropped_on_arrival():
    d = step(
        Task("rollout/0", Kind.ROLLOUT), Task("decode/0", Kind.DECODE, inputs=("rollout/0.path",)), rollout=0, decode=1
    )
    d.on(Begin())
    d.on(Done(1, 0))
    assert d.on(Unneeded(("decode/0",))) == []
    assert not d.finished
    assert d.on(Moved(1)) == [Drop("rollout/0.path", 0), Drop("rollout/0.path", 1)]
    assert d.finished


@pytest.mark.parametrize("event", [Failed(1, 0, "it broke"), RankLost(0, "it broke")], ids=["failed", "lost"])
def test_a_failure_aborts_once_and_for_all(event: Event):
    d = step(Task("rollout/0", Kind.ROLLOUT), Task("decode/0", Kind.DECODE, after=("rollout/0",)), rollout=0, decode=0)
    d.on(Begin())
    assert d.on(event) == [Abort("it broke")]
    assert d.aborted
    assert d.on(Done(1, 0)) == []
    assert d.on(event) == []


def test_a_story_is_all_that_concerns_a_task():
    d = step(
        Task("rollout/0", Kind.ROLLOUT),
        Task("rollout/1", Kind.ROLLOUT),
        Task("decode/0", Kind.DECODE, inputs=("rollout/0.path",)),
        rollout=0,
        decode=1,
    )
    for event in (Begin(), Done(1, 0), Moved(1), Done(2, 0), Unneeded(("rollout/0",)), Done(3, 1)):
        d.on(event)
    assert d.story("rollout/0") == [
        (Begin(), (Run(1, ("rollout/0",), (0,), keep=("rollout/0.path",)),)),
        (Done(1, 0), (Move(1, "rollout/0.path", 0, 1),)),
        (Moved(1), (Drop("rollout/0.path", 0),)),
        (Unneeded(("rollout/0",)), ()),
        (Done(3, 1), (Drop("rollout/0.path", 1),)),
    ]
    assert d.story("rollout/1") == [(Done(1, 0), (Run(2, ("rollout/1",), (0,)),)), (Done(2, 0), ())]
