"""The control port: where the ranks of a run connect to the controller, each of them once, and nobody else.

Invariant: a connection is nothing until its first frame, small and soon, has named this run's token and a rank that is
not there yet; any other is logged on one line and hung up, and changes nothing. Once all ranks are there, nobody is let
in. `launch` opens it on rank 0, and gives its address, with the token, to the other ranks through their launcher's
store.
"""

import asyncio
import logging
import os
import secrets

import msgspec

from asyncflow.errors import RankLost
from asyncflow.wire import LARGEST, Join, Message, StreamLink

LOOPBACK = "127.0.0.1"

_GREETING_BYTES = 1024
_GREETING_S = 10.0

_log = logging.getLogger(__name__)


class Address(msgspec.Struct, frozen=True):
    """Where the controller listens, the process it is, and what a rank must know to be let in."""

    host: str
    port: int
    process: int
    token: str


class ControlPort:
    """A listener for ranks 0 to `ranks` - 1; `links` are those that have connected."""

    def __init__(self, ranks: int) -> None:
        self.links: dict[int, StreamLink] = {}
        self._ranks = ranks
        self._token = secrets.token_hex(16)
        self._complete = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def open(self, host: str = LOOPBACK) -> Address:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._accept, host, 0)
        where, port, *_ = self._server.sockets[0].getsockname()
        return Address(where, port, os.getpid(), self._token)

    async def wait(self, seconds: float) -> dict[int, StreamLink]:
        """A link to every rank. Raises RankLost, naming those that are missing, if they are not there in time."""
        try:
            async with asyncio.timeout(seconds):
                await self._complete.wait()
        except TimeoutError:
            missing = sorted(set(range(self._ranks)) - set(self.links))
            raise RankLost(f"ranks {missing} did not connect within {seconds:g} seconds") from None
        finally:
            self.close()
        return self.links

    def close(self) -> None:
        """Let nobody in any more."""
        if self._server:
            self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = StreamLink(reader, writer, _GREETING_BYTES)
        peer = writer.get_extra_info("peername")
        try:
            async with asyncio.timeout(_GREETING_S):
                first = await link.receive()
            if objection := self._objection(first):
                raise EOFError(objection)
        except (EOFError, TimeoutError) as error:
            _log.warning("the control port refused %s: %s", peer, str(error) or "it did not say who it is")
            await link.close()
            return
        assert isinstance(first, Join)
        link.largest = LARGEST
        self.links[first.rank] = link
        if len(self.links) == self._ranks:
            self._complete.set()

    def _objection(self, first: Message) -> str:
        match first:
            case Join(token=token) if not secrets.compare_digest(token.encode(), self._token.encode()):
                return "it does not know the token of this run"
            case Join(rank=rank) if not 0 <= rank < self._ranks:
                return f"it calls itself rank {rank}, and there are {self._ranks} ranks"
            case Join(rank=rank) if rank in self.links:
                return f"rank {rank} is connected already"
            case Join():
                return ""
            case _:
                return f"it began with a {type(first).__name__} message"


async def join(rank: int, address: Address) -> StreamLink:
    """The link of rank `rank` to the controller."""
    link = StreamLink(*await asyncio.open_connection(address.host, address.port))
    link.send(Join(rank, address.token))
    return link
