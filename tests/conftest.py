"""What holds for every test: one thread, no model hub, and nothing left behind.

Both settings reach torch and transformers, and the ranks that a test starts, through the environment.
"""

import gc
import os
import re
import select
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

# What libraries open once and keep until the process ends.
LIBRARY_OWNED = re.compile(r"/dev/(null|u?random|nvidia.*)|.*\.so(\.[\d.]+)?|/(sys|proc)/.*")
TRACKER = "multiprocessing.resource_tracker"
SHARED_MEMORY = ("asyncflow", "psm_", "sem.mp-", "torch_")  # what Python, torch and we may name there; others run too
PATIENCE_S = 2.0


def held() -> Counter[str]:
    """The threads, open files, children and shared memory of this process, as printable names."""
    names: Counter[str] = Counter()
    names.update(f"thread {thread.name} {thread.ident}" for thread in threading.enumerate())
    tracked = tracker_pipe()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own descriptor
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if not LIBRARY_OWNED.fullmatch(target) and target != tracked:
                names[f"file {target}"] += 1
    names.update(f"child {pid} {command(pid)}" for pid in children() if TRACKER not in command(pid))
    names.update(f"shared memory {name}" for name in os.listdir("/dev/shm") if name.startswith(SHARED_MEMORY))
    return names


def children() -> list[int]:
    return [int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]


def command(pid: int) -> str:
    """The command line of a process; "" if it ended and nobody waited for it."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def tracker_pipe() -> str | None:
    """The pipe to the process that multiprocessing starts once, to free what others leak."""
    from multiprocessing.resource_tracker import _resource_tracker

    return None if _resource_tracker._fd is None else os.readlink(f"/proc/self/fd/{_resource_tracker._fd}")


def wait_for(known_threads: set[threading.Thread], known_children: set[int], seconds: float) -> None:
    """Join the threads and children that are not known, for a bounded time."""
    for thread in set(threading.enumerate()) - known_threads:
        thread.join(seconds)
    for pid in set(children()) - known_children:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            select.select([descriptor], [], [], seconds)
            os.close(descriptor)


@pytest.fixture(autouse=True)
def leaks() -> Iterator[None]:
    """Fail a test that leaves a thread, an open file, a child process or shared memory behind."""
    before, threads, processes = held(), set(threading.enumerate()), set(children())
    yield
    deadline = time.monotonic() + PATIENCE_S
    while left := held() - before:
        gc.collect()
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {', '.join(left)}")
        wait_for(threads, processes, seconds=0.1)
