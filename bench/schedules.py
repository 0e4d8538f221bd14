"""The schedules side by side on the toy: seconds a step, busy shares, and how well the simulator predicts them."""

from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click

from bench.runs import train
from bench.table import report, spread

VARIANTS = {
    "colocated, two replays": ["--schedule", "colocated", "--forward-replays"],
    "colocated, one replay": ["--schedule", "colocated"],
    "async-reward, two replays": ["--schedule", "async-reward", "--forward-replays"],
    "async-reward, one replay": ["--schedule", "async-reward"],
}


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="File to write the table to.")
@click.option("--steps", default=6, show_default=True, help="Steps of each run; the first does not count.")
@click.option("--rounds", default=2, show_default=True, help="Times the variants are run in turn.")
@click.option("--ranks", default=2, show_default=True, help="Ranks of each run.")
def schedules(json_file: Path | None, steps: int, rounds: int, ranks: int) -> None:
    """Train the toy under each schedule, in turn; the last column compares medians with the first row's."""
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    predicted: dict[str, list[float]] = {name: [] for name in VARIANTS}
    busy: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name, options in VARIANTS.items():
            with TemporaryDirectory() as folder:
                arguments = ["--ranks", str(ranks), "--steps", str(steps), "--eval-every", "0", *options]
                for step in train(Path(folder) / "run", arguments)[1:]:
                    seconds[name].append(step["timing_s/step"])
                    predicted[name].append(step["timing_s/step"] / step["timing_s/simulated"])
                    busy[name].append([step[f"rank/{rank}/busy"] for rank in range(ranks)])
    base = median(seconds[next(iter(VARIANTS))])
    rows = [
        {
            "schedule": name,
            **{f"s {key}" if key != "n" else key: value for key, value in spread(seconds[name]).items()},
            "busy": " ".join(f"{median(column):.0%}" for column in zip(*busy[name], strict=True)),
            "measured / simulated": median(predicted[name]),
            "speedup": base / median(seconds[name]),
        }
        for name in VARIANTS
    ]
    report(f"schedules: seconds a step, toy, {ranks} ranks", rows, json_file)
