"""The training loop, on rank 0: one graph, one plan and one program a step, and all that is written of a run.

Invariant: it decides what a step is, never when a task of it runs. `command` calls `train` once every rank is ready.
"""

import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
import msgspec

from algorithms.algorithm import Algorithm
from algorithms.config import RunConfig
from algorithms.environment import environment
from algorithms.metrics import Metrics, evaluation_metrics, quality, step_metrics
from algorithms.planning import Planner
from algorithms.program import CheckpointProgram, Sample, SamplingProgram, StepProgram, samples_of
from algorithms.prompts import PromptSampler
from algorithms.resume import Progress, Saved
from algorithms.step import checkpoint_graph, evaluation_graph, step_graph
from asyncflow import checkpoint, perfetto
from asyncflow.config import dump
from asyncflow.controller import Controller
from asyncflow.core.bounds import best_bound
from asyncflow.core.graph import Graph
from asyncflow.core.plan import Cluster, Plan
from asyncflow.core.schedules import schedule
from asyncflow.core.simulate import simulate
from asyncflow.engine import Invalid
from asyncflow.errors import CheckpointError, Interrupted, JudgeUnfit, TrainingError
from asyncflow.randomness import derive_seed
from engines.orders import CheckpointOrder
from engines.rewards.failures import Failures
from engines.rewards.registry import WeightedReward

SHOWN = 8
"""How many held-out prompts an evaluation writes a video of."""
SHOWN_INVALID = 3
"""Of how many judgements that failed a step or an evaluation says why; all are counted."""

FAILED_SAVES = 3
"""How many saves may fail in a row before the run ends."""


@dataclass(kw_only=True)
class Run:
    """A training run, resolved: nothing in it can be wrong any more."""

    config: RunConfig
    algorithm: Algorithm
    rewards: Sequence[WeightedReward]
    cluster: Cluster
    prompts: Sequence[str]
    eval_prompts: Sequence[str]
    stochastic_steps: int
    out: Path
    model_sha256: str
    progress: Progress = field(default_factory=Progress)

    def step(self) -> tuple[Graph, Plan]:
        """The graph and the plan of an RL step."""
        return self.scheduled(dataflow(self.config, self.algorithm, self.rewards))

    def scheduled(self, dataflow: Graph) -> tuple[Graph, Plan]:
        """`dataflow` under the run's schedule."""
        config = self.config
        graph, plan = schedule(
            config.schedule,
            dataflow,
            self.cluster,
            forward_replays=config.forward_replays,
            judge_batch=config.judge_batch,
        )
        plan.validate(graph, self.cluster)
        return graph, plan


def dataflow(config: RunConfig, algorithm: Algorithm, rewards: Sequence[WeightedReward]) -> Graph:
    """The graph of an RL step, with no schedule's edges."""
    return step_graph(
        config.prompts_per_step,
        config.group_size,
        mini_batches=config.mini_batches,
        task_batch=config.task_batch,
        rewards=rewards,
        global_statistics=algorithm.global_statistics,
        reference=algorithm.units.needs_reference,
        recompute_old=config.recomputes_old,
    )


async def train(run: Run, controller: Controller) -> None:
    """Train from `run.progress` to the last step, evaluating, saving and reporting on the way.

    If it is interrupted, or a judge is unfit, it saves the last completed step, and raises Interrupted or JudgeUnfit.
    """
    loop = _Loop(run, controller)
    loop.open()
    try:
        await _train(loop)
    except Interrupted:
        await loop.leave("interrupted")
        raise
    except JudgeUnfit:
        await loop.leave("stopped")
        raise


async def _train(loop: "_Loop") -> None:
    run = loop.run
    began, first, last = time.monotonic(), run.progress.step, run.config.steps
    if first == 0 and loop.evaluates:
        metrics = {"step": 0, **await loop.evaluate(0)}
        loop.write(metrics)
        click.echo(_line(metrics, last, None))
    for step in range(first + 1, last + 1):
        metrics = await loop.step(step)
        try:
            if loop.evaluates and (step % run.config.eval_every == 0 or step == last):
                metrics |= await loop.evaluate(step)
        finally:
            loop.write(metrics)
        loop.failures.check()
        due = bool(run.config.save_every) and step % run.config.save_every == 0
        if due or step in (last, run.progress.best_step):
            await loop.save(step, final=step == last)
        click.echo(_line(metrics, last, (time.monotonic() - began) / (step - first) * (last - step)))
    await loop.planner.close()
    click.echo(f"done: the adapter is in {run.out / 'adapter'}, the metrics are in {run.out / 'metrics.jsonl'}")
    if loop.evaluates and first == 0:
        click.echo(f"videos before and after: {run.out / 'samples'}/step-000000 and step-{last:06d}")


