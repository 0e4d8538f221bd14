"""What an algorithm tells an engine to do: the payload of each kind of task. They travel as msgpack."""

from typing import Any

import msgspec


class RolloutOrder(msgspec.Struct, frozen=True):
    """Sample a clip for each prompt; `seeds` are each candidate's (initial, steps) pair.

    `base`: with the model without its adapter, whatever adapter a run started from.
    """

    prompts: tuple[str, ...]
    seeds: tuple[tuple[int, int], ...]
    base: bool = False


class ForwardOrder(msgspec.Struct, frozen=True):
    """Run the policy, or the frozen one, over the trajectories of these prompts at the denoising `steps`."""

    prompts: tuple[str, ...]
    steps: tuple[int, ...]


class ReplayOrder(msgspec.Struct, frozen=True):
    """Replay the trajectories of these prompts at the denoising `steps`.

    For each candidate and step: the old unit (None: the one that this replay finds), and whether it is trained.
    """

    prompts: tuple[str, ...]
    steps: tuple[int, ...]
    old_units: list[list[float]] | None
    trained: list[list[bool]]


class Replayed(msgspec.Struct, frozen=True):
    """The value of a replay: units [B, K, M], and the weights [B, W, K, M] of the sums of gradients that it kept.

    `finite` [B] says whose sums are.
    """

    units: list[list[list[float]]]
    weights: list[list[list[list[float]]]]
    finite: list[bool]


class JudgeOrder(msgspec.Struct, frozen=True):
    """For each task of a judge batch its prompt, and the places of its one or two videos in their micro-batches."""

    prompts: tuple[str, ...]
    places: tuple[tuple[int, ...], ...]


class ExportOrder(msgspec.Struct, frozen=True):
    """Write each video of a micro-batch to its path; an empty path skips it."""

    paths: tuple[str, ...]


class UpdateOrder(msgspec.Struct, frozen=True):
    """Take one optimizer step; `coefficients[replay task]` is a row a candidate, an entry for each sum it keeps."""

    coefficients: dict[str, list[list[float]]]


class CheckpointOrder(msgspec.Struct, frozen=True):
    """Write a checkpoint of `step` with `meta` under `root`, and the adapter to `adapter`."""

    root: str
    step: int
    meta: dict[str, Any]
    adapter: str
