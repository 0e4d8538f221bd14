"""The graph of an RL step and of an evaluation: the true dataflow, with no schedule's edges.

Invariant: who is in a micro-batch or a mini-batch depends on the configuration alone, never on the schedule, the ranks
or a result. The training loop builds one graph a step.
"""

from collections.abc import Mapping, Sequence
from itertools import product

from msgspec import structs

from asyncflow.core.graph import Graph, Kind, Task
from engines.rewards.base import PairwiseReward
from engines.rewards.pairs import pairs_of
from engines.rewards.registry import WeightedReward

Pairs = Mapping[str, Sequence[tuple[int, int]]]
"""Whom each pairwise reward, by its name, compares in a group."""


def step_graph(
    groups: int,
    group_size: int,
    *,
    mini_batches: int,
    task_batch: int,
    rewards: Sequence[WeightedReward],
    global_statistics: bool = False,
    reference: bool = False,
    recompute_old: bool = False,
) -> Graph:
    """One RL step: rollout, decode, judge, reward, advantage; replay and update for each mini-batch of whole groups.

    A reward reads log-probabilities too: no judgement counts of a video whose rollout was not finite. Where a reward
    compares with the base model, each group has that model's video at `group_size`, in a micro-batch of its own that
    nobody replays. These go first: so comparisons start with the first candidate, and replays are as evenly placed.
    With `global_statistics` an advantage waits for the rewards of all groups, with `reference` a replay for the frozen
    policy's predictions. With `recompute_old` no replay needs what the rollout recorded: the first mini-batch's replays
    find their old units themselves, under the rollout's weights; for the others they are computed before any update.
    """
    size, batches = groups // mini_batches, micro_batches(group_size, task_batch)
    pairs = {weighted.name: pairs_of(weighted.reward, group_size) for weighted in _pairwise(rewards)}
    compared = {candidate for met in pairs.values() for pair in met for candidate in pair}
    base = [(group_size,)] if group_size in compared else []
    tasks: list[Task] = []
    for group, batch in product(range(groups), base):
        tasks += _sample(group, batch, mini_batch=group // size, base=True)
    for group, batch in product(range(groups), batches):
        tasks += _sample(group, batch, mini_batch=group // size)
    for group in range(groups):
        judged = _judge(group, group_size, [*batches, *base], rewards, pairs)
        tasks += judged
        sampled = (f"{Kind.ROLLOUT}/{_place(group, batch)}" for batch in (*batches, *base))
        values = (*(task.id for task in judged), *sampled)
        tasks.append(Task(f"reward/{group}", Kind.REWARD, values=values, group=group))
    for group in range(groups):
        sources = range(groups) if global_statistics else (group,)
        tasks.append(
            Task(f"advantage/{group}", Kind.ADVANTAGE, values=tuple(f"reward/{g}" for g in sources), group=group)
        )
    before: tuple[str, ...] = ()
    if recompute_old:
        old = [
            _pass(Kind.OLD_LOG_PROB, group, batch, mini_batch=group // size)
            for group, batch in product(range(size, groups), batches)
        ]
        tasks += old
        before = tuple(task.id for task in old)
    for mini_batch in range(mini_batches):
        members = range(mini_batch * size, (mini_batch + 1) * size)
        old_units = Kind.ROLLOUT if not recompute_old else Kind.OLD_LOG_PROB if mini_batch else None
        after = before if mini_batch else ()
        replays = []
        for group, batch in product(members, batches):
            references = [_pass(Kind.REFERENCE, group, batch, mini_batch)] if reference else []
            replay = _pass(Kind.REPLAY, group, batch, mini_batch)
            inputs = (*replay.inputs, *(f"{task.id}.velocity" for task in references))
            values = (f"{old_units}/{_place(group, batch)}",) if old_units else ()
            tasks += references
            replays.append(structs.replace(replay, inputs=inputs, values=values, after=after))
        values = [value for task in replays for value in (*task.values, task.id)]
        update = Task(
            f"update/{mini_batch}",
            Kind.UPDATE,
            inputs=tuple(f"{task.id}.gradients" for task in replays),
            values=(*values, *(f"advantage/{group}" for group in members)),
            after=before,
            mini_batch=mini_batch,
        )
        tasks += [*replays, update]
        before = (update.id,)
    return Graph(tasks)


def checkpoint_graph() -> Graph:
    """The writing of a checkpoint."""
    return Graph([Task("checkpoint/step", Kind.CHECKPOINT)])


def evaluation_graph(samples: int, shown: int, *, task_batch: int, rewards: Sequence[WeightedReward]) -> Graph:
    """An evaluation of `samples` videos: rollout, decode, judgements, and mp4 files of the first.

    The samples count as the candidates of group 0; micro-batches that hold one of the first `shown` are exported. A
    pairwise reward compares each sample i with the base model's video of the same prompt and noise, at `samples` + i,
    once in either order, so that what a judge thinks of the one it sees first cancels out. Those videos are sampled
    again each time, which costs a rollout and a decode, but neither memory between evaluations nor state to resume.
    """
    pairwise, batches = _pairwise(rewards), micro_batches(samples, task_batch)
    duels = [pair for c in range(samples) for pair in ((c, samples + c), (samples + c, c))]
    tasks, sampled = [], []
    for batch in batches:
        tasks += _sample(0, batch, mini_batch=-1)
        sampled.append(batch)
        if pairwise:
            base = tuple(samples + candidate for candidate in batch)
            tasks += _sample(0, base, mini_batch=-1, base=True)
            sampled.append(base)
    tasks += _judge(0, samples, sampled, rewards, {weighted.name: duels for weighted in pairwise})
    tasks += [
        Task(f"export/{_place(0, b)}", Kind.EXPORT, f"b{len(b)}", (f"{_decode(0, b)}.frames",), group=0, candidates=b)
        for b in batches
        if b[0] < shown
    ]
    return Graph(tasks)


def micro_batches(group_size: int, task_batch: int) -> list[tuple[int, ...]]:
    """The candidates of a group in runs of `task_batch`; the last may be shorter."""
    return [
        tuple(range(first, min(first + task_batch, group_size))) for first in range(0, group_size, task_batch)
    ]


def _place(group: int, batch: tuple[int, ...]) -> str:
    return f"{group}/{batch[0]}"


def _decode(group: int, batch: tuple[int, ...]) -> str:
    return f"decode/{_place(group, batch)}"


def _pairwise(rewards: Sequence[WeightedReward]) -> list[WeightedReward]:
    return [weighted for weighted in rewards if isinstance(weighted.reward, PairwiseReward)]


def _sample(group: int, batch: tuple[int, ...], mini_batch: int, *, base: bool = False) -> list[Task]:
    """Rollout and decode of a micro-batch; the base model's rollout, which computes no LoRA, is a shape of its own."""
    shape, place = f"b{len(batch)}", _place(group, batch)
    rollout = Task(
        f"rollout/{place}", Kind.ROLLOUT, f"{shape}-base" if base else shape,
        group=group, mini_batch=mini_batch, candidates=batch,
    )
    decode = Task(
        _decode(group, batch), Kind.DECODE, shape, (f"{rollout.id}.clean",),
        group=group, mini_batch=mini_batch, candidates=batch,
    )
    return [rollout, decode]


def _pass(kind: Kind, group: int, batch: tuple[int, ...], mini_batch: int) -> Task:
    """A pass of the policy, or of the frozen one, over what a rollout recorded."""
    place = _place(group, batch)
    inputs = tuple(f"rollout/{place}.{part}" for part in ("noisy", "clean"))
    return Task(
        f"{kind}/{place}", kind, f"b{len(batch)}", inputs, group=group, mini_batch=mini_batch, candidates=batch
    )


def _judge(
    group: int, size: int, batches: list[tuple[int, ...]], rewards: Sequence[WeightedReward], pairs: Pairs
) -> list[Task]:
    """A score for each pointwise reward and each of the first `size` videos, or a comparison for each of its pairs."""
    frames = {candidate: f"{_decode(group, batch)}.frames" for batch in batches for candidate in batch}
    tasks: list[Task] = []
    for weighted in rewards:
        reward = weighted.reward
        if isinstance(reward, PairwiseReward):
            tasks += [
                Task(
                    f"compare/{reward.name}/{group}/{first}-{second}", Kind.COMPARE,
                    inputs=tuple(dict.fromkeys((frames[first], frames[second]))),
                    group=group, candidates=(first, second), judge=reward.name, apart=reward.apart,
                )
                for first, second in pairs[reward.name]
            ]
        else:
            tasks += [
                Task(
                    f"score/{reward.name}/{group}/{candidate}", Kind.SCORE, inputs=(frames[candidate],),
                    group=group, candidates=(candidate,), judge=reward.name, apart=reward.apart,
                )
                for candidate in range(size)
            ]
    return tasks
