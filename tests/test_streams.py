"""On a GPU a task is done when the event behind its kernels is, and copies have a stream of their own."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import cast

import pytest
import torch

from asyncflow import streams
from asyncflow.communicator import GangSum
from asyncflow.core.graph import Kind, Task
from asyncflow.engine import Engine, Result, Work
from asyncflow.launch import EngineDevice

GPU = torch.device("cuda", 1)
SOON_S = 30.0


class GpuTensor:
    """What can be seen of a tensor on a GPU without one."""

    is_cuda = True
    device = GPU


class GpuStream:
    """A stream whose work is over when the test says so; its event is itself."""

    def __init__(self) -> None:
        self.asked, self.is_over = threading.Event(), threading.Event()
        self.recorded = 0

    def record_event(self, event: object) -> "GpuStream":
        self.recorded += 1
        return self

    def synchronize(self) -> None:
        self.asked.set()
        assert self.is_over.wait(SOON_S)


class Gpu:
    """The part of `torch.cuda` that matters here, for one GPU."""

    def __init__(self) -> None:
        self.default, self.side = GpuStream(), GpuStream()
        self.current = self.default

    def current_stream(self, device: torch.device) -> GpuStream:
        assert device == GPU
        return self.current

    @contextmanager
    def stream(self, stream: GpuStream | None) -> Iterator[None]:
        self.current = stream or self.default
        yield
        self.current = self.default


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "current_stream", gpu.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", gpu.stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: gpu.side)
    streams._side_stream.cache_clear()
    yield gpu
    streams._side_stream.cache_clear()


class Launching(Engine):
    """An engine that returns at once, whatever its device still has to do."""

    def run(self, work: Work) -> Result:
        return Result({"rollout/0.path": cast("torch.Tensor", GpuTensor())})


def test_a_task_is_done_when_its_event_is(gpu: Gpu):
    async def main() -> None:
        device = EngineDevice()
        await device.load(Launching)
        running = asyncio.ensure_future(device.run(Work((Task("rollout/0", Kind.ROLLOUT),), {}, None)))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not running.done()
        gpu.default.is_over.set()
        assert (await running).tensors
        assert gpu.default.recorded == 1
        await device.close()

    asyncio.run(main())


def test_a_task_that_only_reads_the_gpu_waits_for_its_reads(gpu: Gpu):
    gpu.default.is_over.set()
    streams.wait_for([torch.ones(2), cast("torch.Tensor", GpuTensor())])
    assert gpu.default.recorded == 1


def test_a_gang_gives_its_tensor_to_the_sum_when_its_event_is(gpu: Gpu):
    place = GangSum()
    place.total.set_result(torch.ones(2))
    with ThreadPoolExecutor(1) as engine:
        adding = engine.submit(place, cast("torch.Tensor", GpuTensor()))
        assert gpu.default.asked.wait(SOON_S)
        assert not place.given.done()
        gpu.default.is_over.set()
        assert adding.result(SOON_S).sum() == 2
        assert place.given.done()


def test_copies_run_on_a_stream_of_their_own_and_are_over_behind_it(gpu: Gpu):
    gpu.side.is_over.set()
    for _ in range(2):  # each time the same one
        with streams.side_stream(torch.device("cpu"), GPU):
            assert gpu.current is gpu.side
            before = gpu.side.recorded
        assert gpu.current is gpu.default
        assert gpu.side.recorded == before + 1
    assert not gpu.default.recorded


def test_on_a_cpu_nothing_is_waited_for(gpu: Gpu):
    streams.wait_for([torch.ones(2)])
    with streams.side_stream(torch.device("cpu")):
        assert gpu.current is gpu.default
    assert not gpu.default.recorded and not gpu.side.recorded


def test_the_real_calls_do_not_touch_a_gpu_for_tensors_on_the_host():
    before = torch.cuda.is_initialized()
    with streams.side_stream(torch.device("cpu")):
        streams.wait_for([torch.ones(2)])
    assert torch.cuda.is_initialized() == before
