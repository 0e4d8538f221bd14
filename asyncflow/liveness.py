"""Who is still alive: ranks that died, that are frozen, and engines that hang.

Invariant: time is counted in turns of one's own event loop. So a process that was stopped for an hour, or all of them
together, accuses nobody when it goes on. `launch` lays a `LivingLink` over every control connection; a worker awaits
`stalled` beside its engine.
"""

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from asyncflow.core.cost import Durations
from asyncflow.core.graph import Task
from asyncflow.wire import Beat, Link, Message

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """How long others are waited for, in seconds."""

    beat: float = 1.0
    """Between two signs of life."""
    silence: float = 15.0
    """Without a sign of life: the other end is frozen."""
    slowness: float = 10.0
    """How many times as long as usual a task may go without progress."""
    least: float = 60.0
    """But so long at least."""
    unknown: float = 3600.0
    """So long where nothing like it was measured yet."""
    grace: float = 25.0
    """For what runs to end and a checkpoint to be written after a signal; torchrun kills its ranks after 30."""

    def patience(self, expected: Durations | None, tasks: Sequence[Task], rank: int) -> float:
        """How long `tasks`, of a kind that takes what `expected` says, may go without progress."""
        try:
            return max(self.least, self.slowness * expected.run(tasks, rank)) if expected else self.unknown
        except KeyError:
            return self.unknown


STANDARD = Limits()


class LivingLink:
    """A link that gives signs of life, and is at its end when the other end, which does too, gives none any more.

    `receive` hands on the other end's beats, for what they tell.
    """

    def __init__(self, link: Link, limits: Limits) -> None:
        self._link = link
        self._limits = limits
        self._inbox: asyncio.Queue[Message | EOFError] = asyncio.Queue()
        self._unheard = 0
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]

    def send(self, message: Message) -> None:
        """See `Link`."""
        self._link.send(message)

    async def receive(self) -> Message:
        """See `Link`."""
        item = await self._inbox.get()
        if isinstance(item, EOFError):
            self._inbox.put_nowait(item)
            raise item
        return item

    async def close(self) -> None:
        """See `Link`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.close()

    async def _read(self) -> None:
        try:
            while True:
                message = await self._link.receive()
                self._unheard = 0
                self._inbox.put_nowait(message)
        except EOFError as error:
            self._inbox.put_nowait(error)

    async def _beat(self) -> None:
        clock, limits = asyncio.get_running_loop().time, self._limits
        while self._unheard * limits.beat <= limits.silence:
            due = clock() + limits.beat
            await asyncio.sleep(limits.beat)
            self._unheard += 1
            self._link.send(Beat(max(0.0, clock() - due)))
        self._inbox.put_nowait(
            EOFError(f"it gave no sign of life for {limits.silence:g} seconds; its process is stopped or blocked")
        )


async def stalled(signs: Callable[[], int], patience: float) -> None:
    """Return when the number of signs of progress has been the same for `patience` seconds."""
    turn = min(1.0, patience / 4)
    seen, still = signs(), 0.0
    while still < patience:
        await asyncio.sleep(turn)
        now = signs()
        still, seen = still + turn if now == seen else 0.0, now


def stacks() -> str:
    """What every thread of this process is doing."""
    with open(os.memfd_create("stacks"), "w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().rstrip()


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def outlive(processes: Iterable[int], seconds: float) -> None:
    """Wait until these processes have ended, and kill those that have not after `seconds`: they are stopped."""
    end = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(process)
            try:
                if not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)
