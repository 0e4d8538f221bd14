"""A step's trace as a Gantt chart, in the terminal or as a picture: a row for each rank's device, and its judges apart.

`asyncflow plan` draws what it predicts, `python -m bench timeline` what a run measured.
"""

from pathlib import Path

import click

from asyncflow.core.graph import DEVICE
from asyncflow.core.trace import Trace
from asyncflow.errors import ConfigError

STYLES = {
    "rollout": ("R", "#4c78a8"), "decode": ("D", "#72b7b2"), "score": ("S", "#f58518"), "compare": ("C", "#f58518"),
    "reference": ("B", "#d4a6c8"), "old-log-prob": ("L", "#d7b5a6"), "forward": ("F", "#bab0ac"),
    "replay": ("P", "#54a24b"), "update": ("U", "#e45756"), "catch-up": ("T", "#ff9da6"),
    "checkpoint": ("K", "#9d755d"), "export": ("E", "#b279a2"),
}  # fmt: skip
"""The letter and the colour of each kind."""


def chart(trace: Trace, width: int) -> str:
    """The chart as lines of `width` characters: letters by kind, in colour where the terminal has it.

    Each stands for what the lane did longest in its share of the step, a capital where a task begins; "·" is idle for
    at least half of it.
    """
    labels = {place: _label(*place) for place in trace.lanes()}
    cells = max(width - max(map(len, labels.values())) - 2, 10)
    lines = []
    for place, label in labels.items():
        shares: list[dict[str, float]] = [{"": 0.5} for _ in range(cells)]
        begun = set()
        for span in trace.on(*place):
            start, end = (at * cells / trace.seconds if trace.seconds else 0.0 for at in (span.start, span.end))
            begun.add((int(start), span.name))
            for cell in range(int(start), min(int(end) + 1, cells)):
                shares[cell][span.name] = shares[cell].get(span.name, 0.0) + min(end, cell + 1) - max(start, cell)
        kinds = [max(share, key=share.__getitem__) for share in shares]
        drawn = (
            _cell(kind, begins=(cell, kind) in begun or kinds[cell - 1 : cell] != [kind])
            for cell, kind in enumerate(kinds)
        )
        lines.append(f"{label:{width - cells}}{''.join(drawn)}")
    end_of_step = f"{trace.seconds:.1f} s"
    lines.append(f"{'':{width - cells}}0 s{end_of_step:>{cells - 3}}")
    lines.append("  ".join(f"{_cell(kind)} {kind}" for kind in _kinds(trace)))
    return "\n".join(lines)


def draw(trace: Trace, picture: Path) -> None:
    """Write the chart as the PNG file `picture`; what was cancelled is hatched.

    Raises ConfigError without matplotlib, or where it cannot write.
    """
    try:  # matplotlib is no need of a run
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ConfigError(f"{picture}: drawing needs matplotlib; pip install 'asyncflow[bench]'") from None
    lanes, kinds = trace.lanes(), _kinds(trace)
    figure = Figure(figsize=(10, 0.6 + 0.5 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for row, place in enumerate(lanes):
        for span in trace.on(*place):
            axes.barh(
                row, span.end - span.start, left=span.start,
                color=STYLES[span.name][1], edgecolor="white", linewidth=0.4, height=0.8,
                hatch="//" if span.cancelled else None,
            )  # fmt: skip
    axes.set_yticks(range(len(lanes)), [_label(*place) for place in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the step began")
    axes.legend(
        handles=[Patch(color=STYLES[kind][1], label=kind) for kind in kinds], ncols=len(kinds), fontsize=8,
        loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False,
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, format="png", dpi=140)
    except OSError as error:
        raise ConfigError(f"cannot write the picture {picture}: {error.strerror}; choose another file") from None


def _label(rank: int, lane: str) -> str:
    return f"rank {rank}" if lane == DEVICE else f"rank {rank}, {lane}"


def _kinds(trace: Trace) -> list[str]:
    """The kinds that ranks ran, in the order in which they first did."""
    lanes = set(trace.lanes())
    first = sorted(trace.spans, key=lambda span: span.number)
    return list(dict.fromkeys(span.name for span in first if (span.rank, span.lane) in lanes))


def _cell(kind: str, *, begins: bool = True) -> str:
    """A letter on its colour; the dot of an idle moment if there is no kind."""
    if not kind:
        return "·"
    letter, colour = STYLES[kind]
    red, green, blue = bytes.fromhex(colour[1:])
    return click.style(letter if begins else letter.lower(), fg="black", bg=(red, green, blue))
