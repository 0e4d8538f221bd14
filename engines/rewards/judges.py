"""Judges that write: rewards made of a chat engine and a protocol.

Invariant: between `load` and `close` the judge has an event loop of its own, which runs in the calling thread while a
batch is judged, and only then; an engine that is asynchronous inside lives in it. One thread may load it and another
one ask. `build` makes judges.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
import uvloop
from torch import Tensor

from asyncflow.errors import RewardError
from engines.rewards.base import Effort, Needs, OnInvalid, Outcome, PairwiseReward, PointwiseReward, Reward
from engines.rewards.chat.base import Busy, ChatEngine, Refused
from engines.rewards.judging import Judging
from engines.rewards.pairs import scheme
from engines.rewards.protocols.base import Case, ChatProtocol


def no_needs(height: int, width: int, device: torch.device) -> Needs:
    """Of an engine that is somewhere else."""
    return Needs()


class ChatJudge:
    """A protocol on an engine, in an event loop of its own."""

    def __init__(
        self,
        make_engine: Callable[[], ChatEngine],
        protocol: ChatProtocol,
        *,
        concurrency: int,
        deadline: float,
        needs: Callable[[int, int, torch.device], Needs] = no_needs,
        apart: bool = False,
    ) -> None:
        self._make_engine = make_engine
        self._protocol = protocol
        self._concurrency = concurrency
        self._deadline = deadline
        self.needs = needs
        """What the engine will take; see `Reward`."""
        self.apart = apart
        """Whether it computes elsewhere; see `Reward`."""
        self._runner: asyncio.Runner | None = None

    def load(self, device: torch.device, cache_bytes: int) -> None:
        """Start the engine. Raises RewardError if it does not answer."""
        engine = self._make_engine()
        self._judging = Judging(engine, self._protocol, self._concurrency, self._deadline)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        with ExitStack() as failed:
            failed.callback(self.close)
            try:
                self._runner.run(engine.start(device, cache_bytes))
            except (Busy, Refused) as error:
                raise RewardError(f"{error}; start it, or correct the reward's address") from None
            failed.pop_all()

    def judge(self, cases: Sequence[Case], progress: Callable[[], object]) -> tuple[list[Outcome], list[Effort]]:
        """The outcomes, and what each took; meanwhile it calls `progress` again and again."""
        assert self._runner, "the judge is not loaded"
        judged = self._runner.run(self._judging.judge(cases, progress))
        return [outcome for outcome, _ in judged], [effort for _, effort in judged]

    def rest(self) -> None:
        """Let the engine rest."""
        assert self._runner, "the judge is not loaded"
        self._runner.run(self._judging.engine.rest())

    def close(self) -> None:
        """Close the engine and the loop."""
        if self._runner:
            with self._runner as runner:
                runner.run(self._judging.engine.close())
            self._runner = None


class WritingJudge(Reward):
    """What the two kinds of judges share."""

    def __init__(self, name: str, chat: ChatJudge, *, on_invalid: OnInvalid) -> None:
        self.name = name
        self.on_invalid = on_invalid
        self.apart = chat.apart
        self._chat = chat

    def needs(self, height: int, width: int, device: torch.device) -> Needs:
        """See `Reward`. Raises ConfigError where the judge's folder does not tell."""
        return self._chat.needs(height, width, device)

    def load(self, device: torch.device) -> None:
        """See `Reward`."""
        self._chat.load(device, self.cache_bytes)

    def rest(self) -> None:
        """See `Reward`."""
        self._chat.rest()

    def close(self) -> None:
        """See `Reward`."""
        self._chat.close()

    def _judge(self, cases: Sequence[Case]) -> list[Outcome]:
        outcomes, self.efforts = self._chat.judge(cases, self.progress)
        return outcomes


class ScoringJudge(WritingJudge, PointwiseReward):
    """Scores each video by itself."""

    def score(self, videos: Sequence[Tensor], prompts: Sequence[str]) -> list[Outcome]:
        """See `PointwiseReward`."""
        return self._judge([Case((video,), prompt) for video, prompt in zip(videos, prompts, strict=True)])


class ComparingJudge(WritingJudge, PairwiseReward):
    """Compares the pairs of a scheme."""

    def __init__(
        self, name: str, chat: ChatJudge, *, on_invalid: OnInvalid, opponents: str | int, both_orders: bool
    ) -> None:
        super().__init__(name, chat, on_invalid=on_invalid)
        self._opponents = opponents
        self._both_orders = both_orders

    def pairs(self, group_size: int) -> list[tuple[int, int]]:
        """See `PairwiseReward`."""
        return scheme(self._opponents, group_size, both_orders=self._both_orders)

    def compare(self, videos: Sequence[tuple[Tensor, Tensor]], prompts: Sequence[str]) -> list[Outcome]:
        """See `PairwiseReward`."""
        return self._judge([Case(pair, prompt) for pair, prompt in zip(videos, prompts, strict=True)])
