"""When a score arrives changes no bit of a gradient, and what is not to be trained contributes nothing to it.

Whole steps run here with the real controller, dispatcher, program and policy engine; only time and the judge are made
up: scores are looked up, and take what the test says.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from algorithms.dancegrpo import DanceGRPO, DanceGRPOConfig
from algorithms.program import Sample, StepProgram
from algorithms.train import dataflow
from asyncflow.core.cost import BatchSeconds, Durations, StatedCosts
from asyncflow.core.graph import DEVICE, Kind, producer
from asyncflow.core.plan import able
from asyncflow.core.schedules import NAMES, cluster, schedule
from asyncflow.core.trace import Trace
from asyncflow.engine import Invalid, Result, Work
from asyncflow.testing import HashedDurations, run_virtually
from engines.adapter import AdapterSettings
from engines.optimizer import OptimizerSettings
from engines.orders import UpdateOrder
from engines.policy.settings import FILE_NAME
from engines.rank import PolicyEngine, PolicyJob, RankEngine
from engines.rewards.registry import WeightedReward
from engines.rewards.testing import Brightness
from engines.testing import tiny_settings

Scores = dict[tuple[int, int], float | Invalid]
Gradients = dict[str, dict[tuple[int, int], Tensor]]
"""By group and candidate; gradients by update, too."""

PROMPTS = ("a red square moving left", "a blue circle moving up")
GROUP_SIZE = 4
SCORES: Scores = {
    (group, candidate): score
    for group, row in enumerate([(0.5, 0.1, 0.2, 0.3), (0.9, 0.4, 0.6, 0.7)])
    for candidate, score in enumerate(row)
}
REWARDS = [WeightedReward(Brightness(), 1.0)]


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, sampled in two chunks of a frame and two denoising steps."""
    folder = tmp_path_factory.mktemp("models") / "quick"
    shutil.copytree(tiny_model, folder)
    settings = tiny_settings(text_length=8, frames_per_chunk=1, latent_frames=2, denoising_steps=(1000.0, 500.0))
    (folder / FILE_NAME).write_bytes(msgspec.json.encode(settings))
    return folder


class Summed(Exception):
    """A share of a sum over ranks."""


@dataclass
class Ranks:
    """The engine of all ranks, since what a task gives does not depend on the rank, with a judge that looks up.

    The last rank that comes to an update takes the step for all of them. `gradients[update]` is what each candidate
    contributes to it, in fixed point [P + 1], unless that is 0.
    """

    policy: PolicyEngine
    scores: Scores
    gang: int
    gradients: Gradients = field(default_factory=dict)
    _waiting: list[Work] = field(default_factory=list)

    def run(self, work: Work) -> Result:
        """See `Engine`."""
        match work.tasks[0].kind:
            case Kind.DECODE:
                return Result({f"{work.tasks[0].id}.frames": torch.empty(0)})
            case Kind.SCORE:
                outcomes = {task.id: self.scores[task.group, *task.candidates] for task in work.tasks}
                invalid = {name: outcome.reason for name, outcome in outcomes.items() if isinstance(outcome, Invalid)}
                return Result(values={name: outcomes[name] for name in outcomes.keys() - invalid}, invalid=invalid)
            case Kind.UPDATE:
                return self._update(work)
            case _:
                return RankEngine(self.policy, None).run(work)

    def _update(self, work: Work) -> Result:
        self._waiting.append(work)
        if len(self._waiting) < self.gang:
            return Result()
        works, self._waiting = self._waiting, []
        total = sum(map(self._share, works))
        made: dict[tuple[int, int], Tensor] = {}
        for work in works:
            for name, tensor in work.tensors.items():
                _, group, first = producer(name).split("/")
                for row in range(len(tensor)):
                    made[int(group), int(first) + row] = self._share(alone(work, name, row))
        assert torch.equal(sum(made.values()), total)
        self.gradients[work.tasks[0].id] = {place: share for place, share in made.items() if share.any()}
        return self.policy.update(replace(work, sum_over_ranks=lambda _: total))

    def _share(self, work: Work) -> Tensor:
        """What the policy engine gives to the sum over ranks."""

        def stop(share: Tensor) -> Tensor:
            raise Summed(share)

        with pytest.raises(Summed) as summed:
            self.policy.update(replace(work, sum_over_ranks=stop))
        return summed.value.args[0]


