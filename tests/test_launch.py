"""A run in real processes: it trains, and whatever breaks ends it everywhere, soon, and with one clear error."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from asyncflow.launch import INTERRUPTED

TESTS = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
SOON_S = 30.0


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


def launcher_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


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
        self.runs += 1
        store = launcher_store()
        outputs = [self.folder / f"{self.runs}-{rank}" for rank in range(ranks)]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
        common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        environments = [{**common, "RANK": str(rank), "OUTPUT": str(outputs[rank])} for rank in range(ranks)]
        began = time.monotonic()
        print(json.dumps({"arguments": [scenario, channel], "environments": environments}), file=self.process.stdin)
        pids = self.answer(SOON_S)
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

    def answer(self, seconds: float) -> list[int]:
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise TimeoutError("the ranks did not end")
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(tmp_path_factory.mktemp("ranks"))
    with made.process:
        yield made
        assert made.process.stdin
        made.process.stdin.close()


@pytest.mark.parametrize("channel", ["shared-memory", "gloo"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_rank_ends_with_the_same_weights(ranks: Ranks, number: int, channel: str):
    ended = ranks.run(number, "fine", channel)
    assert (ended.codes, ended.errors) == ([0] * number, "")
    steps = [json.loads(line) for line in ended.outputs[0].splitlines()]
    policy = [str(rank) for rank in range(max(1, number - 1))]
    # A rollout gives 1, 1, 1, so a replay 4, 4, 4; there are two in each of the two mini-batches of a step.
    assert steps == [{rank: [value] * 3 for rank in policy} for value in (16.0, 32.0)]


def test_a_task_that_raises_ends_the_run_with_its_name_its_rank_and_a_traceback(ranks: Ranks):
    ended = ranks.run(3, "raise@replay:1")
    assert ended.codes == [1, 1, 1]
    (sentence,) = ended.sentences
    assert sentence == "error: replay/0.1 on rank 1 failed: ValueError: replay/0.1 went wrong"
    assert ended.errors.count("Traceback") == 1
    assert "break_down" in ended.errors


def test_an_error_raised_on_purpose_speaks_for_itself(ranks: Ranks):
    ended = ranks.run(2, "refuse@score:1")
    assert ended.codes == [1, 1]
    assert ended.errors.startswith("error: score/0.0.0")
    assert ended.errors.endswith(" on rank 1 failed: score/0.0.0 cannot be used; give another one\n")
    assert len(ended.errors.splitlines()) == 1


@pytest.mark.parametrize("channel", ["shared-memory", "gloo"])
@pytest.mark.parametrize("kind", ["score", "replay", "update"])
def test_a_killed_rank_is_named(ranks: Ranks, kind: str, channel: str):
    rank = 2 if kind == "score" else 1
    ended = ranks.run(3, f"die@{kind}:{rank}", channel)
    assert ended.codes == [-signal.SIGKILL if r == rank else 1 for r in range(3)]
    assert len(ended.errors.splitlines()) == 1
    assert f"error: rank {rank} (process " in ended.errors
    assert f"was lost in {kind}/" in ended.errors


@pytest.mark.parametrize("kind", ["rollout", "update"])
def test_if_the_controller_is_killed_one_other_rank_says_so(ranks: Ranks, kind: str):
    ended = ranks.run(3, f"die@{kind}:0")
    assert ended.codes == [-signal.SIGKILL, 1, 1]
    assert ended.errors == "error: rank 0, which controls the run, was lost: its process ended or hung up\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_that_cannot_load_is_one_clear_sentence(ranks: Ranks, rank: int):
    ended = ranks.run(2, f"refuse@load:{rank}")
    assert ended.codes == [1, 1]
    assert ended.errors == f"error: rank {rank} could not start: the engine cannot be used; give another one\n"


def test_a_rank_that_dies_while_it_loads_is_named(ranks: Ranks):
    ended = ranks.run(2, "die@load:1")
    assert ended.codes == [1, -signal.SIGKILL]
    (sentence,) = ended.errors.splitlines()
    assert sentence.startswith("error: rank 1 (process ")
    assert sentence.endswith("ended before it was ready")


def test_an_error_of_the_algorithm_ends_all_ranks_with_its_traceback(ranks: Ranks):
    ended = ranks.run(2, "lead")
    assert ended.codes == [1, 1]
    assert ended.errors.startswith("Traceback")
    assert ended.errors.endswith("ZeroDivisionError: the algorithm is wrong\n")
    assert ended.errors.count("Traceback") == 1


def test_a_training_error_is_one_clear_sentence(ranks: Ranks):
    ended = ranks.run(2, "refuse-lead")
    assert (ended.codes, ended.errors) == ([1, 1], "error: the weights differ; start again\n")


def test_blocked_engines_do_not_keep_a_failed_run_alive(ranks: Ranks):
    ended = ranks.run(3, "block-everywhere")
    assert (ended.codes, ended.errors) == ([1, 1, 1], "error: the engines block\n")


LAUNCH = "import sys; from asyncflow.launch import start_ranks; sys.exit(start_ranks(2, 'ranks_script', sys.argv[1:]))"


def launched(scenario: str) -> subprocess.Popen[str]:
    """A command that starts two ranks of its own, in a group of processes as a shell would put it."""
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, scenario, "shared-memory"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def test_a_command_starts_its_own_ranks():
    with launched("fine") as process:
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors, len(output.splitlines())) == (0, "", 2)


def test_the_loss_of_a_rank_is_told_before_the_launcher_ends_the_others():
    with launched("die@score:1") as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert len(errors.splitlines()) == 1
    assert errors.startswith("error: rank 1 (process ")


def test_an_interrupt_ends_everything_quietly():
    with launched("block@rollout:0") as process:
        assert process.stdout
        assert select.select([process.stdout], [], [], 60)[0], "nothing blocks"
        blocked = int(process.stdout.readline().removeprefix("blocked "))
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (INTERRUPTED, "")
    with pytest.raises(ProcessLookupError):
        os.kill(blocked, 0)
