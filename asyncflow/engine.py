"""What the runtime and the engines agree on: the work a rank is given, and its result.

The worker calls an engine from one thread for each lane, one work at a time in each: all that the rank computes itself
is on one, each judge that is apart on another. An engine knows nothing of ranks, placement or messages.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from asyncflow.core.graph import Task


@dataclass(frozen=True, slots=True)
class Invalid:
    """The outcome of a judgement or a save that failed, with the reason; it stands where a value would."""

    reason: str


@dataclass(frozen=True, slots=True)
class Work:
    """Tasks of one kind (several: one judge batch), their input tensors by name and the algorithm's payload.

    A gang task gets the inputs that were made on this rank, and `sum_over_ranks`, which blocks until every rank of the
    gang has called it: all of them must call it once, or none. `is_unneeded` says whether nothing will be made of the
    work's results any more; an engine may ask it, where it can stop, and then raise `Cancelled`. To ask is a sign of
    progress: without any for long, the engine is taken to hang.
    """

    tasks: tuple[Task, ...]
    tensors: Mapping[str, torch.Tensor]
    payload: Any
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None
    is_unneeded: Callable[[], bool] = lambda: False


class Cancelled(Exception):
    """An engine stopped work of which nothing will be made."""


@dataclass(frozen=True, slots=True)
class Result:
    """Tensors by full name (`<task id>.<part>`), and for each task a small value or the reason why it is invalid."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    invalid: dict[str, str] = field(default_factory=dict)


class Engine(Protocol):
    """Computes tasks."""

    def run(self, work: Work) -> Result:
        """Do the work; raise to end the run."""

    def close(self) -> None:
        """Give back what it holds besides memory; called at the end of a run that did not fail."""


class Device(Protocol):
    """Where a worker's tasks run, one at a time on each lane."""

    async def run(self, work: Work) -> Result:
        """Do the work in its turn."""

    async def close(self) -> None:
        """Finish and give everything back."""
