"""Does the schedule change what is learnt? Runs of the toy that differ in nothing else, compared bit by bit."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import matplotlib.pyplot as plt

from bench.runs import Metrics, train
from bench.table import report

SCHEDULES = "colocated", "stagebreaker"
REWARD = "val/rewards/mean"
HASH = "weights/sha256"


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="File to write the table to.")
@click.option("--picture", type=click.Path(path_type=Path), help="PNG file to draw the curves to.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/fidelity"), show_default=True,
              help="Folder of the runs; finished ones are not repeated.")
@click.option("--seeds", default=3, show_default=True, help="Runs of each schedule.")
@click.option("--steps", default=60, show_default=True, help="Steps of each run.")
def fidelity(json_file: Path | None, picture: Path | None, out: Path, seeds: int, steps: int) -> None:
    """Train the toy in exact mode on 2 ranks under two schedules; compare weights after every step, and rewards."""
    runs: dict[str, list[list[Metrics]]] = defaultdict(list)
    for seed in range(seeds):
        for schedule in SCHEDULES:
            options = ["--ranks", "2", "--exact", "--schedule", schedule, "--seed", str(seed), "--steps", str(steps)]
            runs[schedule].append(train(out / f"{schedule}-seed-{seed}-steps-{steps}", options))
    pairs = list(zip(*(runs[schedule] for schedule in SCHEDULES), strict=True))
    rows = [
        {
            "seed": seed,
            "held-out before": first[0][REWARD],
            **{f"held-out, {name}": run[-1][REWARD] for name, run in zip(SCHEDULES, (first, second), strict=True)},
            "steps": steps,
            "steps with equal weights": _equal(first, second, HASH),
            "evaluations": sum(REWARD in step for step in first),
            "equal evaluations": _equal(first, second, REWARD),
        }
        for seed, (first, second) in enumerate(pairs)
    ]
    same = all(row["steps with equal weights"] == steps for row in rows)
    title = f"weights after each step, {' and '.join(SCHEDULES)}: {'equal to the bit' if same else 'NOT all equal'}"
    report(f"fidelity: exact mode, {title}", rows, json_file)
    if picture:
        _draw(runs, title, picture)


def _equal(first: list[Metrics], second: list[Metrics], key: str) -> int:
    """The number of steps at which both runs report `key`, and the same value."""
    return sum(key in one and one[key] == other.get(key) for one, other in zip(first, second, strict=True))


def _draw(runs: dict[str, list[list[Metrics]]], title: str, picture: Path) -> None:
    """A colour for each seed; one schedule as a wide pale line, the other as a thin dashed one on top of it."""
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    styles: list[dict[str, Any]] = [
        {"linewidth": 6, "alpha": 0.35},
        {"linewidth": 1.5, "linestyle": "--", "marker": "o", "markersize": 3},
    ]
    for (schedule, of_schedule), style in zip(runs.items(), styles, strict=True):
        for seed, run in enumerate(of_schedule):
            evaluated = [step for step in run if REWARD in step]
            axes.plot(
                [step["step"] for step in evaluated], [step[REWARD] for step in evaluated],
                color=f"C{seed}", label=f"{schedule}, seed {seed}", **style,
            )  # fmt: skip
    axes.set_xlabel("training step")
    axes.set_ylabel("held-out reward")
    axes.set_title(title, fontsize=8)
    axes.legend(frameon=False, ncols=len(runs), fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=140)
    click.echo(f"wrote {picture}")
