"""What it costs to have a task run: one step's graph on the real controller and ranks, and the same graph on Ray.

Tasks do nothing, so that all the time is the system's, or compute for a while, which keeps the cores busy beside it.
The extra is what a step takes beyond its tasks' own seconds, as simulated, divided by the number of its tasks.

`bench.dispatch` calls `control_rows`; each rank runs this module.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import msgspec
import torch

from algorithms.step import step_graph
from asyncflow import launch
from asyncflow.controller import Controller
from asyncflow.core.graph import LOCAL_KINDS, Graph, Kind, Task
from asyncflow.core.plan import Plan
from asyncflow.core.schedules import cluster, schedule
from asyncflow.core.simulate import simulate
from asyncflow.engine import Engine, Result, Work
from bench.table import Row, spread
from engines.rewards.registry import parse_rewards

RANKS, JUDGES = 3, 1
STEPS = 12
"""Steps of each kind; the first two warm up."""
SECONDS = {"idle": 0.0, "busy": 0.004}
"""How long a task computes."""
NUMBERS = 16
"""In each tensor that a task makes."""
PARTS = {Kind.ROLLOUT: ("noisy", "clean"), Kind.DECODE: ("frames",), Kind.REPLAY: ("gradients",)}


def graph_and_plan() -> tuple[Graph, Plan]:
    """A step of 24 candidates of 2 prompts in 2 mini-batches, every video judged by itself."""
    dataflow = step_graph(2, 12, mini_batches=2, task_batch=1, rewards=parse_rewards(["colour"]))
    return schedule("merged-replay", dataflow, cluster("merged-replay", RANKS, JUDGES), judge_batch=1)


class Spinning(Engine):
    """An engine whose tasks compute for the seconds their payload says."""

    def __init__(self) -> None:
        self._matrix = torch.ones(64, 64)

    def compute(self, seconds: float) -> None:
        """Keep a core busy."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._matrix @ self._matrix

    def run(self, work: Work) -> Result:
        """See `Engine`."""
        self.compute(work.payload)
        task = work.tasks[0]
        if work.sum_over_ranks:
            work.sum_over_ranks(torch.zeros(NUMBERS))
        return Result({f"{task.id}.{part}": torch.zeros(NUMBERS) for part in PARTS.get(task.kind, ())})


class Equal:
    """A program, and durations, of tasks that all take the same."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def payload(self, tasks: Sequence[Task], values: Mapping[str, Any]) -> float:
        """See `Program`."""
        return self.seconds

    def local(self, task: Task, values: Mapping[str, Any]) -> tuple[None, tuple[str, ...]]:
        """See `Program`."""
        return None, ()

    def run(self, tasks: Sequence[Task], rank: int) -> float:
        """See `Durations`."""
        return 0.0 if tasks[0].kind in LOCAL_KINDS else self.seconds

    def move(self, tensor: str, source: int, target: int) -> float:
        """See `Durations`."""
        return 0.0


def control_rows() -> list[Row]:
    """A row for each system and for idle and busy ranks; those of Ray only where it is installed."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "seconds.json"
        if launch.start_ranks(RANKS, "bench.control", [str(file)]):
            raise click.ClickException("a rank failed; it has said why")
        systems = {"asyncflow": msgspec.json.decode(file.read_bytes(), type=dict[str, list[float]])}
    if find_spec("ray"):
        systems["Ray"] = _on_ray()
    else:
        click.echo("Ray is not installed, so its rows are missing: pip install 'asyncflow[bench]'")
    graph, plan = graph_and_plan()
    rows = []
    for load, seconds in SECONDS.items():
        ideal = simulate(graph, plan, Equal(seconds)).seconds
        for system, measured in systems.items():
            extra = spread([(step - ideal) / len(graph) * 1e3 for step in measured[load]])
            rows.append({"schedule": "merged-replay", "what": f"{system}, {RANKS} {load} ranks: extra a task"}
                        | {"tasks": len(graph), "n": extra.pop("n")}
                        | {f"ms {key}": value for key, value in extra.items()})  # fmt: skip
    return rows


async def _lead(controller: Controller, file: Path) -> None:
    graph, plan = graph_and_plan()
    measured = {}
    for load, seconds in SECONDS.items():
        traces = [(await controller.run(graph, plan, Equal(seconds))).trace for _ in range(STEPS)]
        measured[load] = [trace.seconds for trace in traces[2:]]
    _write(file, measured)


def _write(file: Path, measured: dict[str, list[float]]) -> None:
    file.write_bytes(msgspec.json.encode(measured))


def _on_ray() -> dict[str, list[float]]:
    """The same tasks as calls of an actor for each rank, which wait for the results of what they depend on."""
    import ray

    graph, plan = graph_and_plan()
    ray.init(num_cpus=RANKS, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        actor_class = ray.remote(num_cpus=1)(_RayRank)
        actors = [actor_class.remote() for _ in range(RANKS)]
        return {
            load: [_step_on_ray(graph, plan, actors, seconds) for _ in range(STEPS)][2:]
            for load, seconds in SECONDS.items()
        }
    finally:
        ray.shutdown()


class _RayRank:
    """A rank as an actor; what a task makes goes through Ray's object store."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._engine = Spinning()

    def run(self, seconds: float, parts: int, *_made: object) -> list[torch.Tensor]:
        self._engine.compute(seconds)
        return [torch.zeros(NUMBERS) for _ in range(parts)]


def _step_on_ray(graph: Graph, plan: Plan, actors: Sequence[Any], seconds: float) -> float:
    """Seconds from the first call until every task has ended. Local tasks run on rank 0; a gang's sum is left out."""
    import ray

    began = time.monotonic()
    made: dict[str, list[Any]] = {}
    for name in plan.order:
        task = graph[name]
        needs = [reference for before in sorted(task.predecessors) for reference in made[before]]
        own = Equal(seconds).run([task], 0)
        made[name] = [
            actors[max(rank, 0)].run.remote(own, len(PARTS.get(task.kind, ())), *needs) for rank in plan.ranks[name]
        ]
    ray.get([reference for references in made.values() for reference in references])
    return time.monotonic() - began


if __name__ == "__main__":
    place, out = launch.this_rank(), Path(sys.argv[1])
    assert place, "start_ranks says which rank this is"
    launch.run_rank(place, Spinning, lambda controller: _lead(controller, out))
