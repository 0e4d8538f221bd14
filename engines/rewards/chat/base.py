"""What a judge's two halves agree on: a protocol asks (`Ask`), an engine answers (`Reply`), in a chat with images.

Invariant: an engine knows of neither videos nor verdicts. It completes many asks at once, all in one event loop; to
cancel a `complete` aborts it; what goes wrong is one of the exceptions below, by what is to be done about it.
`judging` calls it.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Message:
    """One message; its parts are texts and images, uint8 [H, W, 3], in order."""

    role: Literal["system", "user", "assistant"]
    parts: tuple[str | Tensor, ...]


@dataclass(frozen=True, eq=False)
class Ask:
    """A conversation to go on with: at most `max_tokens`, up to one of the texts in `stop`, which an engine may keep.

    Greedy at temperature 0, else sampled from `seed`. An engine that can holds the answer to the JSON `schema`. With
    `top_logprobs` the reply tells the log-probabilities of so many alternatives for each of its tokens.
    """

    messages: tuple[Message, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    seed: int = 0
    schema: Mapping[str, Any] | None = None
    top_logprobs: int = 0


@dataclass(frozen=True)
class Reply:
    """The text, why it ended (`length`: at `max_tokens`), how many tokens it took, and each token's alternatives."""

    text: str
    finish: Literal["stop", "length", "repetition"] = "stop"
    tokens: int = 0
    logprobs: tuple[tuple[str, Mapping[str, float]], ...] = ()


class Refused(Exception):
    """The engine will not answer this ask, now or later: it is too long, say."""


class Busy(Exception):
    """The engine cannot answer now but may later, not before `after` seconds."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


class Unreachable(Busy):
    """Nobody answers: if that stays so, nothing can be judged any more."""


class Died(Exception):
    """The engine ended, and with it every ask under way. `restart` starts it again."""

    def __init__(self, reason: str, restart: Callable[[], Awaitable[None]]) -> None:
        super().__init__(reason)
        self.restart = restart


class ChatEngine(ABC):
    """Completes conversations. All its methods are awaited in one event loop, which runs only while one is."""

    apart: bool = False
    """Whether it computes outside this process."""

    @abstractmethod
    async def start(self, device: torch.device, cache_bytes: int) -> None:
        """Be ready to answer, with so much for a KV cache. Raises RewardError, or one of the exceptions above."""

    @abstractmethod
    async def complete(self, ask: Ask) -> Reply:
        """Answer. Raises Refused, Busy, Unreachable, Died, or RewardError where no ask will ever be answered."""

    async def rest(self) -> None:  # noqa: B027 - most hold nothing that they could give back
        """Give back what memory it can until the next `complete`."""

    @abstractmethod
    async def close(self) -> None:
        """Give everything back; also after a start that failed."""
