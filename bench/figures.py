"""The StageBreaker paper's points that its own proportions determine, simulated by the dispatcher, beside its numbers.

Every number is a share of a step or a ratio of steps. `fitted` marks those that the durations in `bench.paper` were
derived from: that these agree shows only that the schedules are the paper's. Known causes of differences are named.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import click
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from asyncflow.core.graph import Kind
from asyncflow.core.plan import Cluster
from asyncflow.core.schedules import NAMES, Name
from asyncflow.core.trace import Span, Trace, busy_share
from bench.paper import RANKS, Load, load
from bench.table import Row, report

Range = tuple[float, float]

BARS: dict[Name, float] = {
    "colocated": 0.78, "async-reward": 1.0, "async-train": 0.78, "merged-replay": 0.69, "stagebreaker": 1 / 1.81,
}  # fmt: skip
"""Figure 16: steps in thousands of units, from the reductions and speedups in section 5.5."""
BATCHES = (6, 12, 18, 24)
MINI_BATCHES = (1, 2, 3, 4, 6)
REWARD_RANKS = (1, 2, 3)
OVER_COLOCATED: dict[str, Range] = {"batch": (1.19, 1.41), "default": (1.19, 1.32), "mini-batches": (1.11, 1.41)}
OVER_ASYNC_REWARD: dict[str, Range] = {"batch": (1.46, 1.79), "default": (1.62, 1.76)}
"""Sections 5.2 and 5.3: ranges over what a figure varies and over both reward models; over colocated, batches are those
of DanceGRPO, all others of DanceGRPO and KVPO."""
FEWER = "(the fixed costs of judging and switching are known at 24 alone)"
BATCHING = "(our judge ends a batch of 1, 5 and 6 videos before the next)"
LATER = "(judges catch up with updates, which the paper's do not)"
NOT_REPRODUCED = {
    "Figures 3, 9, 11 with UnifiedReward-Flex": "no duration of this judge can be derived",
    "Figures 9-11, 14 with KVPO": "no duration of its tasks (its pairs, its reference policy) can be derived",
    "Figure 10, 21-45 latent frames": "how rollout, replay and judge grow with length is not printed",
    "Figure 12, 360p": "how tasks shrink with resolution is not printed",
    "Figure 14, 5B model": "no duration of its tasks can be derived",
    "Figure 15, training reward": "a training run, not a schedule",
}


class Speedups(NamedTuple):
    """What stagebreaker gains over two others, and what it does that the paper's does not."""

    colocated: float
    async_reward: float
    note: str


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="File to write the table to.")
@click.option("--picture", type=click.Path(path_type=Path), help="PNG file to draw the points to.")
def figures(json_file: Path | None, picture: Path | None) -> None:
    """Figure 16, and speedups by batch size, number of mini-batches and split of the six ranks."""
    bars = {name: load(name).searched() for name in NAMES}
    traces = {name: step.simulated() for name, step in bars.items()}
    rows = [*_bars(traces), *_inside(bars, traces)]
    by_batch = [_speedups(candidates=size) for size in BATCHES]
    for size, speedups in zip(BATCHES, by_batch, strict=True):
        key, figure = ("default", "9") if size == 12 else ("batch", "11")
        papers, note = (OVER_COLOCATED[key], OVER_ASYNC_REWARD[key]), "" if size == 24 else FEWER
        rows += _pair(figure, f"{size} candidates", speedups, papers, f"{note} {speedups.note}".strip())
    by_mini_batches = [_speedups(mini_batches=number) for number in MINI_BATCHES]
    for number, speedups in zip(MINI_BATCHES, by_mini_batches, strict=True):
        what = f"{number} mini-batches of {24 // number}, stagebreaker over colocated"
        rows.append(_row("14", what, speedups.colocated, OVER_COLOCATED["mini-batches"], speedups.note))
    by_split = [_speedups(reward_ranks=judges) for judges in REWARD_RANKS]
    for judges, speedups in zip(REWARD_RANKS, by_split, strict=True):
        what = f"{RANKS - judges} actors + {judges}"
        rows += _pair("16", what, speedups, (1.41, 1.81)) if judges == 2 else _pair("-", what, speedups, (None, None))
    rows += [
        {"figure": "-", "what": what, "ours": "-", "paper": "-", "difference": f"not reproduced: {why}"}
        for what, why in NOT_REPRODUCED.items()
    ]
    report("figures: the StageBreaker paper's points, simulated", rows, json_file)
    if picture:
        _draw(picture, traces, by_batch, by_mini_batches, by_split)


