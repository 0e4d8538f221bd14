"""The communicator of a rank: launches everything that moves, in increasing sequence number, from one thread.

Invariant: numbers only grow. Every rank launches its share of one sequence in order, so no two ranks can wait for each
other, although sends may block until they are matched. What is launched runs to its end, even if nobody awaits it any
more: a transfer that one end abandons would be lost, or block the other end. A gang's collective takes its place in the
sequence when the gang starts and waits there for the engine's tensor. The worker owns it.
"""

import concurrent.futures
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import torch

from asyncflow.channels.base import Channel, sum_over_ranks
from asyncflow.lane import Lane
from asyncflow.streams import side_stream, wait_for
from asyncflow.wire import Receive, Send

Arrival = tuple[torch.Tensor, float, float]
"""A tensor, and when its transfer began and ended here, in seconds of the monotonic clock."""


class Collective(Protocol):
    """A place in the sequence that a gang holds."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the gang; blocks the calling thread."""

    def cancel(self) -> None:
        """Give the place up if the engine has put no tensor there; it may have failed, or have nothing to sum."""


class Transport(Protocol):
    """What a worker needs of its communicator."""

    def send(self, order: Send, tensor: torch.Tensor) -> Awaitable[None]:
        """Take the next place in the sequence; await the tensor's departure."""

    def receive(self, order: Receive) -> Awaitable[Arrival]:
        """Take the next place in the sequence; await the tensor's arrival."""

    def collective(self, sequence: int, ranks: tuple[int, ...]) -> Collective:
        """Take the next place in the sequence and hold it for a gang."""

    def close(self) -> None:
        """Finish what was launched and give everything back."""


class Communicator:
    """The transport over a channel, whose every call is made in the thread of one lane."""

    def __init__(self, channel: Channel, lane: Lane) -> None:
        self._channel, self._lane = channel, lane
        self._last = 0

    @classmethod
    async def connect(cls, make: Callable[[], Channel]) -> "Communicator":
        """Make the channel, which may block until the other ranks make theirs. Raises what `make` raises."""
        lane = Lane("asyncflow-communication")
        try:
            return cls(await lane.submit(make), lane)
        except Exception:
            lane.close()
            raise

    def send(self, order: Send, tensor: torch.Tensor) -> Awaitable[None]:
        """See `Transport`."""
        self._take(order.sequence)

        def send() -> None:
            with side_stream(self._channel.device, tensor.device):
                self._channel.send(order.sequence, order.target, tensor)

        return self._lane.submit(send)

    def receive(self, order: Receive) -> Awaitable[Arrival]:
        """See `Transport`."""
        self._take(order.sequence)

        def receive() -> Arrival:
            start = time.monotonic()
            with side_stream(self._channel.device):
                tensor = self._channel.receive(order.sequence, order.source, order.header)
            return tensor, start, time.monotonic()

        return self._lane.submit(receive)

    def collective(self, sequence: int, ranks: tuple[int, ...]) -> "GangSum":
        """See `Transport`."""
        self._take(sequence)
        place = GangSum()

        def run() -> None:
            try:
                tensor = place.given.result()
            except concurrent.futures.CancelledError:
                return
            try:
                with side_stream(self._channel.device, tensor.device):
                    total = sum_over_ranks(self._channel, sequence, ranks, tensor)
                place.total.set_result(total)
            except BaseException as error:  # noqa: BLE001 - the engine thread raises it
                place.total.set_exception(error)

        self._lane.submit(run)
        return place

    def close(self) -> None:
        """See `Transport`."""
        self._lane.close()
        self._channel.close()

    def _take(self, sequence: int) -> None:
        assert sequence > self._last, f"transfer {sequence} was launched after {self._last}"
        self._last = sequence


class GangSum:
    """A collective whose tensor comes from the engine thread and whose sum is made on the communication thread."""

    def __init__(self) -> None:
        self.given: concurrent.futures.Future[torch.Tensor] = concurrent.futures.Future()
        self.total: concurrent.futures.Future[torch.Tensor] = concurrent.futures.Future()

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Collective`."""
        wait_for([tensor])
        self.given.set_result(tensor)
        return self.total.result()

    def cancel(self) -> None:
        """See `Collective`."""
        self.given.cancel()
