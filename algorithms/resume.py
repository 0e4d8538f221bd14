"""What a checkpoint says of its run, and whether another run may go on from it: only one that trains the same.

The training loop writes a `Saved` with each checkpoint; `prepare` reads it by `checkpoint_of`.
"""

from pathlib import Path

import msgspec

from algorithms.config import RunConfig
from asyncflow import checkpoint
from asyncflow.config import toml_key
from asyncflow.core.cost import CostTable
from asyncflow.core.plan import Plan
from asyncflow.errors import CheckpointError, ConfigError

MAY_CHANGE = frozenset(
    {"steps", "out", "resume", "eval_prompts", "eval_every", "eval_samples", "save_every", "keep_checkpoints"}
    | {"schedule", "reward_ranks", "forward_replays", "judge_batch", "device", "channel", "gradient_checkpointing"}
    | {"model", "checkpoint", "base_lora", "preset", "deterministic"}
)
"""Keys that a resumed run may have otherwise: they do not change what is trained. Of the model the content counts."""

INSTEAD = "or start a new run from its adapter with --init-adapter"


class Progress(msgspec.Struct, kw_only=True):
    """What a resumed run must know besides weights and optimizer."""

    step: int = 0
    best_step: int = 0
    best: float | None = None
    plan: Plan | None = None
    costs: CostTable = msgspec.field(default_factory=CostTable)


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says besides its files: which run it is of, and how far that was.

    `algorithm` is the class's name, `model` a hash of the folder's content, `config` the text of config.toml.
    """

    algorithm: str
    model: str
    config: str
    progress: Progress


def checkpoint_of(config: RunConfig, algorithm: str, model: str) -> tuple[checkpoint.Checkpoint, Saved, list[str]]:
    """The checkpoint that `--resume` names, what it says, and warnings where later ones are damaged.

    Raises ConfigError where there is none, or where it is of another algorithm, model or configuration.
    """
    path = Path(config.resume)
    try:
        if (path / "checkpoints").is_dir():
            found, damaged = checkpoint.latest(path / "checkpoints")
        else:
            found, damaged = checkpoint.load(path), []
        saved = msgspec.convert(found.meta, Saved)
    except CheckpointError as error:
        raise ConfigError(f"--resume: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"--resume: {path} holds no checkpoint of a training run of this version: {error}") from None
    if saved.algorithm != algorithm:
        raise ConfigError(
            f"--resume: {found.path} is of a run of {saved.algorithm}, this is {algorithm}; use its command, {INSTEAD}"
        )
    before = _parsed(type(config), saved.config)
    for field in msgspec.structs.fields(config):
        was, now = getattr(before, field.name), getattr(config, field.name)
        if was != now and field.name not in MAY_CHANGE:
            raise ConfigError(
                f"--{toml_key(field.name)}: the run to resume has {was!r}, this one {now!r}; pass --config with "
                f"the config.toml of that run, {INSTEAD}"
            )
    if saved.model != model:
        raise ConfigError(
            f"--model: {config.model or 'the built-in toy'} has other weights or settings than the model of the run "
            f"to resume, {before.model or 'the built-in toy'}, had; give that one as it was, {INSTEAD}"
        )
    if damaged:
        damaged.append(f"going on from {found.path}, the newest checkpoint that is whole")
    return found, saved, [f"warning: {sentence}" for sentence in damaged]


def _parsed(kind: type[RunConfig], text: str) -> RunConfig:
    values = {key.replace("-", "_"): value for key, value in msgspec.toml.decode(text).items()}
    return msgspec.convert(values, kind)
