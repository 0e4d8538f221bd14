"""Runs the ranks of a command as torchrun does, but forks them from one process that has imported everything.

An import costs seconds in every rank, a fork nothing. Tests of whole runs call `start_ranks`.
"""

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from algorithms.dancegrpo import main
from asyncflow.options import run

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload([__name__])


@dataclass(frozen=True)
class Ranks:
    """The ranks of one run, and the file of all they print."""

    processes: Sequence[ForkServerProcess]
    output: Path

    def wait(self, seconds: float) -> list[int | None]:
        """The exit codes of the ranks; the ones still alive after that time are killed first."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        for process in self.processes:
            process.kill()
            process.join()
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.close()
        return codes


def start_ranks(ranks: int, options: Sequence[str], output: Path) -> Ranks:
    """Start `ranks` ranks of `python -m algorithms.dancegrpo` with these options."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = [
        _forks.Process(target=_be_rank, args=(rank, ranks, port, list(options), output)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return Ranks(processes, output)


def _be_rank(rank: int, ranks: int, port: int, options: list[str], output: Path) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(run(main, options))
