"""What holds for every test: one thread, no model hub, and nothing left behind.

The settings reach torch and transformers, and the ranks that a test starts, through the environment.
"""

import gc
import json
import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop

uvloop.new_event_loop().close()  # the first one opens a pipe that stays
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

TESTS = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
SOON_S = 30.0
LAUNCH = "import sys; from asyncflow.launch import start_ranks; sys.exit(start_ranks(2, 'ranks_script', sys.argv[1:]))"


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
    from algorithms.testing import start_ranks

    first = multiprocessing.get_context("forkserver").Process()
    first.start()  # and with it the server, which stays until the session ends
    first.join()
    first.close()

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


@dataclass
class Ended:
    """How a run ended: each rank's exit code and output, and everything on standard error."""

    codes: list[int]
    outputs: list[str]
    errors: str
    seconds: float

    @property
    def sentences(self) -> list[str]:
        return [line for line in self.errors.splitlines() if line.startswith("error: ")]


def launcher_store() -> Any:
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@dataclass
class Started:
    """A run under way."""

    pids: list[int]
    end: Callable[[], Ended]


class Ranks:
    """Forks ranks, and plays their launcher as far as to give them a store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, TESTS / "ranks_script.py"],
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.runs = 0
        launcher_store()  # the first one opens a pipe that stays

    def run(self, ranks: int, scenario: str, channel: str = "shared-memory") -> Ended:
        return self.start(ranks, scenario, channel).end()

    def start(self, ranks: int, scenario: str, channel: str = "shared-memory") -> Started:
        self.runs += 1
        store = launcher_store()
        outputs = [self.folder / f"{self.runs}-{rank}" for rank in range(ranks)]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
        common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        environments = [{**common, "RANK": str(rank), "OUTPUT": str(outputs[rank])} for rank in range(ranks)]
        began = time.monotonic()
        print(json.dumps({"arguments": [scenario, channel], "environments": environments}), file=self.process.stdin)
        pids = self.answer(SOON_S)

        def end(store: object = store) -> Ended:  # which must outlive the ranks
            try:
                codes = self.answer(SOON_S)
            except TimeoutError:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                self.answer(SOON_S)
                raise
            seconds = time.monotonic() - began
            texts = [[Path(f"{output}.{stream}").read_text() for output in outputs] for stream in (1, 2)]
            return Ended(codes, texts[0], "".join(texts[1]), seconds)

        return Started(pids, end)

    def answer(self, seconds: float) -> list[int]:
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise TimeoutError("the ranks did not end")
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Call `run` with a number of ranks and a scenario of `ranks_script.py`."""
    made = Ranks(tmp_path_factory.mktemp("ranks"))
    with made.process:
        yield made
        assert made.process.stdin
        made.process.stdin.close()


@pytest.fixture(scope="session")
def launched() -> Callable[[str], subprocess.Popen[str]]:
    """Call it with a scenario: a command that starts two ranks of its own, in a process group as a shell makes it."""

    def launched(scenario: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", LAUNCH, scenario, "shared-memory"],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    return launched
