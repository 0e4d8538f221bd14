"""What the controller asks while a step runs: the orders for the engines, and rewards, advantages and coefficients.

Invariant: pure in the configuration, the step and the values it is given; all randomness is keyed by (seed, step,
position of the prompt, candidate). The training loop makes one program for each step or evaluation.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec import convert
from torch import Tensor

from algorithms.algorithm import Algorithm, GroupAdvantages, Loss, coefficients
from algorithms.prompts import Prompt
from asyncflow.core.graph import Graph, Kind, Task, producer
from asyncflow.engine import Invalid
from asyncflow.errors import TrainingError
from asyncflow.randomness import derive_seed
from engines.gradients import solve
from engines.orders import (
    CheckpointOrder,
    ExportOrder,
    ForwardOrder,
    JudgeOrder,
    Replayed,
    ReplayOrder,
    RolloutOrder,
    UpdateOrder,
)
from engines.rewards.base import Outcome
from engines.rewards.registry import WeightedReward

BROKEN = "the log-probability of a rollout is not finite"
"""Why no judgement counts of a video that was sampled so, whatever the judge made of it."""


@dataclass(frozen=True)
class Sample:
    """What a candidate is sampled from: its prompt, its two noise seeds, and where its video is written, if at all.

    The `base` model's video is sampled without the adapter, and only to be compared with.
    """

    prompt: str
    initial_seed: int
    step_seed: int
    path: str = ""
    base: bool = False


def samples_of(
    prompts: Sequence[Prompt], *, group_size: int, seed: int, step: int, share_noise: bool
) -> list[list[Sample]]:
    """The candidates of each prompt's group, with seeds keyed by (seed, step, position of the prompt, candidate).

    Behind them stands the base model's video, as if it were a further candidate, for rewards that compare with it.
    """
    return [
        [
            Sample(
                prompt.text,
                derive_seed(seed, step, "initial", prompt.position, 0 if share_noise else candidate),
                derive_seed(seed, step, "steps", prompt.position, candidate),
                base=candidate == group_size,
            )
            for candidate in range(group_size + 1)
        ]
        for prompt in prompts
    ]


class SamplingProgram:
    """Orders for rollout, decode, judges and export; all that an evaluation needs. `samples[group][candidate]`."""

    def __init__(self, graph: Graph, samples: Sequence[Sequence[Sample]]) -> None:
        self.graph = graph
        self.samples = samples

    def payload(self, tasks: Sequence[Task], values: Mapping[str, Any]) -> Any:
        """See `Program`."""
        (task, *_) = tasks
        match task.kind:
            case Kind.ROLLOUT:
                seeds = tuple((sample.initial_seed, sample.step_seed) for sample in self._batch(task))
                (base,) = {sample.base for sample in self._batch(task)}  # a micro-batch is all of one policy
                return RolloutOrder(self._prompts(task), seeds, base)
            case Kind.SCORE | Kind.COMPARE:
                return JudgeOrder(tuple(self._batch(task)[0].prompt for task in tasks), tuple(map(self._places, tasks)))
            case Kind.EXPORT:
                return ExportOrder(tuple(sample.path for sample in self._batch(task)))
            case _:
                return None

    def local(self, task: Task, values: Mapping[str, Any]) -> tuple[Any, Sequence[str]]:
        """An evaluation computes nothing on the controller."""
        raise AssertionError(f"{task.id} is no task of an evaluation")

    def _batch(self, task: Task) -> list[Sample]:
        return [self.samples[task.group][candidate] for candidate in task.candidates]

    def _prompts(self, task: Task) -> tuple[str, ...]:
        return tuple(sample.prompt for sample in self._batch(task))

    def _places(self, task: Task) -> tuple[int, ...]:
        """Where each candidate of a judge's task lies in the micro-batch that holds it."""
        batches = [self.graph[producer(tensor)].candidates for tensor in task.inputs]
        return tuple(
            next(batch.index(candidate) for batch in batches if candidate in batch) for candidate in task.candidates
        )


@dataclass
class StepReport:
    """What a step's metrics are made of: `rewards` [G, R] with NaN where invalid, advantages, and losses by update."""

    rewards: dict[int, Tensor] = field(default_factory=dict)
    invalid: list[str] = field(default_factory=list)
    advantages: dict[int, GroupAdvantages] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    not_finite: int = 0
    """How many candidates were left out of an update because a log-probability or their gradient was not finite."""
    start_deviation: float = 0.0
    """The largest |ratio - 1| before the first update, which is 0 if replay reproduces the rollout."""


