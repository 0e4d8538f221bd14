"""What moves is launched in the order of one sequence, from one thread, and a gang's sum holds its place in it."""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch

from asyncflow.channels.base import header_of
from asyncflow.channels.distributed import DistributedChannel
from asyncflow.communicator import Communicator
from asyncflow.errors import RankLost
from asyncflow.wire import Header, Receive, Send

SOON_S = 30.0
HEADER = Header("float32", (2,))
Operation = tuple[int, int, int]
"""Source, target, and how many went the same way before."""


class Wire:
    """torch.distributed between ranks that are threads, as strict as its backends together.

    A send blocks until it is received, a buffer that does not fit is refused, and so is a launch after which ranks wait
    for each other in a circle: there is no order that all of them kept.
    """

    def __init__(self, gone: int | None = None) -> None:
        self._changed = threading.Condition()
        self._gone = {gone}
        self._offers: dict[Operation, torch.Tensor] = {}
        self._numbers: dict[tuple[int, int, int], Iterator[int]] = defaultdict(count)
        self._waiting: dict[int, tuple[Operation, int]] = {}

    def offer(self, source: int, target: int, tensor: torch.Tensor) -> None:
        with self._changed:
            operation = source, target, next(self._numbers[source, source, target])
            self._offers[operation] = tensor.clone()
            self._wait(operation, source, target, lambda: operation not in self._offers)

    def take(self, source: int, target: int, tensor: torch.Tensor) -> None:
        with self._changed:
            operation = source, target, next(self._numbers[target, source, target])
            self._wait(operation, target, source, lambda: operation in self._offers)
            offered = self._offers.pop(operation)
            del self._waiting[source]
            assert header_of(offered) == header_of(tensor), "the buffer does not fit"
            tensor.copy_(offered)
            self._changed.notify_all()

    def _wait(self, operation: Operation, rank: int, other: int, ready: Callable[[], bool]) -> None:
        self._waiting[rank] = operation, other
        self._changed.notify_all()
        if circle := self._circle(rank):
            self._gone |= circle
            raise AssertionError(f"ranks {circle} wait for each other")
        assert self._changed.wait_for(lambda: ready() or other in self._gone, SOON_S), f"rank {other} does nothing"
        self._waiting.pop(rank, None)
        if not ready():
            raise RuntimeError("connection closed by peer")

    def _circle(self, rank: int) -> set[int]:
        """The ranks that wait for each other now that `rank` waits."""
        seen = {rank}
        while rank in self._waiting:
            operation, rank_awaited = self._waiting[rank]
            if self._waiting.get(rank_awaited, (None, 0))[0] == operation:
                return set()
            if rank_awaited in seen:
                return seen
            rank = rank_awaited
            seen.add(rank)
        return set()


class Calls:
    """What one rank sees of the wire, and from which threads it was called."""

    def __init__(self, rank: int, wire: Wire) -> None:
        self.rank, self.wire = rank, wire
        self.threads = {threading.current_thread().name}
        self.closed = False

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self.threads.add(threading.current_thread().name)
        self.wire.offer(self.rank, dst, tensor)

    def recv(self, tensor: torch.Tensor, src: int) -> int:
        self.threads.add(threading.current_thread().name)
        self.wire.take(src, self.rank, tensor)
        return src

    def destroy_process_group(self) -> None:
        self.closed = True


class StrictChannel(DistributedChannel):
    """The channel of gloo and NCCL over the strict calls; it notes which numbers are launched, each once."""

    def __init__(self, rank: int, wire: Wire) -> None:
        self.calls = Calls(rank, wire)
        super().__init__(rank, torch.device("cpu"), self.calls)
        self.launched: dict[int, None] = {}

    def send(self, sequence: int, target: int, tensor: torch.Tensor) -> None:
        self.launched[sequence] = None
        super().send(sequence, target, tensor)

    def receive(self, sequence: int, source: int, header: Header) -> torch.Tensor:
        self.launched[sequence] = None
        return super().receive(sequence, source, header)


