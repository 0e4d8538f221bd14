"""What holds for every test: one thread, no model hub, and nothing left behind.

The settings reach torch and transformers, and the ranks that a test starts, through the environment.
"""

import gc
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")])
)

# What libraries open once and keep until the process ends.
LIBRARY_OWNED = re.compile(r"/dev/(null|u?random|nvidia.*)|.*\.(so(\.[\d.]+)?|ttf)|/(sys|proc)/.*")
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


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A diffusers folder of the tiny policy, its VAE and text encoder, which reads the toy's prompts."""
    from engines.testing import save_tiny_model

    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def recipe(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a quick run with everything that could depend on ranks or schedule: two mini-batches, two rewards."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    prompts.write_text("".join(f"a {colour} square moving up\n" for colour in ("red", "green", "blue", "cyan")))
    rewards = [f"--reward=engines.rewards.testing:{reward}" for reward in ("Brightness", "BrightnessDuel=0.5")]
    sizes = ["--prompts-per-step=4", "--group-size=4", "--mini-batches=2", "--task-batch=2", "--judge-batch=3"]
    training = ["--exact", "--lora-rank=2", "--lora-alpha=2", "--lr=0.02", "--eval-samples=2", "--save-every=2"]
    return [f"--model={tiny_model}", f"--prompts={prompts}", "--device=cpu", *rewards, *sizes, *training]


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., tuple[list[int | None], str]]:
    """Call it with a number of ranks, options and an output file: the exit codes of the ranks, and what they say."""
    from multiprocessing.forkserver import ensure_running

    from algorithms.testing import start_ranks

    ensure_running()  # until the session ends

    def run_ranks(ranks: int, options: list[str], output: Path) -> tuple[list[int | None], str]:
        codes = start_ranks(ranks, options, output).wait(seconds=60)
        return codes, output.read_text()

    return run_ranks


@pytest.fixture(scope="session")
def uninterrupted(
    recipe: list[str], run_ranks: Callable[..., tuple[list[int | None], str]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run directory of four steps on one rank."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    codes, output = run_ranks(1, [*recipe, "--steps=4", f"--out={folder / 'run'}"], folder / "output")
    assert codes == [0], output
    return folder / "run"


@pytest.fixture(scope="session")
def torchrun(recipe: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of two steps and an evaluation before and after, on two ranks that torchrun started."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "eval.csv").write_text("prompt\na red circle moving left\na blue square moving down\n")
    start = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "algorithms.dancegrpo"]
    options = [*recipe, "--steps=2", "--eval-prompts=eval.csv", "--out=run"]
    done = subprocess.run(
        [sys.executable, "-m", *start, *options], cwd=folder, timeout=90, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done: the adapter is in run/adapter") == 1
    return folder / "run"
