"""The control messages between the controller and the ranks: small, typed, never a tensor.

A frame on the wire is a length of four bytes, big endian, and a msgpack body. `Link` is one end of a connection;
whatever comes over it that is no message ends it, as if the other end had hung up.
"""

import asyncio
import contextlib
import math
from typing import Any, Protocol

import msgspec

from asyncflow.core.graph import Task
from asyncflow.errors import TransferError

LARGEST = 1 << 28
"""Bytes of a message at most: one that announces more is none."""

HUNG_UP = "its process ended or hung up"
"""Why a link is at its end, as a rule."""


class Header(msgspec.Struct, frozen=True):
    """What a receiver must know of a tensor before it can take it."""

    dtype: str
    shape: tuple[int, ...]
    device: str = "cpu"


class Join(msgspec.Struct, frozen=True, tag=True):
    """The first message on a connection: who connects, and the token that this run's ranks alone know."""

    rank: int
    token: str


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life, from both ends; `lag` is how many seconds late the sender's event loop came to give it."""

    lag: float


class Hello(msgspec.Struct, frozen=True, tag=True):
    """What a rank tells the controller first: its number and its process."""

    rank: int
    pid: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The rank has loaded what its tasks need."""


class RunTask(msgspec.Struct, frozen=True, tag=True):
    """Run `tasks` on the device; keep the tensors named in `keep`; `payload` is what the algorithm tells the engine.

    `gang` are the ranks that run it together, with number `sequence` for their collective; empty for other tasks. The
    run has failed if the engine gives no sign of progress for `patience` seconds.
    """

    ticket: int
    tasks: tuple[Task, ...]
    keep: tuple[str, ...]
    payload: Any
    gang: tuple[int, ...] = ()
    sequence: int = 0
    patience: float = math.inf


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
    """End the worker: in order, or with the reason why the run ended early and the exit code of its processes."""

    error: str = ""
    code: int = 1


class TaskDone(msgspec.Struct, frozen=True, tag=True):
    """Tasks ended; `values[task]` is the small result of each, `headers` describe the tensors that were kept.

    Of a task that was `cancelled` there is nothing; of a gang's, `summed` says when its sum over ranks began and ended.
    """

    ticket: int
    start: float
    end: float
    values: dict[str, Any] = {}
    invalid: dict[str, str] = {}
    headers: dict[str, Header] = {}
    cancelled: bool = False
    summed: tuple[float, float] | None = None


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
Message = ToRank | ToController | Join | Beat

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode


class Link(Protocol):
    """One end of a connection between the controller and a rank; messages arrive whole and in order."""

    def send(self, message: Message) -> None:
        """Queue a message; it never blocks, and is lost if the other end is gone."""

    async def receive(self) -> Message:
        """The next message. Raises EOFError, which says why, when the other end is gone."""

    async def close(self) -> None:
        """Deliver what is queued and hang up."""


class StreamLink:
    """A link over an asyncio TCP stream; a message that announces more than `largest` bytes is not read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, largest: int = LARGEST) -> None:
        self._reader, self._writer = reader, writer
        self.largest = largest

    def send(self, message: Message) -> None:
        """See `Link`. Raises TransferError if the message is too large."""
        body = encode(message)
        if len(body) > LARGEST:
            raise TransferError(
                f"a {type(message).__name__} message has {len(body)} bytes, and {LARGEST} is the most: "
                "what an engine gives as value, or is told as payload, must be small"
            )
        if not self._writer.is_closing():  # uvloop refuses to write then
            self._writer.write(len(body).to_bytes(4, "big") + body)

    async def receive(self) -> Message:
        """See `Link`."""
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            if size > self.largest:
                raise EOFError(f"it announced a message of {size} bytes")
            return decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError(HUNG_UP) from error
        except msgspec.MsgspecError as error:
            raise EOFError(f"it sent what is no message ({error})") from error

    async def close(self) -> None:
        """See `Link`."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
