"""Several judges at once: the paper's step with one judge, with two that take turns, and with two that are apart.

Its ranks wait instead of computing, as those of `bench.emulate`. So a judge that is apart costs a device nothing here,
as one behind an endpoint does; one that shares the GPU with its rank would slow both down, which only a GPU can tell.
"""

from pathlib import Path

import click

from asyncflow.core.schedules import Name
from bench.emulate import Case, Order, frames, measured, row, title
from bench.table import report

SCHEDULES: tuple[Name, ...] = ("colocated", "merged-replay", "stagebreaker")


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="File to write the table to.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/rewards"), show_default=True,
              help="Folder for the plans and the traces.")
@click.option("--unit", default=0.01, show_default=True, help="Seconds of a unit; the paper's AsyncReward takes 1000.")
@click.option("--rounds", default=3, show_default=True, help="Times the cases are run in turn.")
def rewards(json_file: Path | None, out: Path, unit: float, rounds: int) -> None:
    """One and two judges under three schedules, on the ranks' devices and apart from them."""
    who = [(1, False), (1, True), (2, False), (2, True)]
    cases = tuple(Case(schedule, judges, apart) for schedule in SCHEDULES for judges, apart in who)
    order = Order(cases, unit, rounds, frames(downsample=8))
    rows = []
    on_device: dict[tuple[Name, int], float] = {}
    for case, step, traces in measured(order, out):
        made = row(step, traces, unit)
        if not case.apart:
            on_device[case.schedule, case.judges] = made["measured_s"]
        speedup = on_device[case.schedule, case.judges] / made["measured_s"]
        where = "apart" if case.apart else "on the device"
        rows.append(
            {"schedule": case.schedule, "judges": case.judges, "where": where, **made, "x on the device": speedup}
        )
    report(f"rewards: seconds a step on {title(order)}", rows, json_file)
