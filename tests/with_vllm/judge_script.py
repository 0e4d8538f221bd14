"""A process with a judge on vLLM: `python judge_script.py FOLDER start|die`, one step at a time for whoever reads it.

It prints a line when the judge has started. `die` then kills vLLM's engine while it is asked, and starts it again. At
the end of its input it closes the judge.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import click
import torch

from engines.rewards.chat.base import Ask, Died, Message, Reply
from engines.rewards.chat.vllm import Vllm

CPU = torch.device("cpu")
CACHE_BYTES = 64 << 20
AT_ONCE = 8


class Judge:
    """An engine and the loop it lives in."""

    def __init__(self, folder: Path) -> None:
        self.environment = environment()
        self.engine = Vllm(folder, images=4, concurrency=AT_ONCE)
        self.runner = asyncio.Runner()
        self.runner.run(self.engine.start(CPU, CACHE_BYTES))
        self.complete(*[asking(str(n), frame(n)) for n in range(AT_ONCE)])  # which starts threads that stay

    def complete(self, *asks: Ask) -> list[Reply]:
        async def together() -> list[Reply]:
            return await asyncio.gather(*map(self.engine.complete, asks))

        return self.runner.run(together())

    def close(self) -> None:
        with self.runner:
            self.runner.run(self.engine.close())


def frame(value: int, size: tuple[int, int] = (32, 32)) -> torch.Tensor:
    return torch.full((*size, 3), value, dtype=torch.uint8)


def asking(text: str, *frames: torch.Tensor, **more: object) -> Ask:
    return Ask((Message("user", (*frames, text)),), **({"max_tokens": 12} | more))  # type: ignore[arg-type]


def long(text: str) -> Ask:
    """Tokens by the hundred, drawn nearly at random."""
    return asking(text, max_tokens=4000, temperature=2.0)


async def begun(judge: Judge, *asks: Ask) -> list["asyncio.Task[Reply]"]:
    """The asks, as soon as vLLM has all of them."""
    asked = [asyncio.create_task(judge.engine.complete(ask)) for ask in asks]
    while unfinished(judge) < len(asks):
        assert not any(task.done() for task in asked), asked
        await asyncio.sleep(0.01)
    return asked


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def unfinished(judge: Judge) -> int:
    assert judge.engine._llm
    return judge.engine._llm.get_num_unfinished_requests()


def core(judge: Judge) -> int:
    """The process of vLLM's engine."""
    assert judge.engine._llm
    (process,) = judge.engine._llm.engine_core.resources.engine_manager.processes
    return process.pid


def die(judge: Judge) -> None:
    """All who wait are told so; the restart heals it, and leaves the environment as it was."""
    dead = core(judge)

    async def dying() -> list[Reply | BaseException]:
        asked = await begun(judge, long("a"), long("b"), long("c"))
        os.kill(dead, signal.SIGKILL)
        return await asyncio.gather(*asked, return_exceptions=True)

    errors = judge.runner.run(dying())
    assert [type(error) for error in errors] == [Died] * 3, errors
    (error, *_) = errors
    assert isinstance(error, Died)
    judge.runner.run(error.restart())
    assert core(judge) != dead and judge.complete(asking("a"))[0].tokens == 12
    assert environment() == judge.environment


def main() -> None:
    folder, step = sys.argv[1:]
    judge = Judge(Path(folder))
    click.echo("started")
    if step == "die":
        die(judge)
        click.echo("healed")
    sys.stdin.read()
    judge.close()


if __name__ == "__main__":
    main()