def alone(work: Work, name: str, row: int) -> Work:
    """An update in which one candidate of one replay, whose gradients are tensor `name`, has coefficients."""
    order = msgspec.convert(work.payload, UpdateOrder)
    coefficients = {
        replay: [[c * (replay == producer(name) and place == row) for c in cs] for place, cs in enumerate(rows)]
        for replay, rows in order.coefficients.items()
    }
    return replace(work, tensors={name: work.tensors[name]}, payload=UpdateOrder(coefficients))


@dataclass(frozen=True)
class Trained:
    """A step that has run: what each candidate contributed to each update, the weights' hash, and when what ran."""

    gradients: Gradients
    sha256: str
    trace: Trace

    def of_group(self, group: int) -> dict[tuple[int, int], Tensor]:
        """The contributions of a group's candidates."""
        return {place: share for made in self.gradients.values() for place, share in made.items() if place[0] == group}


def train(
    model: Path,
    name: str,
    durations: Durations,
    scores: Scores = SCORES,
    *,
    lot: int | None = None,
    **config: Any,
) -> Trained:
    """A step of two groups in micro-batches of two under schedule `name`; a `lot` draws where and in which order."""
    settings = DanceGRPOConfig(
        model=str(model), prompts="p.txt", group_size=GROUP_SIZE, prompts_per_step=2, task_batch=2, exact=True, **config
    )
    algorithm = DanceGRPO(settings, (1.0,))
    ranks = cluster(name, 2, int(name != "colocated"))
    graph, plan = schedule(name, dataflow(settings, algorithm, REWARDS), ranks, judge_batch=2)
    if lot is not None:
        random = Random(lot)
        places = {t.id: (random.choice(able(t, graph, ranks)),) for t in graph if t.kind is not Kind.UPDATE}
        order = tuple(random.sample(plan.order, len(plan.order)))
        plan = msgspec.structs.replace(plan, ranks=plan.ranks | places, order=order)
    samples = [
        [Sample(prompt, group, 10 * group + c) for c in range(GROUP_SIZE)] for group, prompt in enumerate(PROMPTS)
    ]
    program = StepProgram(graph, samples, algorithm, REWARDS, [torch.ones(GROUP_SIZE, 1, dtype=torch.bool)] * 2)
    job = PolicyJob(
        model=model,
        device="cpu",
        kernel=algorithm.kernel,
        units=algorithm.units,
        weights=algorithm.weights,
        replay_order=settings.replay_order,
        adapter=AdapterSettings(rank=2, alpha=4.0),
        optimizer=OptimizerSettings(lr=0.05),
        prompts=PROMPTS,
        seed=3,
        exact=True,
    )
    engine = Ranks(PolicyEngine(job), scores, len(ranks.policy))
    result = run_virtually(graph, plan, durations, program, {0: engine, 1: engine})
    last = graph.of(Kind.UPDATE)[-1].id
    (value,) = result.values[last].values()
    return Trained(engine.gradients, value["sha256"], result.trace)


