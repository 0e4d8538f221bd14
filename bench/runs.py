"""Runs of the command that the benches compare, in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Metrics = dict[str, Any]


def train(out: Path, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> list[Metrics]:
    """Train the toy into `out`, unless a finished run is there already; return its metrics, an object a step."""
    done = (out / "adapter" / "adapter_config.json").exists()
    if not done:
        command = [sys.executable, "-m", "algorithms.dancegrpo", "--out", str(out), *arguments]
        subprocess.run(command, check=True, env={**os.environ, **(environment or {})})
    return metrics(out)


def metrics(out: Path) -> list[Metrics]:
    """The objects of a run's metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
