"""What tasks cost here: from a run that was, or from a few steps that are run for nothing else.

Invariant: of such a run only its costs are left. `asyncflow plan` calls it.
"""

import tempfile
from pathlib import Path

import click
import msgspec

from algorithms.dancegrpo import DanceGRPO, DanceGRPOConfig
from algorithms.prepare import prepare
from algorithms.resume import Progress
from asyncflow import checkpoint, launch
from asyncflow.config import dump
from asyncflow.core.cost import CostTable
from asyncflow.errors import CheckpointError, ConfigError, TrainingError


def profile(config: DanceGRPOConfig, ranks: int, steps: int) -> CostTable:
    """The costs of `steps` steps of `config` on `ranks` ranks, at least 2, started as `asyncflow dancegrpo` does.

    Under async-train, whose step has a task of every kind that any schedule has; a catch-up takes what an update does.
    Raises ConfigError if the run cannot be, TrainingError if it failed, and click.Abort if it was interrupted.
    """
    with tempfile.TemporaryDirectory(prefix="asyncflow-profile-") as folder:
        out, file = Path(folder, "run"), Path(folder, "config.toml")
        profiled = msgspec.structs.replace(
            config, schedule="async-train", steps=steps, out=str(out), resume="", eval_every=0, save_every=0
        )
        prepare("profile", profiled, DanceGRPO, ranks)
        file.write_text(dump(profiled))
        click.echo(f"profiling {steps} steps on {ranks} ranks; of this run nothing is kept but its costs")
        code = launch.start_ranks(ranks, "algorithms.dancegrpo", ["--config", str(file)])
        if code == launch.INTERRUPTED:
            raise click.Abort
        if code:
            raise TrainingError("the steps to profile failed for the reason above; mend it, or give --costs")
        return costs_of(out)


def costs_of(run: Path) -> CostTable:
    """The costs in the newest checkpoint of a run directory. Raises ConfigError if it has none."""
    try:
        found, _ = checkpoint.latest(run / "checkpoints")
    except CheckpointError as error:
        raise ConfigError(f"--costs: {error}") from None
    return msgspec.convert(found.meta["progress"], Progress).costs
