"""The gradient that an update applies is autograd's of the loss, through policy, kernel, units, weights and schedule.

In float64 to 1e-12 (there every `float()` of ours and of diffusers means double), in float32 to 1e-5.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from algorithms import program
from algorithms.algorithm import Loss, coefficients
from algorithms.dancegrpo import DanceGRPO, DanceGRPOConfig
from algorithms.program import Sample, StepProgram
from algorithms.train import dataflow
from asyncflow.core.graph import LOCAL_KINDS, Kind
from asyncflow.core.schedules import NAMES, Name, cluster, schedule
from asyncflow.engine import Work
from asyncflow.errors import TrainingError
from engines import rank
from engines.adapter import AdapterSettings
from engines.kernel import chunk_units
from engines.optimizer import OptimizerSettings
from engines.rank import PolicyEngine, PolicyJob, RankEngine
from engines.rewards.registry import WeightedReward
from engines.rewards.testing import Brightness

ORDERS = ("by-chunk", "batched", "packed")
GROUPS, SIZE, BATCH, STEPS = 2, 4, 2, 2
TRAINED = torch.tensor([[True, True], [True, False], [False, True], [True, True]])
SCORES = {
    "brightness": [[0.1, 0.9, 0.4, 0.35], [0.2, 0.25, 0.8, 0.1]],
    "other": [[3.0, 1.0, 2.5, 0.5], [0.0, 4.0, 1.0, 1.5]],
}
OFFSETS = torch.tensor([[0.5, -1.5], [-0.5, 1.0], [1.5, -1.0], [-1.0, 0.25]])
"""Times `spread`, what is added to the old units of the candidates, so that ratios lie on both sides of 1."""
VARIANTS: dict[str, dict[str, Any]] = {
    "symmetric": {},
    "asymmetric": {"clip_high": 0.002},
    "dual": {"dual_clip": 1.002},
    "clamp": {"advantage_clamp": 0.4},
    "kl": {"kl": 0.3},
    "sde": {"kernel": "dance-sde", "chunk_reduce": "sum"},
    "global": {"statistics": "global", "best_of_n": 2},
    "recomputed": {"old_log_probs": "recomputed"},
    "far": {"spread": 1.5, "dual_clip": 5.0},
    "everything": {"clip_high": 0.002, "dual_clip": 1.003, "advantage_clamp": 0.9, "kl": 0.3, "other": 0.5},
}


class Other(Brightness):
    """A second reward."""

    name = "other"


@dataclass
class Step:
    """One RL step of two mini-batches, run task by task, and what each update was given."""

    engine: PolicyEngine
    program: StepProgram
    algorithm: DanceGRPO
    spread: float
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def run(self) -> None:
        """Every task of the graph, in the order in which it is declared; scores come from the table."""
        ranks = RankEngine(self.engine, None)
        take_step = self.engine._optimizer.step

        def step(gradient: Tensor) -> object:
            self.weights.append(self.engine._adapter.flatten())
            self.gradients.append(gradient.clone())
            return take_step(gradient)

        self.engine._optimizer.step = step
        for task in self.program.graph:
            needs = {name: self.values[name] for name in task.values if name in self.values}
            if task.kind is Kind.SCORE:
                self.values[task.id] = SCORES[task.judge][task.group][task.candidates[0]]
            elif task.kind in LOCAL_KINDS - {Kind.BARRIER}:
                self.values[task.id], _ = self.program.local(task, needs)
            elif task.kind not in (Kind.DECODE, Kind.BARRIER):
                payload = msgspec.to_builtins(self.program.payload((task,), needs))
                inputs = {name: self.tensors[name] for name in task.inputs}
                result = ranks.run(Work((task,), inputs, payload, lambda total: total))
                self.values |= msgspec.to_builtins(result.values)
                if task.kind is Kind.ROLLOUT:
                    offsets = self.spread * OFFSETS[list(task.candidates)]
                    self.values[task.id] = (torch.tensor(self.values[task.id]) + offsets).tolist()
                self.tensors |= result.tensors

    def autograd(self, mini_batch: int) -> Tensor:
        """The gradient of the algorithm's loss over a mini-batch, by one backward through everything."""
        replays = [task for task in self.program.graph.of(Kind.REPLAY) if task.mini_batch == mini_batch]
        before = [replay.id.partition("/")[2] for replay in replays]
        if self.algorithm.config.recomputes_old:
            with torch.no_grad():
                old = [self._units(self.weights[0], place)[:, :, 0] for place in before]
        else:
            old = [torch.tensor(self.values[f"rollout/{place}"]) for place in before]
        units = [self._units(self.weights[mini_batch], place) for place in before]
        of_groups = [self.program.report.advantages[replay.group] for replay in replays]
        members = [list(replay.candidates) for replay in replays]
        loss = self.algorithm.loss(
            torch.cat(units).double(),
            torch.cat(old).double(),
            torch.cat([group.advantages[who] for group, who in zip(of_groups, members, strict=True)]),
            torch.cat([TRAINED[who] & group.kept[who, None] for group, who in zip(of_groups, members, strict=True)]),
        )
        weights = [p for name, p in self.engine._policy.model.named_parameters() if "lora_" in name]
        return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss.value, weights)])

    def _units(self, weights: Tensor, place: str) -> Tensor:
        """The units [B, K - 1, M] of a trajectory in one graph from the model's own parameters."""
        policy, adapter = self.engine._policy, self.engine._adapter
        noisy, clean = self.tensors[f"rollout/{place}.noisy"], self.tensors[f"rollout/{place}.clean"]
        text = self.engine._text([f"prompt {place[0]}"] * len(clean))
        adapter.assign(weights)
        with adapter.disabled(), torch.no_grad():
            frozen = self._velocities(noisy, clean, text)
        units = []
        for step, of_step in enumerate(self._velocities(noisy, clean, text)):
            total = torch.zeros(())
            for chunk, velocity, reference in zip(policy.settings.chunks, of_step, frozen[step], strict=True):
                span, share = slice(chunk.start, chunk.stop), len(chunk) / policy.settings.latent_frames
                x, x_next = noisy[step, :, :, span], noisy[step + 1, :, :, span]
                sigmas = policy.settings.sigmas[step : step + 2]
                total = total + chunk_units(self.algorithm.units, share, x, velocity, x_next, *sigmas, reference)
            units.append(total)
        return torch.stack(units, dim=1)

    def _velocities(self, noisy: Tensor, clean: Tensor, text: Tensor) -> list[list[Tensor]]:
        """Of each stochastic step and chunk."""
        policy = self.engine._policy
        made: list[list[Tensor]] = [[] for _ in range(STEPS)]
        cache = policy.new_cache(*clean.shape[-2:])
        for chunk in policy.settings.chunks:
            span = slice(chunk.start, chunk.stop)
            for step, sigma in enumerate(policy.settings.sigmas[:STEPS]):
                made[step].append(policy.velocity(noisy[step, :, :, span], sigma, text, cache, chunk.start))
            policy.write_context(clean[:, :, span], text, cache, chunk.start)
        return made


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Computes in float64, also where float32 is asked for."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(rank, "compute_dtype", lambda device: torch.float64)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def make_step(tiny_model: Path) -> Callable[..., Step]:
    def make(order: str = "by-chunk", name: Name = "stagebreaker", **changes: Any) -> Step:
        other, spread = changes.pop("other", 0.0), changes.pop("spread", 0.004)
        rewards = [WeightedReward(Brightness(), 1.0), *([WeightedReward(Other(), other)] if other else [])]
        config = DanceGRPOConfig(
            **{
                "model": "m", "prompts": "p.txt", "clip": 0.0015, "group_size": SIZE, "prompts_per_step": GROUPS,
                "mini_batches": 2, "task_batch": BATCH, "replay_order": order, **changes,
            }
        )  # fmt: skip
        algorithm = DanceGRPO(config, tuple(reward.weight for reward in rewards))
        ranks = cluster(name, 1, 0) if name == "colocated" else cluster(name, 2, 1)
        graph, _ = schedule(name, dataflow(config, algorithm, rewards), ranks)
        samples = [[Sample(f"prompt {g}", g, 10 + 10 * g + c) for c in range(SIZE)] for g in range(GROUPS)]
        job = PolicyJob(
            model=tiny_model, device="cpu", kernel=algorithm.kernel, units=algorithm.units, weights=algorithm.weights,
            replay_order=config.replay_order, adapter=AdapterSettings(rank=2, alpha=4.0),
            optimizer=OptimizerSettings(lr=0.02), prompts=[f"prompt {g}" for g in range(GROUPS)], seed=3, exact=False,
        )  # fmt: skip
        engine = PolicyEngine(job)
        engine._policy.model.to(torch.get_default_dtype())  # diffusers keeps some modules in float32
        drawn = torch.randn(engine._adapter.size, generator=torch.Generator().manual_seed(5))
        engine._adapter.assign(engine._adapter.flatten() + 0.1 * drawn)
        step = Step(engine, StepProgram(graph, samples, algorithm, rewards, [TRAINED] * GROUPS), algorithm, spread)
        step.run()
        return step

    return make


