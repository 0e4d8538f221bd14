"""The command of an algorithm: from the command line to a run, in the parent process and in each rank.

`python -m algorithms.NAME` and `asyncflow NAME` start their own ranks; under torchrun the same command is a rank.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import click
import msgspec
from transformers.utils import logging as transformers_logging

from algorithms.algorithm import Algorithm
from algorithms.config import RunConfig
from algorithms.prepare import Prepared, prepare
from algorithms.train import train
from asyncflow import launch
from asyncflow.config import dump
from asyncflow.errors import ConfigError
from asyncflow.options import options
from engines.deterministic import use_deterministic_kernels
from engines.judge import JudgeEngine
from engines.rank import PolicyEngine, RankEngine, pick_device

DEFAULT_RANKS = 2


def command(
    name: str,
    config_type: type[RunConfig],
    algorithm: Callable[[Any, tuple[float, ...]], Algorithm],
    module: str,
    summary: str,
) -> click.Command:
    """The click command `name`, whose options are the fields of `config_type`; `module` is what a rank runs."""

    @click.command(name, help=summary)
    @options(config_type)
    @click.option("--ranks", type=int, help=f"Ranks to start, unless torchrun does.  [default: {DEFAULT_RANKS}]")
    @click.option("--dry-run", is_flag=True, help="Print configuration, graph size and plan; run nothing.")
    def run(config: RunConfig, ranks: int | None, dry_run: bool) -> int:
        place = launch.this_rank()
        if place and ranks is not None:
            raise ConfigError(f"--ranks: torchrun started {place.ranks} ranks already; leave the option out")
        count = place.ranks if place else DEFAULT_RANKS if ranks is None else ranks
        if count < 1:
            raise ConfigError(f"--ranks: expected at least 1, got {count}")
        prepared = prepare(name, config, algorithm, count)
        if dry_run:
            if not place or not place.number:
                click.echo(describe(prepared))
            return 0
        if place:
            be_rank(prepared, place)
            return 0
        out = prepared.run.out
        resolved = out / "config.toml"
        try:
            out.mkdir(parents=True, exist_ok=True)
            resolved.write_text(dump(msgspec.structs.replace(config, out=str(out))))
        except OSError as error:
            raise ConfigError(f"--out: cannot write {resolved}: {error.strerror}; choose another folder") from None
        click.echo(f"{name}: {count} ranks, run directory {out}")
        return launch.start_ranks(count, module, ["--config", str(resolved)])

    return run


def be_rank(prepared: Prepared, place: launch.Rank) -> None:
    """Be this rank of the run until it is over."""
    transformers_logging.disable_progress_bar()
    run = prepared.run
    if run.config.deterministic_kernels:
        use_deterministic_kernels()
    if not place.number:
        for note in prepared.notes:
            click.echo(note, err=True)
        click.echo(prepared.memory)
    rewards = {reward.name: reward.reward for reward in run.rewards}

    def build_engine() -> RankEngine:
        judge = None  # first: a vLLM that starts wants the GPU to itself, and measures what is free
        if place.number in run.cluster.judges:
            for name, size in prepared.memory.grants(place.number).items():
                rewards[name].cache_bytes = size
            judge = JudgeEngine(list(rewards.values()), pick_device(run.config.device, place.number))
        policy = PolicyEngine(prepared.policy_job(place.number)) if place.number in run.cluster.policy else None
        return RankEngine(policy, judge, judges_rest=run.config.schedule == "colocated")

    launch.run_rank(place, build_engine, lambda controller: train(run, controller), run.config.channel)


def describe(prepared: Prepared) -> str:
    """The resolved configuration, the size of a step's graph, and which rank does how much of what."""
    run = prepared.run
    graph, plan = run.step()
    kinds = Counter(str(task.kind) for task in graph)
    lines = [
        dump(run.config),
        f"graph: {len(graph)} tasks, {graph.edges()} edges: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items()),
        f"run directory: {run.out}",
        str(prepared.memory),
    ]
    for rank in run.cluster.ranks:
        mine = Counter(str(graph[name].kind) for name in plan.order if rank in plan.ranks[name])
        roles = {"policy": run.cluster.policy, "judge": run.cluster.judges}
        role = " and ".join(role for role, ranks in roles.items() if rank in ranks)
        lines.append(f"rank {rank} ({role}): " + ", ".join(f"{n} {kind}" for kind, n in mine.items()))
    return "\n".join(lines)
