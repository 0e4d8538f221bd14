"""When vLLM's processes end: with the judge, and with a rank that is killed, whatever it was at."""

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "judge_script.py"
SOON_S = 60.0


@contextmanager
def judging(folder: Path, step: str) -> Iterator[subprocess.Popen[bytes]]:
    """The script's process."""
    command = [sys.executable, SCRIPT, folder, step]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        try:
            yield process
        finally:
            process.kill()


def says(process: subprocess.Popen[bytes], word: str) -> bool:
    """Whether a line of its output, among vLLM's, is that word."""
    assert process.stdout
    while select.select([process.stdout], [], [], SOON_S)[0] and (line := process.stdout.readline()):
        if line.decode().strip() == word:
            return True
    return False


def descendants(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for file in files for child in file.read_text().split()]
    return children + [grandchild for child in children for grandchild in descendants(child)]


def test_a_killed_engine_is_replaced_and_both_are_gone_with_the_judge(folder):
    with judging(folder, "die") as process:
        assert says(process, "started") and says(process, "healed")
        process.communicate(timeout=SOON_S)
        assert process.returncode == 0


@pytest.mark.parametrize("moment", ["at its start", "later"])
def test_nothing_of_vllm_survives_a_process_that_is_killed(folder, moment):
    """Neither while vLLM's engine still imports what it needs, nor once it serves."""
    with judging(folder, "start") as process:
        if moment == "later":
            assert says(process, "started")
        while not (born := descendants(process.pid)):
            assert process.poll() is None
        watched = [os.pidfd_open(pid) for pid in born]
        process.kill()
        for descriptor in watched:
            with closing(os.fdopen(descriptor)):
                assert select.select([descriptor], [], [], SOON_S)[0], f"one of {born} lives on"
    assert len(born) >= (3 if moment == "later" else 1)