class StepProgram(SamplingProgram):
    """An RL step of `algorithm`; `trained[group]` [G, K - 1] says which denoising steps of whom are trained."""

    def __init__(
        self,
        graph: Graph,
        samples: Sequence[Sequence[Sample]],
        algorithm: Algorithm,
        rewards: Sequence[WeightedReward],
        trained: Sequence[Tensor],
    ) -> None:
        super().__init__(graph, samples)
        self.report = StepReport()
        self._algorithm = algorithm
        self._rewards = rewards
        self._trained = trained

    def payload(self, tasks: Sequence[Task], values: Mapping[str, Any]) -> Any:
        """See `Program`."""
        (task, *_) = tasks
        match task.kind:
            case Kind.REFERENCE | Kind.OLD_LOG_PROB | Kind.FORWARD:
                return ForwardOrder(self._prompts(task), self._replayed_steps(task))
            case Kind.REPLAY:
                old, steps = self._old_units(task, values), self._replayed_steps(task)
                trained = self._trained[task.group][list(task.candidates)][:, steps]
                return ReplayOrder(
                    self._prompts(task), steps, None if old is None else old[:, steps].tolist(), trained.tolist()
                )
            case Kind.UPDATE:
                return UpdateOrder(self._coefficients(task, values))
            case _:
                return super().payload(tasks, values)

    def local(self, task: Task, values: Mapping[str, Any]) -> tuple[Any, Sequence[str]]:
        """See `Program`. After an advantage, passes over trajectories of which none is kept are not needed."""
        if task.kind is Kind.REWARD:
            self.report.rewards[task.group] = self._reward(task.group, values)
            return None, ()
        advantages = self._algorithm.advantages(task.group, self._pool(task))
        self.report.advantages[task.group] = advantages
        unneeded = [
            other.id
            for other in self.graph.of(Kind.REFERENCE, Kind.OLD_LOG_PROB, Kind.FORWARD, Kind.REPLAY)
            if other.group == task.group and not advantages.kept[list(other.candidates)].any()
        ]
        return None, unneeded

    def _pool(self, task: Task) -> dict[int, Tensor]:
        groups = sorted(self.graph[name].group for name in task.values)
        return {group: self.report.rewards[group] for group in groups}

    def _reward(self, group: int, values: Mapping[str, Any]) -> Tensor:
        """The rewards [G, R] of a group, NaN where one is invalid."""
        size = sum(not sample.base for sample in self.samples[group])
        broken = self._broken(values)
        columns = []
        for weighted in self._rewards:
            outcomes: dict[tuple[int, ...], Outcome] = {
                task.candidates: value if broken.isdisjoint(task.candidates) else Invalid(BROKEN)
                for task, value in ((self.graph[name], value) for name, value in values.items())
                if task.judge == weighted.name
            }
            column = weighted.reward.rewards(outcomes, size)
            self.report.invalid += [
                f"{weighted.name} of candidate {candidate} of prompt {self.samples[group][candidate].prompt!r}: "
                f"{outcome.reason}"
                for candidate, outcome in enumerate(column)
                if isinstance(outcome, Invalid)
            ]
            columns.append([float("nan") if isinstance(outcome, Invalid) else outcome for outcome in column])
        return torch.tensor(columns, dtype=torch.float64).T

    def _broken(self, values: Mapping[str, Any]) -> set[int]:
        """The candidates of a group, the base model's video among them, whose rollout has units that are not finite."""
        return {
            candidate
            for task in (self.graph[name] for name in values if self.graph[name].kind is Kind.ROLLOUT)
            for candidate, units in zip(task.candidates, values[task.id], strict=True)
            if not all(map(math.isfinite, units))
        }

    def _replayed_steps(self, task: Task) -> tuple[int, ...]:
        """The denoising steps that some candidate of the micro-batch trains."""
        chosen = self._trained[task.group][list(task.candidates)].any(dim=0)
        return tuple(chosen.nonzero().flatten().tolist())

    def _coefficients(self, update: Task, values: Mapping[str, Any]) -> dict[str, list[list[float]]]:
        """The coefficients of the sums that each replay of a mini-batch kept; none if nobody was kept."""
        replays = {t: convert(values[t.id], Replayed) for t in self.graph.of(Kind.REPLAY) if t.id in values}
        units, old, advantages, trained, sound = [], [], [], [], []
        for task, replayed in replays.items():
            candidates, of_group = list(task.candidates), self.report.advantages[task.group]
            now = self._all_steps(task, values.get(f"{Kind.FORWARD}/{_place(task)}", replayed.units))
            before = self._old_units(task, values)
            before = now[:, :, 0] if before is None else before
            sound.append(self._sound(task, now, before, torch.tensor(replayed.finite)))
            units.append(now.where(sound[-1][:, None, None], 0.0))
            old.append(before.where(sound[-1][:, None], 0.0))
            advantages.append(of_group.advantages[candidates])
            trained.append(self._trained[task.group][candidates] & of_group.kept[candidates, None])
        if not any(mask.any() for mask in trained):
            return {}
        trained = [mask & finite[:, None] for mask, finite in zip(trained, sound, strict=True)]
        if not any(mask.any() for mask in trained):
            raise TrainingError(
                f"{update.id}: no candidate is left whose log-probabilities and gradients are finite; "
                "go on from the last checkpoint with a lower --lr"
            )
        mask = torch.cat(trained)
        if update.mini_batch == 0:
            ratio = (torch.cat(units)[:, :, 0] - torch.cat(old))[mask].exp()
            self.report.start_deviation = (ratio - 1).abs().max().item()
        made, loss = coefficients(self._algorithm, torch.cat(units), torch.cat(old), torch.cat(advantages), mask)
        self.report.losses.append(loss)
        result = {}
        parts = made.split([len(rows) for rows in trained])
        for (task, replayed), part, finite in zip(replays.items(), parts, sound, strict=True):
            weights = torch.tensor(replayed.weights, dtype=torch.float64).flatten(2)
            solved = solve(weights, part[:, self._replayed_steps(task)].flatten(1))
            result[task.id] = solved.where(finite[:, None], 0.0).tolist()
        return result

    def _sound(self, task: Task, units: Tensor, old: Tensor, gradients: Tensor) -> Tensor:
        """Whose units [n, K, M], old ones [n, K] and `gradients` [n] are finite, bool [n]; others are reported."""
        finite = {
            "log-probability": units.isfinite().flatten(1).all(dim=1) & old.isfinite().all(dim=1),
            "gradient": gradients,
        }
        for what, of_candidates in finite.items():
            self.report.invalid += [
                f"{task.id}: the {what} of candidate {task.candidates[place]} of prompt "
                f"{self.samples[task.group][task.candidates[place]].prompt!r} is not finite; it is left out"
                for place in (~of_candidates).nonzero().flatten().tolist()
            ]
        sound = torch.stack(list(finite.values())).all(dim=0)
        self.report.not_finite += int((~sound).sum())
        return sound

    def _all_steps(self, task: Task, units: list[list[list[float]]]) -> Tensor:
        """The units of the steps that were replayed, among all stochastic steps [n, K - 1, M]; 0 for the others."""
        made = torch.tensor(units, dtype=torch.float64)
        every = made.new_zeros(len(made), self._trained[0].shape[1], made.shape[2])
        every[:, self._replayed_steps(task)] = made
        return every

    def _old_units(self, task: Task, values: Mapping[str, Any]) -> Tensor | None:
        """What a replay's ratios start from, [n, K - 1]: recorded, or recomputed; None where it finds that itself."""
        recorded, recomputed = (f"{kind}/{_place(task)}" for kind in (Kind.ROLLOUT, Kind.OLD_LOG_PROB))
        if recorded in task.values:
            return torch.tensor(values[recorded], dtype=torch.float64)
        if recomputed in task.values:
            return self._all_steps(task, values[recomputed])[:, :, 0]
        return None


def _place(task: Task) -> str:
    """What the tasks of one micro-batch share in their names."""
    return task.id.partition("/")[2]


class CheckpointProgram:
    """The one order of a checkpoint."""

    def __init__(self, order: CheckpointOrder) -> None:
        self._order = order

    def payload(self, tasks: Sequence[Task], values: Mapping[str, Any]) -> Any:
        """See `Program`."""
        return self._order

    def local(self, task: Task, values: Mapping[str, Any]) -> tuple[Any, Sequence[str]]:
        """A checkpoint computes nothing on the controller."""
        raise AssertionError(f"{task.id} is no task of a checkpoint")
