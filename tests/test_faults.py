"""Whatever befalls a rank in a task of whatever kind ends the run everywhere, or nowhere, and leaves nothing behind."""

import json
import os
import select
import signal
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from asyncflow.core.graph import JUDGE_KINDS, LOCAL_KINDS, Kind
from asyncflow.launch import INTERRUPTED

KINDS = [kind for kind in Kind if kind not in LOCAL_KINDS]


def victim(kind: Kind) -> int:
    """The rank of three that a fault befalls: the judge, or an actor that does not control the run."""
    return 2 if kind in JUDGE_KINDS else 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_rank_is_named_with_what_it_did(ranks, kind: Kind):
    rank = victim(kind)
    ended = ranks.run(3, f"die@{kind}:{rank}")
    assert ended.codes == [-signal.SIGKILL if r == rank else 1 for r in range(3)]
    (sentence,) = ended.errors.splitlines()
    assert sentence.startswith(f"error: rank {rank} (process ")
    assert f"was lost in {kind}/" in sentence


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_raises_is_named_with_its_task(ranks, kind: Kind):
    rank = victim(kind)
    ended = ranks.run(3, f"raise@{kind}:{rank}")
    assert ended.codes == [1, 1, 1]
    (sentence,) = ended.sentences
    assert sentence.startswith(f"error: {kind}/")
    assert f" on rank {rank} failed: ValueError: {kind}/" in sentence


@pytest.mark.parametrize("rank", [0, "victim"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_stopped_and_goes_on_changes_nothing(ranks, kind: Kind, rank: int | str):
    ended = ranks.run(3, f"pause@{kind}:{victim(kind) if rank else rank}")
    assert (ended.codes, ended.errors) == ([0, 0, 0], "")
    assert [json.loads(line)["0"] for line in ended.outputs[0].splitlines()] == [[16.0] * 3, [32.0] * 3]


@pytest.mark.parametrize(("kind", "rank"), [("rollout", 1), ("score", 2), ("update", 1)])
def test_a_rank_that_stays_stopped_is_lost_and_killed(ranks, kind: str, rank: int):
    ended = ranks.run(3, f"freeze@{kind}:{rank}")
    assert ended.codes == [-signal.SIGKILL if r == rank else 1 for r in range(3)]
    (sentence,) = ended.errors.splitlines()
    assert sentence.startswith(f"error: rank {rank} (process ")
    assert f"was lost in {kind}/" in sentence
    assert sentence.endswith(": it gave no sign of life for 1.5 seconds; its process is stopped or blocked")


def test_if_the_controller_stays_stopped_one_other_rank_says_so_and_it_is_killed(ranks):
    ended = ranks.run(3, "freeze@update:0")
    assert ended.codes == [-signal.SIGKILL, 1, 1]
    (sentence,) = ended.errors.splitlines()
    assert sentence.startswith("error: rank 0 (process ")
    assert ", which controls the run, was lost: it gave no sign of life for 1.5 seconds" in sentence


@pytest.mark.parametrize(
    ("kind", "rank"), [("rollout", 0), ("decode", 1), ("score", 2), ("replay", 1), ("update", 1), ("update", 0)]
)
def test_an_engine_that_hangs_is_named_and_shows_its_stacks(ranks, kind: str, rank: int):
    """Of a gang the rank that hangs, not those that wait for its part of the sum."""
    ended = ranks.run(3, f"hang@{kind}:{rank}")
    assert ended.codes == [1, 1, 1]
    (sentence,) = ended.sentences
    assert sentence.startswith(f"error: {kind}/")
    assert sentence.endswith(f" on rank {rank} failed: its engine gave no sign of progress for 1 seconds")
    assert ended.errors.count("Current thread") == 1
    assert "in break_down" in ended.errors


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_that_cannot_load_ends_the_ranks_that_still_load(ranks, rank: int):
    ended = ranks.run(2, f"refuse-alone@load:{rank}")
    assert ended.codes == [1, 1]
    assert ended.errors == f"error: rank {rank} could not start: the engine cannot be used; give another one\n"


def blocked(process: subprocess.Popen[str]) -> int:
    """The process of the rank whose engine says that it blocks."""
    assert process.stdout
    assert select.select([process.stdout], [], [], 60)[0], "nothing blocks"
    return int(process.stdout.readline().removeprefix("blocked "))


def processes(launcher: subprocess.Popen[str]) -> list[int]:
    """The process of a launcher and those of its ranks."""
    found = Path(f"/proc/{launcher.pid}/task").glob("*/children")
    return [launcher.pid, *(int(pid) for file in found for pid in file.read_text().split())]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_gives_up_the_step_and_lets_the_run_save(launched, number: signal.Signals):
    with launched("dawdle@rollout:0") as process:
        blocked(process)
        os.killpg(process.pid, number)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (128 + number, "saved\n", "")


def test_ranks_that_are_stopped_together_do_not_miss_each_other(launched):
    """As by a host that freezes them, and for longer than one of them may be silent."""
    with launched("dawdle@rollout:0") as process:
        rank, everyone = blocked(process), processes(process)
        assert rank in everyone
        for number, seconds in ((signal.SIGSTOP, 3.0), (signal.SIGCONT, 1.0)):
            for pid in everyone:
                os.kill(pid, number)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(seconds)
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (INTERRUPTED, "saved\n", "")


def test_ranks_die_with_their_launcher(launched):
    with launched("dawdle@rollout:0") as process:
        with closing(os.fdopen(os.pidfd_open(blocked(process)))) as rank:
            process.kill()
            assert select.select([rank], [], [], 10)[0], "a rank outlives its launcher"
        process.communicate(timeout=10)  # the other rank holds the pipe no more either