def _bars(traces: dict[Name, Trace]) -> list[Row]:
    return [_row("16", f"{name}, step", traces[name].seconds / 1000, paper) for name, paper in BARS.items()]


def _inside(bars: dict[Name, Load], traces: dict[Name, Trace]) -> list[Row]:
    """What section 5.5 says of the steps behind the bars."""
    ranks = bars["async-reward"].ranks
    waiting, merged, best = traces["async-reward"], traces["merged-replay"], traces["stagebreaker"]
    rolled_out = {name: _end(trace, ranks, Kind.ROLLOUT, Kind.DECODE) for name, trace in traces.items()}
    training = {name: trace.seconds - rolled_out[name] for name, trace in traces.items()}
    scores = [span for span in waiting.spans if span.name == Kind.SCORE]
    hidden = sum(max(0.0, min(span.end, rolled_out["async-reward"]) - span.start) for span in scores)
    wait = max(span.end for span in scores) - rolled_out["async-reward"]
    moved = [task.kind for task in bars["stagebreaker"].graph.of(Kind.DECODE, Kind.REPLAY)
             if bars["stagebreaker"].plan.ranks[task.id][0] in ranks.judges]  # fmt: skip
    idle = 1 - mean(busy_share(waiting, rank) for rank in ranks.ranks)
    cut = 1 - training["merged-replay"] / training["async-train"]
    unused = 1 - _end(merged, ranks, Kind.SCORE) / merged.seconds
    return [
        _row("16b", "scoring hidden behind rollout", hidden / sum(s.end - s.start for s in scores), 0.64, BATCHING),
        _row("16b", "actors' wait for rewards", wait / waiting.seconds, 0.13, BATCHING),
        _row("16b", "reward ranks busy", _busy(waiting, ranks.judges), 0.36, "fitted"),
        _row("16b", "idle, all ranks", idle, 0.30),
        _row("16d", "training that merging cuts", cut, 0.17, "fitted"),
        _row("16c", "step that async-train cuts", 1 - traces["async-train"].seconds / waiting.seconds, 0.22),
        _row("16d", "merged-replay over colocated", traces["colocated"].seconds / merged.seconds, 1.13),
        _row("16d", "reward ranks idle after the last score", unused, 0.37),
        _row("16e", "decodes moved from an actor", moved.count(Kind.DECODE) / len(ranks.actors), 5.0),
        _row("16e", "replays on a reward rank", moved.count(Kind.REPLAY) / len(ranks.judges), None),
        _row("16e", "actors' rollout shorter by", 1 - rolled_out["stagebreaker"] / rolled_out["merged-replay"], 0.27),
        _row("16e", "training shorter by", 1 - training["stagebreaker"] / training["merged-replay"], 0.15),
        _row("16e", "reward ranks busy", _busy(best, ranks.judges), 0.84),
        _row("16e", "step over its lower bound", best.seconds / bars["stagebreaker"].bound(), None),
    ]


def _end(trace: Trace, ranks: Cluster, *kinds: Kind) -> float:
    """When the last task of these kinds ended on the ranks that usually run them."""
    usual = ranks.judges if Kind.SCORE in kinds else ranks.actors

    def counts(span: Span) -> bool:
        return span.name in kinds and span.rank in usual

    return max(span.end for span in trace.spans if counts(span))