def check(step: Step, tolerance: float) -> None:
    """Each update's gradient is that of the loss, up to a relative `tolerance`."""
    for mini_batch, gradient in enumerate(step.gradients):
        expected = step.autograd(mini_batch)
        assert expected.norm() > 0
        assert (gradient - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_the_loss_s(variant: str, order: str, make_step: Callable[..., Step], double: None) -> None:
    """For every order of replay and form of the loss, at ratios inside and outside of the clip."""
    step = make_step(order, **VARIANTS[variant])
    losses = step.program.report.losses[step.algorithm.config.recomputes_old :]
    assert all(loss.metrics["actor/pg_clipfrac"] > 0 for loss in losses)
    check(step, 1e-12)


@pytest.mark.parametrize("variant", [name for name, changes in VARIANTS.items() if "dual_clip" in changes])
def test_the_dual_clip_is_met(variant: str, make_step: Callable[..., Step], double: None) -> None:
    """The cases above have a trained ratio beyond it, of a candidate whose advantage is below 0."""
    step = make_step(**VARIANTS[variant])
    replays = [task for task in step.program.graph.of(Kind.REPLAY) if task.mini_batch == 1]
    units = torch.cat([torch.tensor(step.values[task.id]["units"])[:, :, 0] for task in replays])
    old = torch.cat([torch.tensor(step.values[task.values[0]]) for task in replays])
    losing = step.program.report.advantages[1].advantages[:, :1] < 0
    assert ((units - old).exp() > VARIANTS[variant]["dual_clip"])[losing & TRAINED].any()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_has_the_loss_s_gradient(
    name: Name, order: str, make_step: Callable[..., Step], double: None
) -> None:
    """With everything a loss may have, forward-only replays included."""
    check(make_step(order, name, **VARIANTS["everything"]), 1e-12)


@pytest.mark.parametrize("order", ORDERS)
def test_float32_is_as_right_as_it_can_be(order: str, make_step: Callable[..., Step]) -> None:
    check(make_step(order, **VARIANTS["everything"]), 1e-5)


def test_a_wrong_weight_stops_the_run(
    make_step: Callable[..., Step], monkeypatch: pytest.MonkeyPatch, double: None
) -> None:
    """One weight of one unit, off by 1 %, while nothing is clipped: coefficients are no multiple of the one row."""
    right = DanceGRPO.weights

    def wrong(self: DanceGRPO, units: Tensor, old_units: Tensor, trained: Tensor) -> Tensor:
        made = right(self, units, old_units, trained)
        made[0, :, 0] *= 1.01
        return made

    monkeypatch.setattr(DanceGRPO, "weights", wrong)
    with pytest.raises(TrainingError, match="do not fit the loss"):
        make_step(clip=1.0)


def test_a_wrong_coefficient_is_seen(
    make_step: Callable[..., Step], monkeypatch: pytest.MonkeyPatch, double: None
) -> None:
    """The coefficients of one candidate, off by 1 %: they fit the weights, but their gradient is not the loss's."""

    def wrong(*arguments: Any) -> tuple[Tensor, Loss]:
        made, loss = coefficients(*arguments)
        made[0] *= 1.01
        return made, loss

    monkeypatch.setattr(program, "coefficients", wrong)
    with pytest.raises(AssertionError):
        check(make_step(), 1e-5)