def same(one: Mapping[Any, Tensor], other: Mapping[Any, Tensor]) -> bool:
    """Whether the contributions are the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[place], other[place]) for place in one)


def lots(seed: int) -> Durations:
    """Durations with which anything may come before or long after anything else, and many things at one moment."""
    return HashedDurations(seed, (0.0, 1.0, 3.0, 40.0))


@pytest.fixture(scope="module")
def in_order(model: Path) -> Trained:
    """The step that everything is compared with: two mini-batches, each score known at once."""
    return train(
        model,
        "colocated",
        StatedCosts(dict.fromkeys(("rollout", "decode", "replay", "update"), 1) | {"score": 0}),
        mini_batches=2,
    )


@pytest.mark.parametrize("name", NAMES)
def test_scores_in_any_order_give_the_same_bits(model: Path, in_order: Trained, name: str):
    """Each candidate's contribution to each update, and the weights, wherever and whenever everything runs."""
    orders, early = set(), False
    for seed in range(2):
        step = train(model, name, lots(seed), lot=seed, mini_batches=2)
        assert step.gradients.keys() == in_order.gradients.keys()
        assert all(same(made, in_order.gradients[update]) for update, made in step.gradients.items())
        assert step.sha256 == in_order.sha256
        spans = sorted((span for span in step.trace.spans if span.lane == DEVICE), key=lambda span: span.end)
        orders.add(tuple(task for span in spans if span.name == "score" for task in span.tasks))
        known = max(span.end for span in spans if span.name == "advantage")
        early |= any(span.start < known for span in spans if span.name == "replay")
    assert len(orders) == 2
    assert early is (name not in ("colocated", "async-reward"))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("config", "denominators"),
    [({"best_of_n": 2}, (1, 1)), ({"mini_batches": 2}, (1, 1)), ({}, (8, 7))],
    ids=["best-of-n", "mini-batches", "one-mini-batch"],
)
def test_an_invalid_score_changes_its_own_group_alone(
    model: Path, config: dict[str, int], denominators: tuple[int, int], seed: int
):
    """Other groups keep their bits; where it counted in their denominator they grow by that, and no more."""
    whole = train(model, "merged-replay", lots(seed), **config)
    scores = SCORES | {(1, 0): Invalid("no answer")}
    step = train(model, "merged-replay", lots(seed + 10), scores, lot=seed, **config)
    assert (1, 0) in whole.of_group(1)
    assert (1, 0) not in step.of_group(1)
    both = step.of_group(1).keys() & whole.of_group(1).keys()
    assert not any(torch.equal(step.of_group(1)[place], whole.of_group(1)[place]) for place in both)
    before, after = denominators
    assert step.of_group(0).keys() == whole.of_group(0).keys()
    for place, share in step.of_group(0).items():
        difference = after * share - before * whole.of_group(0)[place]
        assert difference.abs().max() <= (0 if before == after else (before + after) / 2 + 1)  # each is rounded once


@pytest.mark.parametrize(
    ("config", "scores", "contribute"),
    [
        ({"best_of_n": 2}, SCORES, {(0, 0), (0, 1), (1, 0), (1, 1)}),
        ({"best_of_n": 2, "replay_order": "packed"}, SCORES, {(0, 0), (0, 1), (1, 0), (1, 1)}),
        (
            {"drop_zero_advantages": True},
            SCORES | dict.fromkeys([(0, c) for c in range(4)], 0.5),
            {(1, c) for c in range(4)},
        ),
    ],
    ids=["best-of-n", "best-of-n-packed", "zero-advantages"],
)
def test_who_is_left_out_contributes_nothing_whatever_became_of_the_replay(
    model: Path, config: dict[str, Any], scores: Scores, contribute: set[tuple[int, int]]
):
    """It was never begun, stopped by the engine while it ran, or had ended: the same bits."""
    steps = []
    for seconds, fate in ((0.1, []), (5.25, [True]), (30.0, [False])):
        costs = StatedCosts({"rollout": 1, "decode": 1, "replay": 4, "update": 1, "score": BatchSeconds(seconds, 0)})
        steps.append(train(model, "merged-replay", costs, scores, **config))
        assert [span.cancelled for span in steps[-1].trace.spans if "replay/0/2" in span.tasks] == fate
    for step in steps:
        assert step.gradients["update/0"].keys() == contribute
        assert same(step.gradients["update/0"], steps[0].gradients["update/0"])
        assert step.sha256 == steps[0].sha256
