"""The control port lets each rank of its run in once; whatever else comes is refused on one line and harms nothing."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec
import pytest
import uvloop

from asyncflow import port as control
from asyncflow.errors import RankLost
from asyncflow.port import LOOPBACK, Address, ControlPort, join
from asyncflow.wire import LARGEST, Beat, Join, Ready, StreamLink, encode


@pytest.fixture(scope="module", autouse=True)
def libuv() -> None:
    """libuv opens a pipe with the first loop and keeps it."""
    uvloop.new_event_loop().close()


def run(main: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def answer(address: Address, sent: bytes, *, hangs_up: bool = False) -> bytes:
    """All that a stranger hears who says this; it ends when the port hangs up."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(sent)
    if hangs_up:
        writer.close()
    heard = await reader.read()
    writer.close()
    return heard


async def ranks_join(port: ControlPort, address: Address, *ranks: int) -> list[StreamLink]:
    """These ranks, connected and able to speak."""
    links = [await join(rank, address) for rank in ranks]
    there = await port.wait(5.0)
    for rank, link in zip(ranks, links, strict=True):
        link.send(Ready())
        assert await there[rank].receive() == Ready()
    return [*links, *there.values()]


def frame(message: object) -> bytes:
    body = message if isinstance(message, bytes) else encode(message)
    return len(body).to_bytes(4, "big") + body


STRANGERS = {
    "http": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "it announced a message of 1195725856 bytes"),
    "noise": (frame(b"\xff\x00 what is this"), "it sent what is no message"),
    "another message": (frame(Beat(0.0)), "it began with a Beat message"),
    "a message of another sort": (frame(msgspec.msgpack.encode({"type": "Launch"})), "it sent what is no message"),
    "a huge length": (b"\xff\xff\xff\xff" + b"x" * 100, "it announced a message of 4294967295 bytes"),
    "a long greeting": (frame(Join(0, "x" * 2000)), "it announced a message of 20"),
    "a wrong token": (frame(Join(0, "0" * 32)), "it does not know the token of this run"),
}


@pytest.mark.parametrize(("sent", "reason"), STRANGERS.values(), ids=STRANGERS.keys())
def test_a_stranger_is_refused(sent: bytes, reason: str, caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        port = ControlPort(2)
        address = await port.open()
        assert await answer(address, sent) == b""
        assert port.links == {}
        for link in await ranks_join(port, address, 0, 1):
            await link.close()

    run(main)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "\n" not in record.getMessage()
    assert record.getMessage().startswith("the control port refused ('127.0.0.1', ")
    assert f": {reason}" in record.getMessage()


def test_half_a_greeting_is_refused_at_its_end(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        port = ControlPort(1)
        address = await port.open()
        await answer(address, frame(Join(0, address.token))[:-3], hangs_up=True)
        for link in await ranks_join(port, address, 0):
            await link.close()

    run(main)
    assert "its process ended or hung up" in caplog.text


def test_who_says_nothing_is_hung_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(control, "_GREETING_S", 0.05)

    async def main() -> None:
        port = ControlPort(1)
        address = await port.open()
        assert await answer(address, b"") == b""
        port.close()

    run(main)
    assert "it did not say who it is" in caplog.text


@pytest.mark.parametrize(
    ("rank", "reason"),
    [(0, "rank 0 is connected already"), (2, "calls itself rank 2, and there are 2"), (-1, "calls itself rank -1")],
)
def test_a_rank_comes_once_and_no_other_comes(rank: int, reason: str, caplog: pytest.LogCaptureFixture):
    """The first one keeps its place, and its link works."""

    async def main() -> None:
        port = ControlPort(2)
        address = await port.open()
        first = await join(0, address)
        while not port.links:  # noqa: ASYNC110 - it tells nobody whom it has let in
            await asyncio.sleep(0)
        assert await answer(address, frame(Join(rank, address.token))) == b""
        second = await join(1, address)
        there = await port.wait(5.0)
        first.send(Ready())
        assert await there[0].receive() == Ready()
        for link in (first, second, *there.values()):
            await link.close()

    run(main)
    assert reason in caplog.text


def test_a_rank_of_an_old_run_is_refused(caplog: pytest.LogCaptureFixture):
    """Each run has a token of its own, which is no part of what is logged."""

    async def main() -> None:
        old, port = ControlPort(1), ControlPort(1)
        before, address = await old.open(), await port.open()
        old.close()
        assert before.token != address.token
        assert await answer(address, frame(Join(0, before.token))) == b""
        for link in await ranks_join(port, address, 0):
            await link.close()
        assert before.token not in caplog.text

    run(main)
    assert "it does not know the token of this run" in caplog.text


def test_nobody_is_let_in_once_all_are_there():
    async def main() -> None:
        port = ControlPort(1)
        address = await port.open()
        links = await ranks_join(port, address, 0)
        with pytest.raises(ConnectionRefusedError):
            await join(0, address)
        for link in links:
            await link.close()

    run(main)


def test_it_listens_on_loopback_unless_told_otherwise():
    async def main() -> None:
        for host, expected in (({}, LOOPBACK), ({"host": "127.0.0.2"}, "127.0.0.2")):
            port = ControlPort(1)
            address = await port.open(**host)
            assert address.host == expected
            other = "127.0.0.2" if expected == LOOPBACK else LOOPBACK
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(other, address.port)
            port.close()

    run(main)


def test_ranks_that_do_not_come_are_named():
    async def main() -> None:
        port = ControlPort(3)
        link = await join(1, await port.open())
        with pytest.raises(RankLost, match=r"^ranks \[0, 2\] did not connect within 0.05 seconds$"):
            await port.wait(0.05)
        await link.close()
        await port.links[1].close()

    run(main)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (frame(b"\xff\xff"), "it sent what is no message"),
        ((LARGEST + 1).to_bytes(4, "big"), f"it announced a message of {LARGEST + 1} bytes"),
    ],
)
def test_what_is_no_message_ends_the_link_of_a_rank(sent: bytes, reason: str):
    """As if that rank had hung up, but with the reason."""

    async def main() -> None:
        port = ControlPort(1)
        address = await port.open()
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(frame(Join(0, address.token)) + sent)
        links = await port.wait(5.0)
        with pytest.raises(EOFError, match=reason):
            await links[0].receive()
        await links[0].close()
        assert await reader.read() == b""
        writer.close()

    run(main)
