"""What scheduling costs: milliseconds to simulate a step, to search its plan, and to have tasks run by real ranks."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from algorithms.step import step_graph
from asyncflow.core.graph import Graph
from asyncflow.core.plan import Plan
from asyncflow.core.schedules import NAMES, Name, cluster, schedule
from asyncflow.core.search import search
from asyncflow.core.simulate import simulate
from asyncflow.testing import run_virtually
from bench.control import control_rows
from bench.paper import Durations
from bench.table import Row, report, spread
from engines.rewards.registry import parse_rewards

LARGE = {"groups": 250, "group_size": 16, "ranks": 1000, "reward_ranks": 300}


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="File to write the table to.")
@click.option("--repeats", default=30, show_default=True, help="Times each is measured; large ones three times.")
def dispatch(json_file: Path | None, repeats: int) -> None:
    """Scheduling: 24 candidates of 2 prompts in 2 mini-batches on 6 ranks, and 4,000 of 250 prompts on 1,000.

    Then what it costs to have a task run, here and on Ray.
    """
    rows = []
    durations = Durations(transfer=0.1)
    for name in NAMES:
        graph, plan = _step(name, groups=2, group_size=12, ranks=6, reward_ranks=2)
        assert run_virtually(graph, plan, durations).trace == simulate(graph, plan, durations), "traces differ"
        rows.append(_row(name, "simulate", graph, partial(simulate, graph, plan, durations), repeats))
        rows.append(_row(name, "execute virtually", graph, partial(run_virtually, graph, plan, durations), repeats))
    graph, plan = _step("stagebreaker", groups=2, group_size=12, ranks=6, reward_ranks=2)
    ranks = cluster("stagebreaker", 6, 2)
    rows.append(_row("stagebreaker", "search", graph, partial(search, graph, plan, ranks, durations), 3))
    for name in ("colocated", "stagebreaker"):
        graph, plan = _step(name, **LARGE)
        rows.append(_row(name, "simulate 1,000 ranks", graph, partial(simulate, graph, plan, durations), 3))
    rows += control_rows()
    report("dispatch: milliseconds a step, or a task", rows, json_file)


def _step(name: Name, *, groups: int, group_size: int, ranks: int, reward_ranks: int) -> tuple[Graph, Plan]:
    dataflow = step_graph(groups, group_size, mini_batches=2, task_batch=1, rewards=parse_rewards(["colour"]))
    roles = cluster(name, ranks, 0 if name == "colocated" else reward_ranks)
    return schedule(name, dataflow, roles, forward_replays=True)


def _row(name: Name, what: str, graph: Graph, call: Callable[[], object], repeats: int) -> Row:
    times = spread([_milliseconds(call) for _ in range(repeats)])
    return {"schedule": name, "what": what, "tasks": len(graph), "n": times.pop("n")} | {
        f"ms {key}": value for key, value in times.items()
    }


def _milliseconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3
