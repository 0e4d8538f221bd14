"""Does it learn? Longer runs of the toy with several seeds, judged on held-out prompts: a table and a figure."""

from pathlib import Path
from statistics import mean, stdev

import click
import matplotlib.pyplot as plt

from bench.runs import train
from bench.table import report

CURVES = {"val/reward/colour/mean": "colour", "val/reward/motion/mean": "motion"}


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="File to write the table to.")
@click.option("--figure", type=click.Path(path_type=Path), help="PNG file to draw the curves to.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("runs/learning"), show_default=True,
              help="Folder of the runs; finished ones are not repeated.")
@click.option("--seeds", default=3, show_default=True, help="Runs.")
@click.option("--steps", default=100, show_default=True, help="Steps of each run.")
def learning(json_file: Path | None, figure: Path | None, out: Path, seeds: int, steps: int) -> None:
    """Train the toy with DanceGRPO's defaults; held-out prompts, noise fixed, mean and spread over the seeds."""
    runs = [
        train(out / f"seed-{seed}", ["--seed", str(seed), "--steps", str(steps)]) for seed in range(seeds)
    ]
    evaluated = [[step for step in run if "val/rewards/mean" in step] for run in runs]
    rows = []
    for at in zip(*evaluated, strict=True):
        row = {"step": at[0]["step"]}
        for key, label in CURVES.items():
            values = [step[key] for step in at]
            row |= {f"{label} mean": mean(values), f"{label} std": stdev(values) if seeds > 1 else 0.0}
        rows.append(row)
    report(f"learning: held-out reward of the toy, {seeds} seeds", rows, json_file)
    if figure:
        _draw(rows, figure)


def _draw(rows: list[dict[str, float]], figure: Path) -> None:
    picture, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    steps = [row["step"] for row in rows]
    for label in CURVES.values():
        middle = [row[f"{label} mean"] for row in rows]
        low = [row[f"{label} mean"] - row[f"{label} std"] for row in rows]
        high = [row[f"{label} mean"] + row[f"{label} std"] for row in rows]
        (line,) = axes.plot(steps, middle, label=label)
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2)
    axes.set_xlabel("training step")
    axes.set_ylabel("held-out reward")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(figure, dpi=140)
    click.echo(f"wrote {figure}")
