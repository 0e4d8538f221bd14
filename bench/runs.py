"""Runs of the command that the benches compare, in processes of their own."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def train(out: Path, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Train the toy into `out`, unless a finished run is there already; return its metrics, an object a step."""
    done = (out / "adapter" / "adapter_config.json").exists()
    if not done:
        command = [sys.executable, "-m", "algorithms.dancegrpo", "--out", str(out), *arguments]
        subprocess.run(command, check=True)
    return metrics(out)


def metrics(out: Path) -> list[dict[str, Any]]:
    """The objects of a run's metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