def between(ranks: int, play: Callable[..., Awaitable[None]], gone: int | None = None) -> list[StrictChannel]:
    """Run `play(*communicators)` on that many ranks, of which one may be gone; return their channels."""
    wire = Wire(gone)
    channels: list[StrictChannel] = []

    def make() -> StrictChannel:
        channels.append(StrictChannel(len(channels), wire))
        return channels[-1]

    async def main() -> None:
        made = [await Communicator.connect(make) for _ in range(ranks)]
        try:
            async with asyncio.timeout(SOON_S):
                await play(*made)
        finally:
            for communicator in made:
                communicator.close()

    asyncio.run(main())
    assert all(channel.calls.closed for channel in channels)
    assert {name for channel in channels for name in channel.calls.threads} == {"asyncflow-communication"}
    return channels


def test_both_may_send_first():
    """Each has something to send and something to receive; the numbers say which goes first."""

    async def play(zero: Communicator, one: Communicator) -> None:
        moves = [zero.send(Send(1, "a.x", 1), torch.zeros(2)), zero.receive(Receive(2, "b.x", 1, HEADER))]
        moves += [one.receive(Receive(1, "a.x", 0, HEADER)), one.send(Send(2, "b.x", 0), torch.ones(2))]
        _, (from_one, start, end), (from_zero, *_), _ = await asyncio.gather(*moves)
        assert (from_zero.sum(), from_one.sum()) == (0, 2)
        assert 0 < start <= end

    zero, one = between(2, play)
    assert list(zero.launched) == list(one.launched) == [1, 2]


def test_a_ring_of_blocking_sends_does_not_deadlock():
    async def play(*ranks: Communicator) -> None:
        moves: list[Awaitable[object]] = []
        for sequence in range(1, 31):
            source, target = sequence % 3, (sequence + 1) % 3
            moves.append(ranks[source].send(Send(sequence, "a.x", target), torch.full((2,), float(sequence))))
            moves.append(ranks[target].receive(Receive(sequence, "a.x", source, HEADER)))
        came = (await asyncio.gather(*moves))[1::2]
        assert [tensor[0].item() for tensor, *_ in came] == list(range(1, 31))

    for channel in between(3, play):
        assert list(channel.launched) == sorted(channel.launched)


def test_a_number_that_does_not_grow_is_refused():
    async def play(rank: Communicator) -> None:
        rank.collective(2, (0,)).cancel()
        for number in (1, 2):
            with pytest.raises(AssertionError, match=f"transfer {number} was launched after 2"):
                rank.send(Send(number, "a.x", 0), torch.zeros(2))
            with pytest.raises(AssertionError, match=f"transfer {number} was launched after 2"):
                rank.receive(Receive(number, "a.x", 0, HEADER))
            with pytest.raises(AssertionError, match=f"transfer {number} was launched after 2"):
                rank.collective(number, (0,))

    between(1, play)


def test_a_place_in_the_sequence_is_taken_at_once():
    """A send is launched before a sum that was ordered after it, though nobody has awaited it yet."""

    async def play(zero: Communicator, one: Communicator) -> None:
        sent = zero.send(Send(1, "a.x", 1), torch.zeros(2))
        places = [zero.collective(2, (0, 1)), one]
        came = one.receive(Receive(1, "a.x", 0, HEADER))
        places[1] = one.collective(2, (0, 1))
        totals = [asyncio.to_thread(place, torch.ones(2)) for place in places]
        assert [total.tolist() for total in await asyncio.gather(*totals)] == [[2, 2], [2, 2]]
        await asyncio.gather(sent, came)

    assert list(between(2, play)[0].launched) == [1, 2]


def test_a_sum_holds_its_place_until_the_engine_has_its_tensor():
    async def play(zero: Communicator, one: Communicator) -> None:
        places = [rank.collective(1, (0, 1)) for rank in (zero, one)]
        later = asyncio.gather(zero.send(Send(2, "a.x", 1), torch.zeros(2)), one.receive(Receive(2, "a.x", 0, HEADER)))
        first = asyncio.create_task(asyncio.to_thread(places[0], torch.ones(2)))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not first.done() and not later.done()
        assert (await asyncio.to_thread(places[1], torch.ones(2))).tolist() == [2, 2]
        assert (await first).tolist() == [2, 2]
        await later

    zero, one = between(2, play)
    assert list(zero.launched) == list(one.launched) == [1, 2]


