"""One table a bench: rows of one shape, printed for a person and written as JSON, with the machine they ran on."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import click
import torch

Row = Mapping[str, Any]


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    gpus = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
    load = round(os.getloadavg()[0], 1)
    return {"cpu": model, "cores": os.cpu_count(), "load": load, "gpus": gpus, "torch": torch.__version__}


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Number, median, and 5th and 95th percentile of some samples."""
    cuts = quantiles(samples, n=20, method="inclusive") if len(samples) > 1 else [samples[0]] * 19
    return {"n": len(samples), "median": median(samples), "p5": cuts[0], "p95": cuts[-1]}


def report(title: str, rows: Sequence[Row], json_file: Path | None) -> None:
    """Print the rows under their common keys, and write what is shown, with the machine, to `json_file`."""
    where = machine()
    click.echo(f"{title}\n{where['cpu']}, {where['cores']} cores, load {where['load']}, torch {where['torch']}")
    names = list(rows[0])
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    for line in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps({"title": title, "machine": where, "rows": list(rows)}, indent=1) + "\n")


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []
