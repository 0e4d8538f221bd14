"""A long run stays as it is: over a hundred steps no rank gains memory, open files or threads."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

from algorithms.testing import Ranks, start_ranks
from asyncflow.launch import INTERRUPTED

WARM, STEPS, LOOKS = 10, 100, 5
GROWTH = 4 << 20
"""Bytes that the allocator may move up and down."""


class Held(NamedTuple):
    """What a process holds: resident bytes, descriptors and threads."""

    memory: int
    files: int
    threads: int


def held(pid: int) -> Held:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Held(int(status["VmRSS"].split()[0]) << 10, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]))


def after(ranks: Ranks, metrics: Path, steps: int) -> list[Held]:
    """The least that each rank holds in a few looks once so many steps are over: what moves at a look is no leak."""
    looks: list[list[Held]] = []
    while len(looks) < LOOKS:
        ranks.processes[0].join(0.02)
        assert ranks.processes[0].is_alive(), ranks.output.read_text()
        if metrics.exists() and metrics.read_text().count("\n") >= steps:
            looks.append([held(process.pid or 0) for process in ranks.processes])
    return [Held(*map(min, zip(*of_rank, strict=True))) for of_rank in zip(*looks, strict=True)]


def test_a_hundred_steps_leave_nothing_behind(recipe, tiny_model, run_ranks, tmp_path):
    """With a save every tenth step, and transfers in each: one of the two ranks judges only. Clips are of one chunk."""
    run, model = tmp_path / "run", shutil.copytree(tiny_model, tmp_path / "model")
    settings = json.loads((model / "causal.json").read_text())
    (model / "causal.json").write_text(json.dumps(settings | {"latent_frames": 2, "denoising_steps": [1000.0, 500.0]}))
    sizes = ["--prompts-per-step=1", "--group-size=2", "--mini-batches=1", "--save-every=10", "--schedule=async-reward"]
    options = [*recipe, *sizes, f"--model={model}", "--steps=9999", f"--out={run}"]
    ranks = start_ranks(2, options, tmp_path / "output")
    before = after(ranks, run / "metrics.jsonl", WARM)
    now = after(ranks, run / "metrics.jsonl", WARM + STEPS)
    for process in ranks.processes:
        os.kill(process.pid or 0, signal.SIGINT)
    assert ranks.wait(30) == [INTERRUPTED] * 2
    for first, last in zip(before, now, strict=True):
        assert last.memory <= first.memory + GROWTH, f"{(last.memory - first.memory) / STEPS / 1e3:.0f} kB a step"
        assert (last.files, last.threads) == (first.files, first.threads)
