"""The StageBreaker paper's step on six real ranks of this host, whose engines wait instead of computing.

All else is the product: processes, controller, workers, channels, search. So what is measured is how well the runtime
keeps to the schedule that the simulator promised, with tensors that really move; it says nothing of a GPU's speed.

`python -m bench emulate` starts the ranks; each of them runs this module.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import click
import msgspec
import torch

from asyncflow import launch
from asyncflow.controller import Controller
from asyncflow.core import cost
from asyncflow.core.graph import Kind, Task
from asyncflow.core.plan import Plan
from asyncflow.core.schedules import NAMES, Name
from asyncflow.core.simulate import simulate
from asyncflow.core.trace import Trace, busy_share
from asyncflow.engine import Engine, Result, Work
from bench.paper import RANKS, Durations, Load, load
from bench.table import report, spread

LATENT = (21, 16, 60, 104)
"""21 latent frames of 480 x 832 pixels, as Wan2.1's VAE makes them: 4.2 MB in bfloat16."""
DENOISING_STEPS = 4
GRADIENT = 1 << 20
"""Numbers in a gradient: 4 MB, a LoRA of low rank."""
WARM_UP = 0.02
"""The part of a unit that a unit lasts in the step before the first one measured."""


class Order(msgspec.Struct, frozen=True):
    """What the command asks of its ranks; it lies in the run's folder with the plans."""

    unit: float
    rounds: int
    frames: tuple[int, ...]


class WaitingEngine(Engine):
    """Each task waits out the seconds its payload says, without burning a core, and hands on tensors of real size.

    Only the frames may be smaller, by what the command was told.
    """

    def __init__(self, frames: tuple[int, ...]) -> None:
        self.makes: dict[Kind, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {
            Kind.ROLLOUT: {
                "clean": (LATENT, torch.bfloat16),
                "noisy": ((DENOISING_STEPS, *LATENT), torch.bfloat16),
            },
            Kind.DECODE: {"frames": (frames, torch.uint8)},
            Kind.REPLAY: {"gradients": ((GRADIENT,), torch.float32)},
        }

    def run(self, work: Work) -> Result:
        """See `Engine`. A gradient is all ones, so that an update's value is the number of candidates it trained on."""
        end = time.monotonic() + work.payload
        task = work.tasks[0]
        if work.sum_over_ranks:
            total = work.sum_over_ranks(sum(work.tensors.values(), torch.zeros(GRADIENT)))
            return Result(values={task.id: total.max().item()})
        tensors = {
            f"{task.id}.{part}": torch.ones(shape, dtype=dtype)
            for part, (shape, dtype) in self.makes.get(task.kind, {}).items()
        }
        time.sleep(max(0.0, end - time.monotonic()))
        return Result(tensors)


class WaitingProgram:
    """Tells each task how long it lasts."""

    def __init__(self, durations: Durations) -> None:
        self.durations = durations

    def payload(self, tasks: Sequence[Task], values: Mapping[str, Any]) -> float:
        """See `Program`; the paper's ranks are equal, so it does not matter which one it is."""
        return self.durations.run(tasks, 0)

    def local(self, task: Task, values: Mapping[str, Any]) -> tuple[None, tuple[str, ...]]:
        """See `Program`."""
        return None, ()


class Profiled:
    """The durations that were asked for, with the transfers and updates that were measured."""

    def __init__(self, asked: Durations, profile: cost.Estimates) -> None:
        self.asked, self.profile = asked, profile

    def run(self, tasks: Sequence[Task], rank: int) -> float:
        """See `Durations`."""
        return (self.profile if tasks[0].kind is Kind.UPDATE else self.asked).run(tasks, rank)

    def move(self, tensor: str, source: int, target: int) -> float:
        """See `Durations`."""
        return self.profile.move(tensor, source, target)


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="File to write the table to.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/emulate"), show_default=True,
              help="Folder for the plans and the traces.")
@click.option("--unit", default=0.02, show_default=True, help="Seconds of a unit; AsyncReward's step has 1000.")
@click.option("--rounds", default=4, show_default=True, help="Times the schedules are run in turn.")
@click.option("--downsample", default=4, show_default=True,
              help="Keep every n-th pixel of the 480 x 832 frames, whose 81 are 97 MB: six ranks may share few cores.")
