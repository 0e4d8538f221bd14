"""What moves is launched in the order of one sequence, from one thread, and a gang's sum holds its place in it."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest
import torch

from asyncflow.channels.base import header_of
from asyncflow.communicator import Communicator
from asyncflow.errors import RankLost
from asyncflow.wire import Header, Receive, Send

SOON_S = 30.0
HEADER = Header("float32", (2,))


class Wire:
    """Meeting places between ranks: a send blocks until it is received, as with gloo and NCCL."""

    def __init__(self, gone: int | None) -> None:
        self._changed = threading.Condition()
        self._gone = gone
        self._offers: dict[tuple[int, int, int], torch.Tensor] = {}

    def offer(self, key: tuple[int, int, int], tensor: torch.Tensor) -> None:
        with self._changed:
            self._offers[key] = tensor
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: key not in self._offers, SOON_S), f"nobody takes {key}"

    def take(self, key: tuple[int, int, int]) -> torch.Tensor:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._offers or key[0] == self._gone, SOON_S), f"no {key}"
            if key not in self._offers:
                raise RankLost(f"rank {key[0]} is gone")
            tensor = self._offers.pop(key)
            self._changed.notify_all()
            return tensor


class StrictChannel:
    """A channel that refuses a number below the last one, and a second thread."""

    def __init__(self, rank: int, wire: Wire) -> None:
        self.rank, self.wire = rank, wire
        self.launched: list[int] = []
        self.threads: set[str] = {threading.current_thread().name}
        self.closed = False

    def send(self, sequence: int, target: int, tensor: torch.Tensor) -> None:
        self.launch(sequence)
        self.wire.offer((self.rank, target, sequence), tensor)

    def receive(self, sequence: int, source: int, header: Header) -> torch.Tensor:
        self.launch(sequence)
        tensor = self.wire.take((source, self.rank, sequence))
        assert header_of(tensor) == header
        return tensor

    def launch(self, sequence: int) -> None:
        assert not self.launched or sequence >= self.launched[-1], f"{sequence} after {self.launched}"
        self.launched.append(sequence)
        self.threads.add(threading.current_thread().name)

    def close(self) -> None:
        self.closed = True


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
    assert all(channel.closed for channel in channels)
    assert {name for channel in channels for name in channel.threads} == {"asyncflow-communication"}
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
    assert zero.launched == one.launched == [1, 2]


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
        assert channel.launched == sorted(channel.launched)


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

    assert between(2, play)[0].launched == [1, 2, 2]


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
    assert (zero.launched, one.launched) == ([1, 1, 2], [1, 1, 2])


def test_a_place_that_is_given_up_lets_the_rest_pass():
    async def play(zero: Communicator, one: Communicator) -> None:
        places = [rank.collective(1, (0, 1)) for rank in (zero, one)]
        moved = asyncio.gather(zero.send(Send(2, "a.x", 1), torch.zeros(2)), one.receive(Receive(2, "a.x", 0, HEADER)))
        for place in places:
            place.cancel()
        await moved

    zero, _ = between(2, play)
    assert zero.launched == [2]


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


def test_a_channel_that_cannot_be_made_leaves_no_thread():
    def make() -> StrictChannel:
        raise RankLost("rank 1 did not connect")

    with pytest.raises(RankLost, match="did not connect"):
        asyncio.run(Communicator.connect(make))
