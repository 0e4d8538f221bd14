"""What judging takes: pairs in the order of their prefixes and shuffled, and scores in batches and one by one.

Pairs are compared by a tiny model of random weights, whatever it writes, and every video is new to it; scores are those
of the toy's own judge. Where vLLM is installed it is measured beside the engine in the process.
"""

import asyncio
import importlib.util
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations, product
from pathlib import Path
from statistics import median

import click
import torch
import uvloop
from transformers.utils import logging as transformers_logging

from bench.table import Row, report, spread
from engines.rewards.base import Outcome, PointwiseReward
from engines.rewards.chat.base import Ask, ChatEngine, Message, Reply
from engines.rewards.chat.in_process import InProcess
from engines.rewards.chat.vllm import BATCHED_TOKENS, Vllm
from engines.rewards.footprint import vllm_needs
from engines.rewards.judging import Judging
from engines.rewards.protocols.base import Case, ChatProtocol
from engines.rewards.registry import parse_rewards
from engines.rewards.testing import save_tiny_judge
from engines.toy import JUDGE
from engines.toy.videos import all_prompts, render

CPU = torch.device("cpu")
GROUP, FRAMES, SIDE = 8, 8, 112
"""Candidates, frames shown of each, and their height and width, which make 49 tokens."""
TOKENS = 12
"""The length of a reply."""
PAIRS = list(combinations(range(GROUP), 2))
AT_ONCE = 8
"""Conversations, for which there is a KV cache."""
SCORED, BATCHES = 32, (32, 8, 1)
"""Videos, and how many of them are judged together."""


class Timed(ChatProtocol):
    """Asks for a reply about two videos, takes any for a tie, and notes when it came."""

    videos = 2
    images = 2 * FRAMES
    max_tokens = TOKENS

    def __init__(self) -> None:
        self.times: list[float] = []

    def proceed(self, case: Case, replies: Sequence[Reply]) -> Ask | Outcome:
        """See `ChatProtocol`."""
        if replies:
            self.times.append(time.monotonic())
            return 0.5
        return Ask((Message("user", (*(frame for video in case.videos for frame in video), case.prompt)),), TOKENS)


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="File to write the tables to.")
@click.option("--rounds", default=5, show_default=True, help="Times each row is measured, in turn.")
def judge(json_file: Path | None, rounds: int) -> None:
    """Judge pairs and videos with every engine there is."""
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    report(f"judge: the {len(PAIRS)} pairs of a group of {GROUP}", _pairs(rounds), json_file)
    scores = json_file.with_stem(f"{json_file.stem}-scores") if json_file else None
    report(f"judge: {SCORED} videos, scored by the toy's judge", _scores(rounds), scores)


def _engines() -> list[str]:
    return ["transformers", *(["vllm"] if importlib.util.find_spec("vllm") else [])]


def _pairs(rounds: int) -> list[Row]:
    """Rows of the pairs in either order, for each engine; each group's videos are new."""
    samples: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    orders = {"by first video": PAIRS, "shuffled": random.Random(0).sample(PAIRS, len(PAIRS))}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        save_tiny_judge(Path(folder), layers=4, width=256, pixels=SIDE**2)
        engines = {name: stack.enter_context(_served(name, Path(folder))) for name in _engines()}
        for place, (name, order) in product(range(rounds + 1), product(engines, orders)):
            videos = torch.randint(256, (GROUP, FRAMES, SIDE, SIDE, 3), dtype=torch.uint8)
            cases = [Case((videos[first], videos[second]), f"{first} {second}") for first, second in orders[order]]
            protocol = Timed()
            began = time.monotonic()
            engines[name](protocol, cases)
            if place:  # the first round warms up
                samples[name, order]["pairs/s"].append(len(cases) / (time.monotonic() - began))
                samples[name, order]["first verdict s"].append(protocol.times[0] - began)
    return [
        {"engine": name, "order": order, "n": rounds, **_middles(of_row)} for (name, order), of_row in samples.items()
    ]


@contextmanager
def _served(name: str, folder: Path) -> Iterator[Callable[[ChatProtocol, Sequence[Case]], object]]:
    """Call it to have cases judged by the model in `folder`, `AT_ONCE` at a time."""
    protocol, cache = Timed(), 0
    engine: ChatEngine = InProcess(folder)
    if name == "vllm":
        cache = vllm_needs(folder, protocol, AT_ONCE, BATCHED_TOKENS, SIDE, SIDE, CPU).most_cache
        engine = Vllm(folder, images=protocol.images, concurrency=AT_ONCE)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(engine.start(CPU, cache))
        try:
            yield lambda protocol, cases: runner.run(
                Judging(engine, protocol, AT_ONCE, deadline=600).judge(cases, lambda: None)
            )
        finally:
            runner.run(engine.close())


def _scores(rounds: int) -> list[Row]:
    """Rows of the toy's judge on videos that it was made for, in batches of several sizes."""
    prompts = (all_prompts() * SCORED)[:SCORED]
    samples: dict[tuple[str, int], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        judges = {name: stack.enter_context(_toy_judge(name, Path(folder))) for name in _engines()}
        for place, (name, batch) in product(range(rounds + 1), product(judges, BATCHES)):
            videos = list(render(prompts, torch.Generator().manual_seed(place)))
            began = time.monotonic()
            for first in range(0, SCORED, batch):
                judges[name].score(videos[first : first + batch], prompts[first : first + batch])
            if place:
                samples[name, batch].append(SCORED / (time.monotonic() - began))
    return [
        {
            "engine": name,
            "videos at once": batch,
            "n": rounds,
            **_middles({"videos/s": of_row}),
            "speedup": median(of_row) / median(samples[name, 1]),
        }
        for (name, batch), of_row in samples.items()
    ]


@contextmanager
def _toy_judge(name: str, folder: Path) -> Iterator[PointwiseReward]:
    settings = JUDGE.read_text().replace('"transformers"', f'"{name}"')
    for file in ("judge", "judge.txt"):
        settings = settings.replace(f'"{file}"', f'"{JUDGE.parent / file}"')
    (folder / f"{name}.toml").write_text(settings)
    (weighted,) = parse_rewards([str(folder / f"{name}.toml")])
    made = weighted.reward
    assert isinstance(made, PointwiseReward)
    made.cache_bytes = made.needs(32, 32, CPU).most_cache
    made.load(CPU)
    try:
        yield made
    finally:
        made.close()


def _middles(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each, and the 5th and 95th percentile."""
    made: dict[str, float] = {}
    for name, values in samples.items():
        found = spread(values)
        made |= {name: found["median"], f"{name} p5": found["p5"], f"{name} p95": found["p95"]}
    return made