def test_a_place_that_is_given_up_lets_the_rest_pass():
    async def play(zero: Communicator, one: Communicator) -> None:
        places = [rank.collective(1, (0, 1)) for rank in (zero, one)]
        moved = asyncio.gather(zero.send(Send(2, "a.x", 1), torch.zeros(2)), one.receive(Receive(2, "a.x", 0, HEADER)))
        for place in places:
            place.cancel()
        await moved

    zero, _ = between(2, play)
    assert list(zero.launched) == [2]


def test_giving_up_a_place_that_was_used_changes_nothing():
    async def play(rank: Communicator) -> None:
        place = rank.collective(1, (0,))
        assert (await asyncio.to_thread(place, torch.ones(2))).tolist() == [1, 1]
        place.cancel()

    between(1, play)


def test_a_sum_that_fails_raises_in_the_engine_and_the_next_transfer_goes_on():
    async def play(zero: Communicator, one: Communicator) -> None:
        place = zero.collective(1, (0, 2))
        with pytest.raises(RankLost, match="rank 2 is gone"):
            await asyncio.to_thread(place, torch.ones(2))
        await asyncio.gather(zero.send(Send(2, "a.x", 1), torch.zeros(2)), one.receive(Receive(2, "a.x", 0, HEADER)))

    between(2, play, gone=2)


def test_a_receive_that_is_given_up_still_takes_its_tensor():
    """Nobody awaits it any more; the sender ends, and the next transfer of the pair is not mistaken for it."""

    async def play(zero: Communicator, one: Communicator) -> None:
        given_up = asyncio.ensure_future(one.receive(Receive(1, "a.x", 0, HEADER)))
        given_up.cancel()
        later = one.receive(Receive(2, "a.y", 0, HEADER))
        await zero.send(Send(1, "a.x", 1), torch.zeros(2))
        await zero.send(Send(2, "a.y", 1), torch.ones(2))
        assert (await later)[0].tolist() == [1, 1]
        assert given_up.cancelled()

    between(2, play)


def test_a_send_that_is_given_up_still_leaves():
    async def play(zero: Communicator, one: Communicator) -> None:
        asyncio.ensure_future(zero.send(Send(1, "a.x", 1), torch.ones(2))).cancel()
        assert (await one.receive(Receive(1, "a.x", 0, HEADER)))[0].tolist() == [1, 1]

    between(2, play)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_a_sum_is_launched_in_one_order_everywhere(ranks: int):
    async def play(*communicators: Communicator) -> None:
        places = [rank.collective(1, tuple(range(ranks))) for rank in communicators]
        parts = [torch.arange(10) * 10**rank for rank in range(ranks)]
        with ThreadPoolExecutor(ranks) as engines:
            sums = [engines.submit(place, part) for place, part in zip(places, parts, strict=True)]
            totals = await asyncio.gather(*map(asyncio.wrap_future, sums))
        assert all(torch.equal(total, sum(parts)) for total in totals)

    between(ranks, play)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_all_send_first_are_refused(ranks: int):
    """Without the one sequence they would wait for each other; this is what the other tests would fail with."""
    wire = Wire()
    channels = [StrictChannel(rank, wire) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as threads:
        sends = [threads.submit(c.send, 1, (c.rank + 1) % ranks, torch.zeros(2)) for c in channels]
        errors = [send.exception(SOON_S) for send in sends]
    assert {type(error) for error in errors} == {AssertionError, RankLost}
    assert "wait for each other" in "".join(map(str, errors))


def test_a_channel_that_cannot_be_made_leaves_no_thread():
    def make() -> StrictChannel:
        raise RankLost("rank 1 did not connect")

    with pytest.raises(RankLost, match="did not connect"):
        asyncio.run(Communicator.connect(make))
