"""When the work of a device is over, and where copies run: the same calls on CPU and CUDA.

Invariant: a tensor that a task or a transfer hands on is complete. On a CPU it is once its call has returned; CUDA has
merely launched it then, and is done when an event behind it happens. The thread that launched the work waits for that
event, asleep: the engine's for tasks, the communicator's for transfers. So no stream ever waits for another one.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


def wait_for(tensors: Iterable[torch.Tensor]) -> None:
    """Block until all that this thread launched on the devices of `tensors` is done."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        _wait(torch.cuda.current_stream(device))


@contextmanager
def side_stream(*devices: torch.device) -> Iterator[None]:
    """Run the block's copies beside the kernels of the one GPU among `devices`, and leave when they are done."""
    stream = next((_side_stream(device) for device in devices if device.type == "cuda"), None)
    with torch.cuda.stream(stream):  # none: nothing changes
        yield
    if stream:
        _wait(stream)


def _wait(stream: torch.cuda.Stream) -> None:
    stream.record_event(torch.cuda.Event(blocking=True)).synchronize()  # type: ignore[no-untyped-call]


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