def _busy(trace: Trace, ranks: Sequence[int]) -> float:
    return mean(busy_share(trace, rank) for rank in ranks)


def _speedups(**sizes: int) -> Speedups:
    bases: tuple[Name, ...] = ("colocated", "async-reward")
    found = load("stagebreaker", **sizes).searched()
    best = found.simulated().seconds
    colocated, async_reward = (load(name, **sizes).simulated().seconds / best for name in bases)
    return Speedups(colocated, async_reward, LATER if found.graph.catches_up else "")


def _pair(
    figure: str, what: str, speedups: Speedups, papers: Sequence[float | Range | None], note: str = ""
) -> list[Row]:
    bases = ("colocated", "async-reward")
    return [
        _row(figure, f"{what}, stagebreaker over {base}", ours, paper, note)
        for base, ours, paper in zip(bases, speedups[:2], papers, strict=True)
    ]


def _row(figure: str, what: str, ours: float, paper: float | Range | None, note: str = "") -> dict[str, Any]:
    """A line of the table; the difference to a range is that to its nearer end."""
    if paper is None:
        shown, difference = "-", "not in the paper"
    elif isinstance(paper, tuple):
        low, high = paper
        shown = f"{low}-{high}"
        outside = min(ours - low, 0.0) or max(ours - high, 0.0)
        difference, note = (f"{outside:+.3f}", note) if abs(outside) >= 0.005 else ("inside", "")
    else:
        shown, difference = f"{paper:.4g}", f"{ours - paper:+.3f}"
    return {"figure": figure, "what": what, "ours": ours, "paper": shown, "difference": f"{difference} {note}".rstrip()}


def _draw(
    picture: Path,
    traces: dict[Name, Trace],
    by_batch: list[Speedups],
    by_mini_batches: list[Speedups],
    by_split: list[Speedups],
) -> None:
    figure, ((bars, batches), (mini_batches, splits)) = plt.subplots(2, 2, figsize=(9, 6.2), layout="constrained")
    places = range(len(BARS))
    bars.bar([place - 0.2 for place in places], list(BARS.values()), 0.4, label="paper, Figure 16", color="#bab0ac")
    bars.bar([place + 0.2 for place in places], [traces[name].seconds / 1000 for name in BARS], 0.4, label="simulated")
    bars.set_xticks(places, [name.replace("-", "\n") for name in BARS], fontsize=8)
    bars.set_ylabel("step / the paper's async-reward")
    _speedup_axes(batches, "candidates a step", list(map(str, BATCHES)), by_batch)
    _speedup_axes(mini_batches, "mini-batches of 24 candidates", list(map(str, MINI_BATCHES)), by_mini_batches)
    labels = [f"{RANKS - judges} + {judges}" for judges in REWARD_RANKS]
    _speedup_axes(splits, "actors + reward ranks", labels, by_split)
    for axes, colour, base, ends in (
        (batches, "C0", "colocated", OVER_COLOCATED["batch"]),
        (batches, "C1", "async-reward", OVER_ASYNC_REWARD["batch"]),
        (mini_batches, "C0", "colocated", OVER_COLOCATED["mini-batches"]),
    ):
        axes.axhspan(*ends, color=colour, alpha=0.12, linewidth=0, label=f"paper, over {base}")
    splits.plot([1, 1], [1.41, 1.81], "k_", markersize=14, label="paper, Figure 16")
    for axes in (bars, batches, mini_batches, splits):
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=140)
    click.echo(f"wrote {picture}")


def _speedup_axes(axes: Axes, what: str, labels: list[str], speedups: list[Speedups]) -> None:
    places = range(len(labels))
    axes.plot(places, [each.colocated for each in speedups], "o-", color="C0", label="over colocated")
    axes.plot(places, [each.async_reward for each in speedups], "o-", color="C1", label="over async-reward")
    axes.set_xticks(places, labels)
    axes.set_xlabel(what)
    axes.set_ylabel("stagebreaker's speedup")
    axes.set_ylim(bottom=1.0)
