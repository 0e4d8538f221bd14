"""Virtual time: timers fire in order, at once, and one by one; and a deadlock is noticed instead of waited for."""

import asyncio

import pytest

from asyncflow.testing import Deadlock, MemoryLink, VirtualLoop, until
from asyncflow.wire import Ready


def test_an_hour_takes_no_time_and_the_clock_is_exact():
    async def main() -> float:
        for _ in range(3600 * 7):
            await asyncio.sleep(1 / 7)
        return asyncio.get_running_loop().time()

    expected = 0.0
    for _ in range(3600 * 7):
        expected += 1 / 7
    assert VirtualLoop.run(main()) == expected


def test_timers_of_one_moment_fire_in_the_order_they_were_set_each_after_what_the_last_set_going():
    async def main() -> list[str]:
        seen: list[str] = []

        async def wait(name: str, when: float) -> None:
            await until(when)
            for step in range(3):
                seen.append(f"{name}{step}")
                await asyncio.sleep(0)

        await asyncio.gather(wait("late", 2.0), wait("a", 1.0), wait("b", 1.0))
        return seen

    assert VirtualLoop.run(main()) == [f"{name}{step}" for name in ("a", "b", "late") for step in range(3)]


def test_a_timer_that_was_cancelled_does_not_move_the_clock():
    async def main() -> float:
        asyncio.get_running_loop().call_later(100, pytest.fail).cancel()
        async with asyncio.timeout(50):
            await asyncio.sleep(1)
        return asyncio.get_running_loop().time()

    assert VirtualLoop.run(main()) == 1.0


def test_a_timeout_works_in_virtual_time():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await asyncio.get_running_loop().create_future()
        return asyncio.get_running_loop().time()

    assert VirtualLoop.run(main()) == 3.0


def test_a_deadlock_names_who_waits():
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="waits_for_ever"):
        VirtualLoop.run(waits_for_ever())


def test_links_deliver_in_the_order_of_sending_across_all_of_them():
    async def main() -> list[int]:
        seen: list[int] = []
        ends = [MemoryLink.pair() for _ in range(2)]

        async def read(number: int) -> None:
            while True:
                await ends[number][1].receive()
                seen.append(number)

        readers = [asyncio.create_task(read(number)) for number in range(2)]
        for number in (0, 1, 0, 0, 1):
            ends[number][0].send(Ready())
        await asyncio.sleep(1)
        for reader in readers:
            reader.cancel()
        return seen

    assert VirtualLoop.run(main()) == [0, 1, 0, 0, 1]
