"""A lane runs what it is given one at a time and in order, and never holds up its loop or the end of the process."""

import asyncio
import threading

import pytest

from asyncflow.lane import Lane


def test_calls_run_in_order_in_one_other_thread():
    async def main() -> None:
        lane = Lane("test-lane")
        threads: list[str] = []
        futures = [lane.submit(lambda n=n: threads.append(threading.current_thread().name) or n) for n in range(20)]
        assert await asyncio.gather(*futures) == list(range(20))
        assert threads == ["test-lane"] * 20
        lane.close()

    asyncio.run(main())


def test_the_loop_is_free_while_a_call_blocks():
    async def main() -> None:
        lane, release = Lane("test-lane"), threading.Event()
        blocked = lane.submit(lambda: release.wait(10))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not blocked.done()
        release.set()
        assert await blocked
        lane.close()

    asyncio.run(main())


@pytest.mark.parametrize("error", [ValueError("wrong"), SystemExit(3)])
def test_an_exception_is_raised_where_the_call_is_awaited_and_the_lane_goes_on(error: BaseException):
    def fail() -> None:
        raise error

    async def main() -> None:
        lane = Lane("test-lane")
        failed = lane.submit(fail)
        with pytest.raises(type(error)) as caught:
            await failed
        assert caught.value is error
        assert await lane.submit(lambda: 1) == 1
        lane.close()

    asyncio.run(main())


def test_close_waits_for_what_is_queued():
    async def main() -> None:
        lane, done = Lane("test-lane"), list[int]()
        for n in range(5):
            lane.submit(lambda n=n: done.append(n))
        lane.close()
        assert done == [0, 1, 2, 3, 4]

    asyncio.run(main())


def test_a_result_that_nobody_awaits_any_more_is_dropped():
    async def main() -> Lane:
        complaints: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        lane, release = Lane("test-lane"), threading.Event()
        given_up = lane.submit(lambda: release.wait(10))
        given_up.cancel()
        release.set()
        assert await lane.submit(lambda: 1) == 1
        assert given_up.cancelled()
        assert not complaints
        return lane

    asyncio.run(main()).close()


def test_a_call_that_outlives_its_loop_does_no_harm():
    release = threading.Event()

    async def main() -> Lane:
        lane = Lane("test-lane")
        lane.submit(lambda: release.wait(10))
        return lane

    lane = asyncio.run(main())
    release.set()
    lane.close()


def test_its_thread_does_not_keep_the_process_alive():
    lane = Lane("test-lane")
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "test-lane")
    assert thread.daemon
    lane.close()
    assert not thread.is_alive()
