"""Judging: conversations of a protocol over an engine, many at once, and what they took.

Invariant: every case gets a finite number, or `Invalid` with the class of its reason; a failure is retried only where
that can help. `judges` calls it in the judge's own event loop; tests do on a virtual clock.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from asyncflow.engine import Invalid
from asyncflow.errors import RewardError
from engines.rewards.base import Effort, Outcome
from engines.rewards.chat.base import Ask, Busy, ChatEngine, Died, Refused, Reply, Unreachable
from engines.rewards.protocols.base import Case, ChatProtocol, invalid

ATTEMPTS = 8
"""How often an ask is sent to an engine that is busy or does not answer."""
LONGEST_WAIT_S = 30.0
"""Between two attempts; the waits double from one second, so that a server may restart within a minute and a half."""
BEAT_S = 1.0
"""Between two signs of progress."""
WARMER = 0.3
"""The temperature of the second attempt at an answer that cannot be read: greedily the same would come again."""


@dataclass(frozen=True)
class Judging:
    """How cases are judged: at most `concurrency` conversations at once, each within `deadline` seconds."""

    engine: ChatEngine
    protocol: ChatProtocol
    concurrency: int
    deadline: float

    async def judge(self, cases: Sequence[Case], progress: Callable[[], object]) -> list[tuple[Outcome, Effort]]:
        """The outcome of each case, and what it took. They begin in order, so that neighbours can share a prefix.

        Calls `progress` every second: since every conversation has its deadline, nothing hangs while the loop turns.
        Where the engine died it is started again, once, for the cases that it left. Raises RewardError if nothing can
        be judged any more.
        """
        beating = asyncio.create_task(_beat(progress))
        try:
            judged = await self._converse_all(cases)
            if died := next((made for made in judged if isinstance(made, Died)), None):
                await died.restart()
                left = [place for place, made in enumerate(judged) if isinstance(made, Died)]
                again = await self._converse_all([cases[place] for place in left])
                for place, made in zip(left, again, strict=True):
                    judged[place] = made
        finally:
            beating.cancel()
        return [_alive(made) for made in judged]

    async def _converse_all(self, cases: Sequence[Case]) -> list[tuple[Outcome, Effort] | Died]:
        places = asyncio.Semaphore(self.concurrency)

        async def one(case: Case) -> tuple[Outcome, Effort] | Died:
            async with places:
                try:
                    return await self._converse(case)
                except Died as error:
                    return error

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(case)) for case in cases]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _converse(self, case: Case) -> tuple[Outcome, Effort]:
        clock = asyncio.get_running_loop().time
        began, conversation = clock(), _Conversation(self, case)
        try:
            async with asyncio.timeout(self.deadline):
                outcome = await conversation.hold()
        except TimeoutError:
            if conversation.unanswered:
                raise _dead(conversation.unanswered) from None
            outcome = invalid("timeout", f"no verdict within {self.deadline:g} seconds")
        except Refused as error:
            outcome = invalid("client", str(error))
        except Busy as error:
            outcome = invalid("engine", f"{error}, {ATTEMPTS} times")
        return outcome, Effort(clock() - began, conversation.tokens, conversation.turns)


async def _beat(progress: Callable[[], object]) -> None:
    while True:
        progress()
        await asyncio.sleep(BEAT_S)


class _Conversation:
    """One case's conversation."""

    def __init__(self, judging: Judging, case: Case) -> None:
        self.tokens = 0
        self.turns = 0
        self.unanswered: Unreachable | None = None
        """Why nobody answered the last time."""
        self._engine = judging.engine
        self._protocol = judging.protocol
        self._case = case

    async def hold(self) -> Outcome:
        """The outcome. A reply that cannot be read is asked for again, once each turn."""
        replies: list[Reply] = []
        step = self._protocol.proceed(self._case, replies)
        while isinstance(step, Ask):
            reply = await self._complete(step)
            after = self._protocol.proceed(self._case, [*replies, reply])
            if isinstance(after, Invalid):
                reply = await self._complete(replace(step, temperature=WARMER, seed=1, schema=self._protocol.schema))
                after = self._protocol.proceed(self._case, [*replies, reply])
            replies.append(reply)
            step = after
        return step

    async def _complete(self, ask: Ask) -> Reply:
        """A reply, after waits where the engine is busy. Raises RewardError if nobody answered the last time."""
        attempt = 1
        while True:
            try:
                reply = await self._engine.complete(ask)
            except Busy as error:
                self.unanswered = error if isinstance(error, Unreachable) else None
                if attempt == ATTEMPTS:
                    raise _dead(self.unanswered) if self.unanswered else error from None
                await asyncio.sleep(max(error.after, min(2.0 ** (attempt - 1), LONGEST_WAIT_S)))
                attempt += 1
            else:
                self.unanswered = None
                self.tokens += reply.tokens
                self.turns += 1
                return reply


def _alive(judged: tuple[Outcome, Effort] | Died) -> tuple[Outcome, Effort]:
    if isinstance(judged, Died):
        raise RewardError(f"{judged}, and once more after it was started again; see above for why")
    return judged


def _dead(error: Unreachable) -> RewardError:
    return RewardError(f"{error}, and went on so; start it again, and go on with --resume")
