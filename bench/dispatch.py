"""What scheduling costs: milliseconds to simulate a step, and to execute it with the real controller and workers."""

import time
from collections.abc import Callable
from pathlib import Path

import click

from algorithms.step import step_graph
from asyncflow.core.schedules import NAMES, cluster, schedule
from asyncflow.core.simulate import simulate
from asyncflow.testing import run_virtually
from bench.paper import Durations
from bench.table import report, spread
from engines.rewards.registry import parse_rewards


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="File to write the table to.")
@click.option("--repeats", default=30, show_default=True, help="Times each is measured.")
def dispatch(json_file: Path | None, repeats: int) -> None:
    """Scheduling: 24 candidates of 2 prompts in 2 mini-batches on 6 ranks."""
    rows = []
    durations = Durations(transfer=0.1)
    for name in NAMES:
        dataflow = step_graph(2, 12, mini_batches=2, task_batch=1, rewards=parse_rewards(["colour"]))
        graph, plan = schedule(name, dataflow, cluster(name, 6, 0 if name == "colocated" else 2), forward_replays=True)
        trace = simulate(graph, plan, durations)
        assert run_virtually(graph, plan, durations).trace == trace, "executed and simulated traces differ"
        for what, call in (
            ("simulate", lambda g=graph, p=plan: simulate(g, p, durations)),
            ("execute in virtual time", lambda g=graph, p=plan: run_virtually(g, p, durations)),
        ):
            times = spread([_milliseconds(call) for _ in range(repeats)])
            rows.append({"schedule": name, "what": what, "tasks": len(graph), "step": trace.seconds}
                        | {f"ms {key}" if key != "n" else key: value for key, value in times.items()})
    report("dispatch: milliseconds a step", rows, json_file)


def _milliseconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3
