"""A step's trace as a picture: a bar for each task on its rank's lane."""

import json
from pathlib import Path

import click
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

COLOURS = {
    "rollout": "#4c78a8", "decode": "#72b7b2", "score": "#f58518", "compare": "#f58518", "forward": "#bab0ac",
    "replay": "#54a24b", "update": "#e45756", "checkpoint": "#9d755d", "export": "#b279a2",
}  # fmt: skip


@click.command()
@click.argument("trace", type=click.Path(exists=True, path_type=Path))
@click.argument("picture", type=click.Path(path_type=Path))
def timeline(trace: Path, picture: Path) -> None:
    """Draw the TRACE that a run wrote (trace/step-000001.json) as the PNG file PICTURE."""
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans = [event for event in events if event["ph"] == "X" and event["cat"] == "device" and event["pid"] >= 0]
    ranks = sorted({span["pid"] for span in spans})
    figure, axes = plt.subplots(figsize=(10, 0.6 + 0.5 * len(ranks)), layout="constrained")
    for span in spans:
        axes.barh(
            ranks.index(span["pid"]), span["dur"] / 1e6, left=span["ts"] / 1e6,
            color=COLOURS[span["name"]], edgecolor="white", linewidth=0.4, height=0.8,
        )
    axes.set_yticks(range(len(ranks)), [names[rank] for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the step began")
    shown = dict.fromkeys(span["name"] for span in spans)
    axes.legend(handles=[Patch(color=COLOURS[name], label=name) for name in shown], ncols=len(shown), fontsize=8,
                loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=140)
    click.echo(f"wrote {picture}")
