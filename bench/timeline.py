"""A step's trace as a picture: a bar for each task on its lane."""

import json
from pathlib import Path

import click

from asyncflow.core.trace import TRANSFER, Span, Trace
from asyncflow.gantt import draw


@click.command()
@click.argument("trace", type=click.Path(exists=True, path_type=Path))
@click.argument("picture", type=click.Path(path_type=Path))
def timeline(trace: Path, picture: Path) -> None:
    """Draw the TRACE that a run wrote (trace/step-000001.json) as the PNG file PICTURE."""
    spans = [
        Span(
            event["pid"], event["cat"], event["name"], tuple(event["args"]["tasks"]),
            event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, event["args"]["number"],
        )
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["ph"] == "X" and event["cat"] != TRANSFER
    ]  # fmt: skip
    draw(Trace(spans, max(span.end for span in spans)), picture)
    click.echo(f"wrote {picture}")