def emulate(json_file: Path | None, out: Path, unit: float, rounds: int, downsample: int) -> None:
    """The five schedules on 4 actors and 2 reward ranks that wait out the paper's durations, 24 candidates a step."""
    loads = {name: load(name).searched() for name in NAMES}
    out.mkdir(parents=True, exist_ok=True)
    order = Order(unit, rounds, (81, 480 // downsample, 832 // downsample, 3))
    _write(out / "order.json", order)
    for name, step in loads.items():
        _write(out / f"{name}.plan.json", step.plan)
    if launch.start_ranks(RANKS, "bench.emulate", [str(out)]):
        raise click.ClickException("a rank failed; it has said why")
    traces = {
        name: msgspec.json.decode((out / f"{name}.traces.json").read_bytes(), type=list[Trace]) for name in NAMES
    }
    rows = [_row(step, traces[name], unit) for name, step in loads.items()]
    for label, key in (("plan", "planned_s"), ("measured", "measured_s")):
        for base in ("colocated", "async-reward"):
            seconds = next(row[key] for row in rows if row["schedule"] == base)
            for row in rows:
                row[f"{label} x {base}"] = seconds / row[key]
    title = f"{RANKS} ranks that wait, {unit * 1000:g} ms a unit, frames of {prod(order.frames) / 1e6:.0f} MB"
    report(f"emulate: seconds a step on {title}", rows, json_file)


def _row(step: Load, traces: list[Trace], unit: float) -> dict[str, Any]:
    """planned_s: transfers and updates take no time, as in the paper's proportions; simulated_s: what they did here."""
    table = cost.CostTable(keep=1000)
    for trace in traces:
        table.observe(trace, step.graph)
    profiled = Profiled(step.durations(unit), table.estimates())
    measured = spread([trace.seconds for trace in traces])
    simulated = simulate(step.graph, step.plan, profiled).seconds
    busy = [median(busy_share(trace, rank) for trace in traces) for rank in step.ranks.ranks]
    return {
        "schedule": step.name,
        "planned_s": step.simulated().seconds * unit,
        "simulated_s": simulated,
        "measured_s": measured["median"],
        "p5": measured["p5"],
        "p95": measured["p95"],
        "n": len(traces),
        "measured / simulated": measured["median"] / simulated,
        "bound_s": step.bound() * unit,
        "busy": " ".join(f"{share:.0%}" for share in busy),
    }


async def _lead(controller: Controller, out: Path, order: Order) -> None:
    """Rank 0's part: all schedules in turn, once briefly to warm up and then as often as asked."""
    steps = {
        name: replace(load(name), plan=msgspec.json.decode((out / f"{name}.plan.json").read_bytes(), type=Plan))
        for name in NAMES
    }
    traces: dict[Name, list[Trace]] = {name: [] for name in NAMES}
    for unit in (order.unit * WARM_UP, *[order.unit] * order.rounds):
        for name, step in steps.items():
            result = await controller.run(step.graph, step.plan, WaitingProgram(step.durations(unit)))
            for update in step.graph.of(Kind.UPDATE):
                members = sum(task.mini_batch == update.mini_batch for task in step.graph.of(Kind.REPLAY))
                assert set(result.values[update.id].values()) == {members}, "a gradient was lost, or summed twice"
            if unit == order.unit:
                traces[name].append(result.trace)
    for name, kept in traces.items():
        _write(out / f"{name}.traces.json", kept)


def _write(file: Path, value: object) -> None:
    file.write_bytes(msgspec.json.encode(value))


def _be_rank(out: Path) -> None:
    rank = launch.this_rank()
    assert rank, "start_ranks says which rank this is"
    order = msgspec.json.decode((out / "order.json").read_bytes(), type=Order)
    launch.run_rank(rank, lambda: WaitingEngine(order.frames), lambda controller: _lead(controller, out, order))


if __name__ == "__main__":
    _be_rank(Path(sys.argv[1]))
