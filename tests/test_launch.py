"""A run in real processes: it trains, and whatever breaks ends it everywhere, soon, and with one clear error."""

import json
import os
import select
import signal
import subprocess
import sys

import pytest

from asyncflow.launch import INTERRUPTED

THREADS = """
import asyncio, ctypes, re, torch
from asyncflow.core.graph import Kind, Task
from asyncflow.engine import Result, Work
from asyncflow.launch import EngineDevice

openmp = ctypes.CDLL(re.search(r"/.*(gomp|omp5).*", open("/proc/self/maps").read())[0])

class Engine:
    def run(self, work):
        return Result(values={"threads": openmp.omp_get_max_threads()})
    def close(self):
        pass

async def main():
    device = EngineDevice()
    await device.load(Engine)
    for task in (Task("replay/0", Kind.REPLAY), Task("score/0", Kind.SCORE, judge="x", apart=True)):
        print((await device.run(Work((task,), {}, None))).values["threads"])
    await device.close()

torch.set_num_threads(2)
asyncio.run(main())
"""


def test_the_threads_that_compute_use_as_many_others_as_torch_was_told():
    """Be it in a library that torch calls before it shares out work itself; those would wait busily in between."""
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", THREADS], env=environment, timeout=90, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["2", "2"]


@pytest.mark.parametrize("channel", ["shared-memory", "gloo"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_rank_ends_with_the_same_weights(ranks, number: int, channel: str):
    ended = ranks.run(number, "fine", channel)
    assert (ended.codes, ended.errors) == ([0] * number, "")
    steps = [json.loads(line) for line in ended.outputs[0].splitlines()]
    policy = [str(rank) for rank in range(max(1, number - 1))]
    # A rollout gives 1, 1, 1, so a replay 4, 4, 4; there are two in each of the two mini-batches of a step.
    assert steps == [{rank: [value] * 3 for rank in policy} for value in (16.0, 32.0)]


def test_a_task_that_raises_ends_the_run_with_its_name_its_rank_and_a_traceback(ranks):
    ended = ranks.run(3, "raise@replay:1")
    assert ended.codes == [1, 1, 1]
    (sentence,) = ended.sentences
    assert sentence == "error: replay/0.1 on rank 1 failed: ValueError: replay/0.1 went wrong"
    assert ended.errors.count("Traceback") == 1
    assert "break_down" in ended.errors


def test_an_error_raised_on_purpose_speaks_for_itself(ranks):
    ended = ranks.run(2, "refuse@score:1")
    assert ended.codes == [1, 1]
    assert ended.errors.startswith("error: score/quality/0.0.0")
    assert ended.errors.endswith(" on rank 1 failed: score/quality/0.0.0 cannot be used; give another one\n")
    assert len(ended.errors.splitlines()) == 1


@pytest.mark.parametrize("channel", ["shared-memory", "gloo"])
@pytest.mark.parametrize("kind", ["score", "replay", "update"])
def test_a_killed_rank_is_named(ranks, kind: str, channel: str):
    rank = 2 if kind == "score" else 1
    ended = ranks.run(3, f"die@{kind}:{rank}", channel)
    assert ended.codes == [-signal.SIGKILL if r == rank else 1 for r in range(3)]
    assert len(ended.errors.splitlines()) == 1
    assert f"error: rank {rank} (process " in ended.errors
    assert f"was lost in {kind}/" in ended.errors


@pytest.mark.parametrize("kind", ["rollout", "update"])
def test_if_the_controller_is_killed_one_other_rank_says_so(ranks, kind: str):
    ended = ranks.run(3, f"die@{kind}:0")
    assert ended.codes == [-signal.SIGKILL, 1, 1]
    (sentence,) = ended.errors.splitlines()
    assert sentence.startswith("error: rank 0 (process ")
    assert sentence.endswith("), which controls the run, was lost: its process ended or hung up")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_that_cannot_load_is_one_clear_sentence(ranks, rank: int):
    ended = ranks.run(2, f"refuse@load:{rank}")
    assert ended.codes == [1, 1]
    assert ended.errors == f"error: rank {rank} could not start: the engine cannot be used; give another one\n"


def test_a_rank_that_dies_while_it_loads_is_named(ranks):
    ended = ranks.run(2, "die@load:1")
    assert ended.codes == [1, -signal.SIGKILL]
    (sentence,) = ended.errors.splitlines()
    assert sentence.startswith("error: rank 1 (process ")
    assert sentence.endswith("was lost before it was ready: its process ended or hung up")


def test_an_error_of_the_algorithm_ends_all_ranks_with_its_traceback(ranks):
    ended = ranks.run(2, "lead")
    assert ended.codes == [1, 1]
    assert ended.errors.startswith("Traceback")
    assert ended.errors.endswith("ZeroDivisionError: the algorithm is wrong\n")
    assert ended.errors.count("Traceback") == 1


def test_a_training_error_is_one_clear_sentence(ranks):
    ended = ranks.run(2, "refuse-lead")
    assert (ended.codes, ended.errors) == ([1, 1], "error: the weights differ; start again\n")


def test_blocked_engines_do_not_keep_a_failed_run_alive(ranks):
    ended = ranks.run(3, "block-everywhere")
    assert (ended.codes, ended.errors) == ([1, 1, 1], "error: the engines block\n")


def test_a_command_starts_its_own_ranks(launched):
    with launched("fine") as process:
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors, len(output.splitlines())) == (0, "", 2)


def test_the_loss_of_a_rank_is_told_before_the_launcher_ends_the_others(launched):
    with launched("die@score:1") as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert len(errors.splitlines()) == 1
    assert errors.startswith("error: rank 1 (process ")


def test_an_interrupt_ends_what_cannot_be_given_up_after_a_grace(launched):
    with launched("block@rollout:0") as process:
        assert process.stdout
        assert select.select([process.stdout], [], [], 60)[0], "nothing blocks"
        blocked = int(process.stdout.readline().removeprefix("blocked "))
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert errors == "interrupted, although not all that ran has ended within 1 seconds\n"
    with pytest.raises(ProcessLookupError):
        os.kill(blocked, 0)