class _Loop:
    def __init__(self, run: Run, controller: Controller) -> None:
        self.run = run
        self.controller = controller
        self.sampler = PromptSampler(list(run.prompts), run.config.seed)
        self.graph, plan = run.step()
        searches = run.config.schedule == "stagebreaker"
        self.planner = Planner(
            self.graph, plan, run.cluster, searches=searches, fixed=run.config.exact, found=run.progress.plan
        )
        self.evaluates = bool(run.eval_prompts and run.config.eval_every)
        self.failures = Failures(run.rewards)
        self.failed_saves = 0
        self.saved = run.progress.step

    def open(self) -> None:
        """Make the run directory, and say what attends; resumed in its own, keep the metrics up to its checkpoint."""
        out = self.run.out
        self.metrics = out / "metrics.jsonl"
        found = environment(self.run.config, len(self.run.cluster.ranks))
        click.echo(f"attention: {found['attention']}")
        with _writing(out):
            out.mkdir(parents=True, exist_ok=True)
            (out / "config.toml").write_text(dump(self.run.config))
            (out / "environment.json").write_text(json.dumps(found, indent=2) + "\n")
            lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
            kept = [line for line in lines if _step_of(line) <= self.run.progress.step]
            self.metrics.write_text("".join(f"{line}\n" for line in kept))

    def write(self, metrics: Metrics) -> None:
        """Append one object to metrics.jsonl; a value that is not finite is null."""
        with _writing(self.run.out), self.metrics.open("a") as file:
            file.write(msgspec.json.encode(metrics).decode() + "\n")

    async def step(self, step: int) -> Metrics:
        """One RL step. Raises JudgeUnfit where no group trains; such a step changed no weights and does not count."""
        run, config = self.run, self.run.config
        samples = samples_of(
            self.sampler.at(step - 1, config.prompts_per_step),
            group_size=config.group_size,
            seed=config.seed,
            step=step,
            share_noise=run.algorithm.share_noise,
        )
        trained = [
            run.algorithm.trained_steps(
                run.stochastic_steps,
                [derive_seed(config.seed, step, "trained steps", group, place) for place in range(config.group_size)],
            )
            for group in range(config.prompts_per_step)
        ]
        graph, plan = self.planner.graph, self.planner.plan
        program = StepProgram(graph, samples, run.algorithm, run.rewards, trained)
        result = await self.controller.run(graph, plan, program, run.progress.costs.estimates())
        metrics: Metrics = {"step": step, "training/epoch": step * config.prompts_per_step / len(run.prompts)}
        metrics |= step_metrics(result, graph, program.report, run.rewards) | self._predicted()
        metrics["checkpoint/failed"] = self.failed_saves
        with _writing(run.out):
            perfetto.write(result.trace, run.out / "trace" / f"step-{step:06d}.json")
        for reason in program.report.invalid[:SHOWN_INVALID]:
            click.echo(f"step {step}: invalid: {reason}", err=True)
        if metrics["critic/dropped_groups"] == config.prompts_per_step:
            reason = program.report.invalid[0]
            raise JudgeUnfit(f"step {step}: no group has enough candidates with valid rewards; the first: {reason}")
        self.failures.add(result.values, graph)
        run.progress.costs.observe(result.trace, graph)
        await self.planner.reconsider(run.progress.costs)
        run.progress.plan = self.planner.found
        run.progress.step = step
        return metrics

    async def evaluate(self, step: int) -> Metrics:
        """Sample the held-out prompts with seeds that never change; score them, or compare with the base model's."""
        run = self.run
        folder, shown = run.out / "samples" / f"step-{step:06d}", min(SHOWN, len(run.eval_prompts))
        samples = [
            Sample(
                prompt,
                derive_seed("evaluation", place, sample, "initial"),
                derive_seed("evaluation", place, sample, "steps"),
                str(folder / f"{place:02d}-{_slug(prompt)}.mp4") if place < shown and not sample else "",
            )
            for sample in range(run.config.eval_samples)
            for place, prompt in enumerate(run.eval_prompts)
        ]
        graph, plan = run.scheduled(
            evaluation_graph(len(samples), shown, task_batch=run.config.task_batch, rewards=run.rewards)
        )
        program = SamplingProgram(graph, [[*samples, *(replace(sample, base=True, path="") for sample in samples)]])
        result = await self.controller.run(graph, plan, program, run.progress.costs.estimates())
        run.progress.costs.observe(result.trace, graph)
        for name, reason in list(result.trace.invalid.items())[:SHOWN_INVALID]:
            task = graph[name]
            prompt = samples[task.candidates[0] % len(samples)].prompt
            click.echo(f"evaluation after step {step}: invalid: {task.judge} of {prompt!r}: {reason}", err=True)
        metrics = evaluation_metrics(result, graph, run.rewards)
        reward = metrics.get(quality(run.rewards))
        if isinstance(reward, float) and (run.progress.best is None or reward > run.progress.best):
            run.progress.best, run.progress.best_step = reward, step
        return metrics

    async def save(self, step: int, *, final: bool) -> None:
        """Write a checkpoint and the adapter; keep the last ones and the best.

        A save that fails is told and counted. Raises CheckpointError after a few in a row, and where it was the final.
        """
        run = self.run
        root = run.out / "checkpoints"
        saved = Saved(
            algorithm=type(run.algorithm).__name__,
            model=run.model_sha256,
            config=dump(run.config),
            progress=run.progress,
        )
        graph, plan = run.scheduled(checkpoint_graph())
        order = CheckpointOrder(str(root), step, msgspec.to_builtins(saved), str(run.out / "adapter"))
        result = await self.controller.run(graph, plan, CheckpointProgram(order))
        (outcome,) = result.values.values()
        try:
            if isinstance(outcome, Invalid):
                raise CheckpointError(outcome.reason)
            checkpoint.prune(root, run.config.keep_checkpoints, {run.progress.best_step})
        except CheckpointError as error:
            self.failed_saves += 1
            if final:
                raise CheckpointError(f"the last save of the run failed: {error}") from None
            if self.failed_saves == FAILED_SAVES:
                raise CheckpointError(f"{FAILED_SAVES} saves in a row failed: {error}") from None
            click.echo(f"step {step}: a save failed: {error}", err=True)
        else:
            self.failed_saves = 0
            self.saved = step

    async def leave(self, why: str) -> None:
        """Save the last completed step, unless it is; where there is none nothing is lost."""
        step = self.run.progress.step
        if step > self.saved:
            await self.save(step, final=True)
        click.echo(f"{why}: step {step} is saved; go on with --resume {self.run.out}" if step else why)

    def _predicted(self) -> Metrics:
        """The step's time as simulated, and what no plan could beat, once costs of each of its tasks were seen."""
        costs = self.run.progress.costs.estimates()
        try:
            simulated = simulate(self.planner.graph, self.planner.plan, costs).seconds
            bound = best_bound(self.graph, self.run.cluster, costs, judge_batch=self.run.config.judge_batch)
        except KeyError:
            return {}
        return {"timing_s/simulated": simulated, "timing_s/bound": bound.seconds, "perf/bound_by": bound.by}


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Turn what can go wrong with a disk into one sentence."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"cannot write to the run directory {out}: {error.strerror}; make room, then go on with --resume {out}"
        ) from error


