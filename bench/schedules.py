"""The schedules side by side on the toy: seconds a step, busy shares, the lower bound, the prediction.

Its judge thinks, and for how many tokens is chosen first, so that scoring takes a third of a colocated step with two
replays. Bound and prediction of a step come from what tasks cost in the steps before it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click

from bench.reasoning import TOKENS
from bench.runs import Metrics, train
from bench.table import report, spread

COLOCATED, ASYNC_REWARD = "colocated, two replays", "async-reward, two replays"
VARIANTS = {
    COLOCATED: ["--schedule", "colocated", "--forward-replays"],
    "colocated, one replay": ["--schedule", "colocated"],
    ASYNC_REWARD: ["--schedule", "async-reward", "--forward-replays"],
    "async-reward, one replay": ["--schedule", "async-reward"],
    "async-train": ["--schedule", "async-train"],
    "merged-replay": ["--schedule", "merged-replay"],
    "stagebreaker": ["--schedule", "stagebreaker"],
}
UNCOUNTED = 2
"""Steps at a run's beginning that do not count: the first warms up, and a plan is searched beside the second."""
SHARE = 1 / 3
PROBES = 32, 160


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="File to write the table to.")
@click.option("--steps", default=6, show_default=True, help=f"Steps of each run; the first {UNCOUNTED} do not count.")
@click.option("--rounds", default=2, show_default=True, help="Times the variants are run in turn.")
@click.option("--ranks", default=2, show_default=True, help="Ranks of each run.")
@click.option("--prompts", default=8, show_default=True, help="Prompts a step, in 2 mini-batches.")
def schedules(json_file: Path | None, steps: int, rounds: int, ranks: int, prompts: int) -> None:
    """Train the toy under each schedule, in turn, so that a machine that slows down slows all of them."""
    common = [
        "--ranks", str(ranks), "--prompts-per-step", str(prompts), "--mini-batches", "2", "--eval-every", "0",
        "--reward", "bench.reasoning:ReasoningJudge",
    ]  # fmt: skip
    tokens = calibrated(common, ranks)
    title = f"schedules: toy, {ranks} ranks, {prompts} prompts of 8 candidates in 2 mini-batches, a judge that thinks"
    runs: dict[str, list[Metrics]] = defaultdict(list)
    for _ in range(rounds):
        for name, options in VARIANTS.items():
            runs[name] += _counted([*common, *options, "--steps", str(steps)], tokens)
        share = median(_share(step, ranks) for step in runs[COLOCATED])
        rows = _rows(runs, ranks)  # after each round, since a round takes minutes
        report(f"{title} {tokens} tokens, {share:.0%} of the first row's step", rows, json_file)


def _rows(runs: Mapping[str, Sequence[Metrics]], ranks: int) -> list[Metrics]:
    seconds = {name: [step["timing_s/step"] for step in counted] for name, counted in runs.items()}
    return [
        {
            "schedule": name,
            **{f"s {key}" if key != "n" else key: value for key, value in spread(seconds[name]).items()},
            "busy": " ".join(f"{median(s[f'rank/{rank}/busy'] for s in counted):.0%}" for rank in range(ranks)),
            "s bound": median(step["timing_s/bound"] for step in counted),
            "measured / simulated": median(step["timing_s/step"] / step["timing_s/simulated"] for step in counted),
            "speedup": median(seconds[COLOCATED]) / median(seconds[name]),
            "over async-reward": median(seconds[ASYNC_REWARD]) / median(seconds[name]),
        }
        for name, counted in runs.items()
    ]


def calibrated(common: Sequence[str], ranks: int) -> int:
    """How many tokens make scoring SHARE of a colocated step: two probes, and the line through them.

    The line is that of scoring over the rest of the same step, which other load on the machine changes little.
    """
    costs: list[float] = []
    for probe in PROBES:
        counted = _counted([*common, *VARIANTS[COLOCATED], "--steps", "4"], probe, uncounted=1)
        share = median(_share(step, ranks) for step in counted)
        click.echo(f"judge: {probe} tokens are {share:.1%} of a step")
        costs.append(share / (1 - share))
    slope = (costs[1] - costs[0]) / (PROBES[1] - PROBES[0])
    tokens = max(1, round(PROBES[1] + (SHARE / (1 - SHARE) - costs[1]) / slope))
    click.echo(f"judge: {tokens} tokens are to be {SHARE:.1%}")
    return tokens


def _share(step: Mapping[str, float], ranks: int) -> float:
    """The part of a step that a rank spends scoring, on average."""
    return step["timing_s/score"] / ranks / step["timing_s/step"]


def _counted(arguments: Sequence[str], tokens: int, uncounted: int = UNCOUNTED) -> list[Metrics]:
    """The steps that count of a run whose judge generates this many tokens."""
    with TemporaryDirectory() as folder:
        return train(Path(folder) / "run", arguments, {TOKENS: str(tokens)})[uncounted:]
