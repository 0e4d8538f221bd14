"""A lane: one thread that runs calls in the order they were given, awaited from the event loop.

Each rank has the engine's (all device work), one for each judge that is apart, and the communicator's (everything that
moves), so that its event loop stays free. The threads are daemons: a failing run must be able to exit while a long
kernel or a transfer still blocks.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class Lane:
    """One daemon thread with a queue."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> "asyncio.Future[T]":
        """Queue `call` at once; the future, of the running loop, takes its result or its exception."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - it is handed to whoever awaits the call
                resolve(future.set_exception, error)
            else:
                resolve(future.set_result, result)

        def resolve(setter: Callable[[T], None] | Callable[[BaseException], None], value: object) -> None:
            def deliver() -> None:
                if not future.done():
                    setter(value)  # type: ignore[arg-type]

            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(deliver)

        self._calls.put(run)
        return future

    def close(self) -> None:
        """Wait for the calls that are queued and end the thread."""
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
