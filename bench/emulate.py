"""The StageBreaker paper's step on six real ranks of this host, whose engines wait instead of computing.

All else is the product: processes, controller, workers, channels, search. So what is measured is how well the runtime
keeps to the schedule that the simulator promised, with tensors that really move; it says nothing of a GPU's speed.

`python -m bench emulate` starts the ranks; each of them runs this module.
"""

import sys
import time
from collections.abc import Mapping, Sequence
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


class Case(msgspec.Struct, frozen=True):
    """A schedule of the paper's load, and who judges."""

    schedule: Name
    judges: int = 1
    apart: bool = False

    @property
    def name(self) -> str:
        """As its files are called."""
        return f"{self.schedule}-{self.judges}{'-apart' if self.apart else ''}"

    def load(self) -> Load:
        """The step, with the schedule's own plan."""
        return load(self.schedule, judges=self.judges, apart=self.apart)


class Order(msgspec.Struct, frozen=True):
    """What a command asks of its ranks; it lies in the run's folder with the plans."""

    cases: tuple[Case, ...]
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
            return Result({f"{task.id}.total": total}, {task.id: total.max().item()})
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
        return (self.profile if tasks[0].kind in (Kind.UPDATE, Kind.CATCH_UP) else self.asked).run(tasks, rank)

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
    order = Order(tuple(map(Case, NAMES)), unit, rounds, frames(downsample))
    rows = [{"schedule": case.schedule, **row(step, traces, unit)} for case, step, traces in measured(order, out)]
    for label, key in (("plan", "planned_s"), ("measured", "measured_s")):
        for base in ("colocated", "async-reward"):
            seconds = next(line[key] for line in rows if line["schedule"] == base)
            for line in rows:
                line[f"{label} x {base}"] = seconds / line[key]
    report(f"emulate: seconds a step on {title(order)}", rows, json_file)


def frames(downsample: int) -> tuple[int, ...]:
    """The shape of a clip's frames, every so many pixels of them."""
    return (81, 480 // downsample, 832 // downsample, 3)


def title(order: Order) -> str:
    """What the steps run on."""
    return f"{RANKS} ranks that wait, {order.unit * 1000:g} ms a unit, frames of {prod(order.frames) / 1e6:.0f} MB"


def measured(order: Order, out: Path) -> list[tuple[Case, Load, list[Trace]]]:
    """The traces of each case's rounds, which are run in turn on real ranks; its files lie in `out`."""
    steps = {case: case.load().searched() for case in order.cases}
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "order.json", order)
    for case, step in steps.items():
        _write(out / f"{case.name}.plan.json", step.plan)
    if launch.start_ranks(RANKS, "bench.emulate", [str(out)]):
        raise click.ClickException("a rank failed; it has said why")
    return [
        (case, step, msgspec.json.decode((out / f"{case.name}.traces.json").read_bytes(), type=list[Trace]))
        for case, step in steps.items()
    ]


def row(step: Load, traces: list[Trace], unit: float) -> dict[str, Any]:
    """planned_s: transfers and updates take no time, as in the paper's proportions; simulated_s: what they did here."""
    table = cost.CostTable(keep=1000)
    for trace in traces:
        table.observe(trace, step.graph)
    profiled = Profiled(step.durations(unit), table.estimates())
    took = spread([trace.seconds for trace in traces])
    simulated = simulate(step.graph, step.plan, profiled).seconds
    busy = [median(busy_share(trace, rank) for trace in traces) for rank in step.ranks.ranks]
    return {
        "planned_s": step.simulated().seconds * unit,
        "simulated_s": simulated,
        "measured_s": took["median"],
        "p5": took["p5"],
        "p95": took["p95"],
        "n": len(traces),
        "measured / simulated": took["median"] / simulated,
        "bound_s": step.bound() * unit,
        "busy": " ".join(f"{share:.0%}" for share in busy),
    }


async def _lead(controller: Controller, out: Path, order: Order) -> None:
    """Rank 0's part: all schedules in turn, once briefly to warm up and then as often as asked."""
    steps = {
        case: case.load().following(msgspec.json.decode((out / f"{case.name}.plan.json").read_bytes(), type=Plan))
        for case in order.cases
    }
    traces: dict[Case, list[Trace]] = {case: [] for case in order.cases}
    for unit in (order.unit * WARM_UP, *[order.unit] * order.rounds):
        for case, step in steps.items():
            result = await controller.run(step.graph, step.plan, WaitingProgram(step.durations(unit)))
            for update in step.graph.of(Kind.UPDATE):
                members = sum(task.mini_batch == update.mini_batch for task in step.graph.of(Kind.REPLAY))
                assert set(result.values[update.id].values()) == {members}, "a gradient was lost, or summed twice"
            if unit == order.unit:
                traces[case].append(result.trace)
    for case, kept in traces.items():
        _write(out / f"{case.name}.traces.json", kept)


def _write(file: Path, value: object) -> None:
    file.write_bytes(msgspec.json.encode(value))


def _be_rank(out: Path) -> None:
    rank = launch.this_rank()
    assert rank, "start_ranks says which rank this is"
    order = msgspec.json.decode((out / "order.json").read_bytes(), type=Order)
    launch.run_rank(rank, lambda: WaitingEngine(order.frames), lambda controller: _lead(controller, out, order))


if __name__ == "__main__":
    _be_rank(Path(sys.argv[1]))