def _step_of(line: str) -> float:
    """The step of a line of metrics.jsonl; infinity if a crash cut it short."""
    try:
        return int(json.loads(line)["step"])
    except json.JSONDecodeError:
        return math.inf


def _slug(prompt: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60]


def _line(metrics: Metrics, last: int, left: float | None) -> str:
    """One line a step, for a person."""
    parts = [f"step {metrics['step']}/{last}"]
    each = [(name, found[1], ".3f") for name in metrics if (found := re.fullmatch(r"val/reward/(.+)/mean", name))]
    for name, label, style in (
        ("critic/rewards/mean", "reward", ".3f"),
        ("val/rewards/mean", "held-out", ".3f"),
        *(each if len(each) > 1 else ()),
        ("val/win_rates/mean", "win rate", ".3f"),
        ("actor/ratio_mean", "ratio", ".6f"),
        ("actor/pg_clipfrac", "clipped", ".0%"),
        ("timing_s/step", "seconds", ".1f"),
    ):
        if name in metrics:
            parts.append(f"{label} {metrics[name]:{style}}")
    busy = [f"{value:.0%}" for name, value in metrics.items() if re.fullmatch(r"rank/\d+/busy", name)]
    if busy:
        parts.append(f"busy {' '.join(busy)}")
    if left is not None:
        parts.append(f"left {left / 60:.0f} min" if left >= 60 else f"left {left:.0f} s")
    return "  ".join(parts)
