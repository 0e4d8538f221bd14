"""A rank with a fake engine, for test_launch: `python ranks_script.py SCENARIO CHANNEL`, as a launcher would start it.

Without arguments it forks ranks as it is told on its standard input, which saves them the time of the imports.
"""

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from asyncflow.controller import Controller
from asyncflow.core.graph import Task
from asyncflow.core.schedules import cluster, schedule
from asyncflow.engine import Result, Work
from asyncflow.errors import ModelError, TrainingError
from asyncflow.launch import ChannelName, run_rank, this_rank
from asyncflow.testing import rl_step

BLOCKED = threading.Event()


class FakeEngine:
    """Every task makes the tensors that others read, from what it reads; `scenario` says what goes wrong, and where."""

    def __init__(self, scenario: str, rank: int) -> None:
        self.trouble, _, self.victim = scenario.partition("@")
        self.rank = rank
        if self.victim == f"load:{rank}":
            self.break_down("the engine")
        self.weights = torch.zeros(3)

    def run(self, work: Work) -> Result:
        task = work.tasks[0]
        if self.victim == f"{task.kind}:{self.rank}":
            self.break_down(task.id)
        if self.trouble == "block-everywhere":
            BLOCKED.set()
            threading.Event().wait()
        if work.sum_over_ranks:
            total = sum(work.tensors.values(), torch.zeros(3))
            self.weights += work.sum_over_ranks(total)
            return Result(values={task.id: self.weights.tolist()})
        made = sum((tensor.sum() for tensor in work.tensors.values()), torch.tensor(1.0))
        parts = {"rollout": "path", "decode": "frames", "replay": "gradients"}
        tensors = {f"{task.id}.{part}": made.expand(3) for kind, part in parts.items() if kind == task.kind}
        return Result(tensors, {task.id: 1.0 for task in work.tasks})

    def break_down(self, what: str) -> None:
        match self.trouble:
            case "raise":
                raise ValueError(f"{what} went wrong")
            case "refuse":
                raise ModelError(f"{what} cannot be used; give another one")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "block":
                print(f"blocked {os.getpid()}", flush=True)  # noqa: T201
                threading.Event().wait()


class Program:
    def payload(self, tasks: Sequence[Task], values: Mapping[str, Any]) -> None:
        return None

    def local(self, task: Task, values: Mapping[str, Any]) -> tuple[Any, Sequence[str]]:
        return sum(values.values()), ()


def main(scenario: str, channel: ChannelName) -> None:
    rank = this_rank()
    assert rank

    async def lead(controller: Controller) -> None:
        name = "colocated" if rank.ranks == 1 else "async-reward"
        judges = 0 if rank.ranks == 1 else 1
        graph, plan = schedule(name, rl_step(2, 2, mini_batches=2), cluster(name, rank.ranks, judges), judge_batch=2)
        if scenario == "block-everywhere":
            step = asyncio.create_task(controller.run(graph, plan, Program()))
            await asyncio.to_thread(BLOCKED.wait)
            assert not step.done()
            raise TrainingError("the engines block")
        for _ in range(2):
            result = await controller.run(graph, plan, Program())
            print(json.dumps(result.values["update/1"]), flush=True)  # noqa: T201
        if scenario == "lead":
            raise ZeroDivisionError("the algorithm is wrong")
        if scenario == "refuse-lead":
            raise TrainingError("the weights differ; start again")

    run_rank(rank, lambda: FakeEngine(scenario, rank.number), lead, channel)


def fork_ranks() -> None:
    """For each line read, fork its ranks; print their processes at once and their exit codes when they have ended."""
    for line in sys.stdin:
        order = json.loads(line)
        pids = [fork_rank(order["arguments"], environment) for environment in order["environments"]]
        print(json.dumps(pids), flush=True)  # noqa: T201
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)  # noqa: T201


def fork_rank(arguments: list[Any], environment: dict[str, str]) -> int:
    if pid := os.fork():
        return pid
    os.environ.update(environment)
    for stream in (1, 2):
        os.dup2(os.open(f"{environment['OUTPUT']}.{stream}", os.O_CREAT | os.O_WRONLY), stream)
    code = 1
    try:
        main(*arguments)
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:]:
        main(*sys.argv[1:])
    else:
        fork_ranks()
