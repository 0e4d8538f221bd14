"""The control messages between the controller and the ranks: small, typed, never a tensor.

A frame on the wire is a length of four bytes, big endian, and a msgpack body. `Link` is one end of a connection.
"""

import asyncio
import contextlib
from typing import Any, Protocol

import msgspec

from asyncflow.core.graph import Task


class Header(msgspec.Struct, frozen=True):
    """What a receiver must know of a tensor before it can take it."""

    dtype: str
    shape: tuple[int, ...]
    device: str = "cpu"


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a rank: its number and its process."""

    rank: int
    pid: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The rank has loaded what its tasks need."""


class RunTask(msgspec.Struct, frozen=True, tag=True):
    """Run `tasks` on the device; keep the tensors named in `keep`; `payload` is what the algorithm tells the engine.

    `gang` are the ranks that run it together, with number `sequence` for their collective; empty for other tasks.
    """

    ticket: int
    tasks: tuple[Task, ...]
    keep: tuple[str, ...]
    payload: Any
    gang: tuple[int, ...] = ()
    sequence: int = 0


class CancelTask(msgspec.Struct, frozen=True, tag=True):
    """Nothing will be made of the run command `ticket`: stop it where that is possible, if it still runs."""

    ticket: int


class Send(msgspec.Struct, frozen=True, tag=True):
    """Launch transfer `sequence`: `tensor` to rank `target`."""

    sequence: int
    tensor: str
    target: int


class Receive(msgspec.Struct, frozen=True, tag=True):
    """Launch transfer `sequence`: `tensor`, which looks like `header`, from rank `source`."""

    sequence: int
    tensor: str
    source: int
    header: Header


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Drop a tensor."""

    tensor: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the worker: in order, or with the reason why the run failed."""

    error: str = ""


class TaskDone(msgspec.Struct, frozen=True, tag=True):
    """Tasks ended; `values[task]` is the small result of each, `headers` describe the tensors that were kept.

    Of a task that was `cancelled` there is nothing.
    """

    ticket: int
    start: float
    end: float
    values: dict[str, Any] = {}
    invalid: dict[str, str] = {}
    headers: dict[str, Header] = {}
    cancelled: bool = False


class TensorMoved(msgspec.Struct, frozen=True, tag=True):
    """The receiver has transfer `sequence`."""

    sequence: int
    start: float
    end: float


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """Something raised on a rank: `error` is the sentence for the user, `details` the traceback."""

    ticket: int
    error: str
    details: str


ToRank = RunTask | CancelTask | Send | Receive | Forget | Stop
ToController = Hello | Ready | TaskDone | TensorMoved | WorkerFailed
Message = ToRank | ToController

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode


class Link(Protocol):
    """One end of a connection between the controller and a rank; messages arrive whole and in order."""

    def send(self, message: Message) -> None:
        """Queue a message; it never blocks, and is lost if the other end is gone."""

    async def receive(self) -> Message:
        """The next message. Raises EOFError when the other end is gone."""

    async def close(self) -> None:
        """Deliver what is queued and hang up."""


class StreamLink:
    """A link over an asyncio TCP stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, message: Message) -> None:
        """See `Link`."""
        body = encode(message)
        if not self._writer.is_closing():  # uvloop refuses to write then
            self._writer.write(len(body).to_bytes(4, "big") + body)

    async def receive(self) -> Message:
        """See `Link`."""
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            return decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError("the other end of a control connection is gone") from error

    async def close(self) -> None:
        """See `Link`."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
