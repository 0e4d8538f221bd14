"""A rank with a fake engine, for tests: `python ranks_script.py SCENARIO CHANNEL`, as a launcher would start it.

A scenario is TROUBLE@KIND:RANK, what happens there to a task of that kind, or a word that `main` knows.
Without arguments it forks ranks as it is told on its standard input, which saves them the time of the imports.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from asyncflow.controller import Controller
from asyncflow.core.graph import LOCAL_KINDS, Graph, Kind, Task
from asyncflow.core.plan import Plan
from asyncflow.core.schedules import cluster, schedule
from asyncflow.engine import Cancelled, Engine, Result, Work
from asyncflow.errors import Interrupted, ModelError, TrainingError
from asyncflow.launch import ChannelName, run_rank, this_rank
from asyncflow.liveness import STANDARD, Limits
from asyncflow.testing import rl_step

BLOCKED = threading.Event()
STEP_KINDS = {Kind.ROLLOUT, Kind.DECODE, Kind.SCORE, Kind.REPLAY, Kind.UPDATE}
OTHER_KINDS = [kind for kind in Kind if kind not in STEP_KINDS | LOCAL_KINDS]
LIMITS = {
    "freeze": Limits(beat=0.1, silence=1.5),
    "pause": Limits(beat=0.1, silence=5.0),
    "hang": Limits(beat=0.1, unknown=1.0),
    "dawdle": Limits(beat=0.1, silence=1.5),
    "block": Limits(grace=1.0),
}


class FakeEngine(Engine):
    """Every task makes the tensors that others read, from what it reads; `scenario` says what goes wrong, and where."""

    def __init__(self, scenario: str, rank: int) -> None:
        self.trouble, _, self.victim = scenario.partition("@")
        self.rank = rank
        if self.victim == f"load:{rank}":
            self.break_down("the engine", Work((), {}, None))
        elif self.trouble == "refuse-alone":
            BLOCKED.wait()
        self.weights = torch.zeros(3)

    def run(self, work: Work) -> Result:
        task = work.tasks[0]
        if self.victim == f"{task.kind}:{self.rank}":
            self.break_down(task.id, work)
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

    def break_down(self, what: str, work: Work) -> None:
        match self.trouble:
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "pause":
                self.victim = ""
                with subprocess.Popen(["sh", "-c", f"sleep 0.7; kill -CONT {os.getpid()}"]):
                    os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                while not BLOCKED.wait(0.1):
                    pass
            case "dawdle":
                print(f"blocked {os.getpid()}", flush=True)  # noqa: T201
                while not work.is_unneeded():
                    BLOCKED.wait(0.01)
                raise Cancelled
            case "raise":
                raise ValueError(f"{what} went wrong")
            case "refuse" | "refuse-alone":
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
        others = [Task(f"{kind}/other", kind) for kind in OTHER_KINDS]
        places = {
            task.id: (rank.ranks - 1 if task.kind is Kind.COMPARE else min(1, rank.ranks - 1),) for task in others
        }
        try:
            for _ in range(2):
                result = await controller.run(graph, plan, Program())
                print(json.dumps(result.values["update/1"]), flush=True)  # noqa: T201
            await controller.run(Graph(others), Plan(places, tuple(places)), Program())
        except Interrupted:
            (save,) = [task for task in others if task.kind is Kind.CHECKPOINT]
            await controller.run(Graph([save]), Plan({save.id: (0,)}, (save.id,)), Program())
            print("saved", flush=True)  # noqa: T201
            raise
        if scenario == "lead":
            raise ZeroDivisionError("the algorithm is wrong")
        if scenario == "refuse-lead":
            raise TrainingError("the weights differ; start again")

    limits = LIMITS.get(scenario.partition("@")[0], STANDARD)
    run_rank(rank, lambda: FakeEngine(scenario, rank.number), lead, channel, limits)


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
