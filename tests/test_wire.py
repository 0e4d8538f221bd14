"""Control messages arrive whole and in order, over TCP and in memory, and as the types they were."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from asyncflow.core.graph import Kind, Task
from asyncflow.testing import MemoryLink
from asyncflow.wire import (
    CancelTask,
    Forget,
    Header,
    Hello,
    Link,
    Message,
    Ready,
    Receive,
    RunTask,
    Send,
    Stop,
    StreamLink,
    TaskDone,
    TensorMoved,
    WorkerFailed,
    decode,
    encode,
)

TASK = Task("score/0", Kind.SCORE, "5s", ("decode/0.frames",), ("rollout/0",), ("barrier/0",), 1, 2, (3, 4), "quality")
MESSAGES: list[Message] = [
    Hello(1, 4321),
    Ready(),
    RunTask(7, (TASK,), ("score/0.x",), {"prompt": "a cat", "seeds": [1, 2]}, (0, 1), 9),
    RunTask(8, (TASK, TASK), (), None),
    CancelTask(8),
    Send(3, "decode/0.frames", 2),
    Receive(3, "decode/0.frames", 0, Header("bfloat16", (2, 3))),
    Forget("decode/0.frames"),
    TaskDone(7, 1.5, 2.5, {"score/0": [0.5, 1.0]}, {"score/1": "no answer"}, {"score/0.x": Header("int64", ())}),
    TaskDone(8, 1.5, 2.5, cancelled=True),
    TensorMoved(3, 1.0, 2.0),
    WorkerFailed(7, "a sentence", "x" * 100_000),
    Stop("the reason"),
    Stop(),
]


@pytest.fixture(scope="module", autouse=True)
def libuv() -> None:
    """libuv opens a pipe with the first loop and keeps it."""
    uvloop.new_event_loop().close()


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_its_encoding(message: Message):
    assert decode(encode(message)) == message


async def over_tcp(use: Callable[[Link, Link], Awaitable[None]]) -> None:
    accepted: asyncio.Future[StreamLink] = asyncio.get_running_loop().create_future()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(StreamLink(reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    one = StreamLink(*await asyncio.open_connection(*server.sockets[0].getsockname()))
    other = await accepted
    await use(one, other)
    await one.close()
    await other.close()
    server.close()
    await server.wait_closed()


async def in_memory(use: Callable[[Link, Link], Awaitable[None]]) -> None:
    await use(*MemoryLink.pair())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("connect", [over_tcp, in_memory])
def test_messages_arrive_in_order_and_then_the_end(connect, loop):
    async def use(one: Link, other: Link) -> None:
        for message in MESSAGES:
            one.send(message)
        other.send(Ready())
        assert await one.receive() == Ready()
        await one.close()
        assert [await other.receive() for _ in MESSAGES] == MESSAGES
        with pytest.raises(EOFError):
            await other.receive()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(connect(use))


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_what_is_sent_to_a_lost_end_is_lost_without_an_error(loop):
    async def use(one: Link, other: Link) -> None:
        await other.close()
        with pytest.raises(EOFError):
            await one.receive()
        for _ in range(20):
            one.send(Ready())
            await asyncio.sleep(0)
        await one.close()
        one.send(Ready())
        await one.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(over_tcp(use))


def test_a_message_cut_short_is_the_end():
    async def main() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data((100).to_bytes(4, "big") + b"only this")
        reader.feed_eof()
        with pytest.raises(EOFError):
            await StreamLink(reader, None).receive()  # type: ignore[arg-type]

    asyncio.run(main())
