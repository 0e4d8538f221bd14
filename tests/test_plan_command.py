"""`asyncflow plan` tells from costs alone what each schedule takes, what none can beat, and shows the best."""

import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
import pytest

from algorithms.cli import asyncflow
from algorithms.config import RunConfig
from algorithms.plan import read_costs
from algorithms.resume import Progress
from algorithms.step import step_graph
from asyncflow import checkpoint, gantt, launch
from asyncflow.core.cost import CostTable
from asyncflow.core.graph import DEVICE, LOCAL_KINDS, Kind
from asyncflow.core.schedules import NAMES, cluster, schedule
from asyncflow.core.simulate import simulate
from asyncflow.core.trace import TRANSFER, Span, Trace
from asyncflow.errors import ConfigError
from asyncflow.options import run
from engines.rewards.registry import parse_rewards

JUDGE = {"batch": 100, "each": 9}
FIGURE_16 = {"rollout": 29, "decode": 12.5, "forward": 15, "replay": 73.3, "score": JUDGE, "update": 0}
SIX_RANKS = (
    "--ranks 6 --reward-ranks 2 --prompts-per-step 2 --group-size 12 --mini-batches 2 --task-batch 1 --judge-batch 12 "
    "--reward colour --forward-replays"
).split()
THREE_RANKS = "--ranks 3 --prompts-per-step 2 --group-size 2 --task-batch 1 --reward colour".split()

Planned = Callable[..., str]


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Planned:
    """Run the command in a folder with the costs of Figure 16, in a terminal of 80 columns; returns what it says."""
    (tmp_path / "costs.json").write_text(json.dumps(FIGURE_16))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def planned(*options: str, code: int = 0) -> str:
        assert run(asyncflow, ["plan", *options]) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    return planned


def rows(out: str) -> dict[str, list[str]]:
    """The table's rows by schedule, as words."""
    return {name: line.split()[1:] for name in NAMES for line in out.splitlines() if line.startswith(f"{name} ")}


def test_the_paper_s_figure_16(planned: Planned) -> None:
    """Seconds and bounds of all five, and the busy shares and the placement of the best."""
    out = planned("--costs", "costs.json", *SIX_RANKS)
    table = rows(out)
    assert [table[name][0] for name in NAMES] == ["655.20", "979.30", "778.80", "688.80", "553.00"]
    assert [table[name][1] for name in NAMES] == ["655.20", "887.80", "778.80", "688.80", "538.20"]
    assert table["stagebreaker"][2:] == ["1.03", "100%", "100%", "100%", "100%", "87%", "87%;", "ranks"]
    found = "reward ranks take 20 of 24 decodes, 4 of 24 replays, and judge full batches of 12"
    assert f"fastest: stagebreaker: {found}\n" in out
    chart = out[out.index("rank 0") :].splitlines()
    assert all(len(line) == 80 for line in chart[:7])
    assert [line[:9] for line in chart[:6]] == [f"rank {n}  {'RRRR··'[n]}" for n in range(6)]
    assert chart[6].split() == ["0", "s", "553.0", "s"]
    assert chart[7] == "R rollout  D decode  P replay  S score  U update"


def test_a_divergence_needs_references(planned: Planned, tmp_path: Path) -> None:
    """Which wait for the scores under the baselines, and which the search may give to reward ranks."""
    (tmp_path / "more.json").write_text(json.dumps({**FIGURE_16, "score": 5, "reference": 20}))
    without, out = (planned("--costs", "more.json", *THREE_RANKS, *kl) for kl in ((), ("--kl", "0.1")))
    more = {name: float(rows(out)[name][0]) - float(rows(without)[name][0]) for name in NAMES}
    assert (more["colocated"], more["async-reward"], more["merged-replay"]) == pytest.approx((2 * 20, 2 * 20, 2 * 20))
    assert more["stagebreaker"] < 2 * 20
    assert re.search(r"stagebreaker: .*, [1-4] of 4 references, and judge ", out)


def test_judges_may_catch_up_with_updates(planned: Planned) -> None:
    """Two actors replay while the judge scores the second batch of two, and the first update waits for the first."""
    out = planned("--costs", "costs.json", *THREE_RANKS, "--mini-batches", "2", "--judge-batch", "2")
    assert "fastest: stagebreaker: reward ranks take 0 of 4 decodes, 0 of 4 replays, catch up with updates, and " in out
    assert rows(out)["stagebreaker"][0] == f"{29 + 12.5 + 2 * (100 + 2 * 9):.2f}"


def test_more_ranks_than_this_machine_has(planned: Planned) -> None:
    """Eight candidates on 6 + 2: each judge takes three of the first six videos, and then the one that came later."""
    out = planned("--costs", "costs.json", *THREE_RANKS, "--group-size", "4", "--ranks", "8", "--reward-ranks", "2")
    assert rows(out)["merged-replay"][0] == f"{29 + 12.5 + (100 + 3 * 9) + (100 + 9):.2f}"
    assert len(re.findall(r"^rank \d", out, re.MULTILINE)) == 8


def test_the_costs_of_a_run(planned: Planned, tmp_path: Path) -> None:
    """A run directory stands for the costs in its newest checkpoint; what it never measured is said in the row."""
    dataflow = step_graph(2, 2, mini_batches=1, task_batch=1, rewards=parse_rewards(["colour"]))
    graph, plan = schedule("merged-replay", dataflow, cluster("merged-replay", 3, 1), judge_batch=8)
    progress = Progress(step=3)
    progress.costs.observe(simulate(graph, plan, read_costs(tmp_path / "costs.json")), graph)
    for step, costs in ((2, CostTable()), (3, progress.costs)):
        meta = {"progress": msgspec.to_builtins(Progress(step=step, costs=costs)), "config": ""}
        checkpoint.save(tmp_path / "before" / "checkpoints", step, {}, meta)
    out = planned("--costs", "before", *THREE_RANKS)
    assert rows(out)["merged-replay"] == rows(planned("--costs", "costs.json", *THREE_RANKS))["merged-replay"]
    assert rows(out)["async-train"] == "no cost was measured for forward 'b1'".split()
    measured = [line.split() for line in out.splitlines() if line.startswith(("measured", "replay", "score"))]
    assert measured[0] == "measured shape batch median s 5th % 95th % number".split()
    assert measured[1] == "replay b1 1 73.3 73.3 73.3 4".split()
    assert measured[-1] == "score/colour: a batch takes 100 s and 9 s for each video or pair in it".split()
    assert len(rows(out)) == len(NAMES)


def test_without_costs_a_few_steps_measure_them(
    planned: Planned,
    recipe: list[str],
    run_ranks: Callable[..., tuple[list[int | None], str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every kind of task that any schedule has, on real ranks, of whose run nothing is left."""

    def start_ranks(ranks: int, module: str, arguments: list[str]) -> int:
        codes, said = run_ranks(ranks, arguments, tmp_path / "said")
        assert codes == [0] * ranks, said
        return 0

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(launch, "start_ranks", start_ranks)
    out = planned(*recipe, "--profile-steps=2")
    assert out.startswith("profiling 2 steps on 2 ranks; of this run nothing is kept but its costs\n")
    measured = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith(tuple(Kind))}
    assert {kind.partition("/")[0].partition(".")[0] for kind in measured} == {
        "rollout", "decode", "score", "compare", "forward", "replay", "update"
    }  # fmt: skip
    assert measured["forward"][:2] == ["b2", "1"]
    assert measured["update"][-1] == "4", "two mini-batches in each step"
    assert len(rows(out)) == len(NAMES)
    assert all(float(row[0]) >= float(row[1]) > 0 for row in rows(out).values())
    fastest = min(rows(out).items(), key=lambda row: float(row[1][0]))[0]
    assert f"fastest: {fastest}" in out
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("code", "exit_code", "sentence"), [
    (1, 1, "Error: the steps to profile failed for the reason above; mend it, or give --costs\n"),
    (launch.INTERRUPTED, 130, "Error: interrupted\n"),
])  # fmt: skip
def test_a_profile_that_fails(
    planned: Planned, recipe: list[str], monkeypatch: pytest.MonkeyPatch, code: int, exit_code: int, sentence: str
) -> None:
    monkeypatch.setattr(launch, "start_ranks", lambda *_: code)
    assert planned(*recipe, code=exit_code) == sentence


def test_a_profile_that_cannot_be(planned: Planned, recipe: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before a rank starts, with the words of a run."""
    monkeypatch.setattr(launch, "start_ranks", lambda *_: pytest.fail("ranks were started"))
    sentence = planned(*recipe, "--reward-ranks", "2", code=2)
    assert sentence.startswith("Error: --reward-ranks: the async-train schedule needs at least 1 reward rank")


def test_the_picture(planned: Planned, tmp_path: Path) -> None:
    out = planned("--costs", "costs.json", *THREE_RANKS, "--picture", "new/step.png")
    assert out.endswith("wrote new/step.png\n")
    assert (tmp_path / "new" / "step.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    sentence = planned("--costs", "costs.json", *THREE_RANKS, "--picture", "step.png", code=2)
    assert sentence == "Error: step.png: drawing needs matplotlib; pip install 'asyncflow[bench]'\n"


@pytest.mark.parametrize(("options", "sentence"), [
    ("--costs none.json", "--costs: cannot read none.json: No such file or directory"),
    ("--costs .", "--costs: checkpoints: holds no checkpoint"),
    ("--costs costs.json --ranks 1", "--ranks: expected at least 2, one to act and one to judge, got 1"),
    ("--costs costs.json --reward-ranks 0", "--reward-ranks: the async-reward schedule needs at least 1 reward rank"),
    ("--costs costs.json --reward-ranks 2", "--reward-ranks: the async-reward schedule needs at least 1 reward rank"),
    ("--costs costs.json --reward colr", '--reward: unknown reward "colr"; did you mean "colour"?'),
    ("--costs costs.json --reward colour-duel", "--costs: costs.json: no cost is stated for compare, which every"),
    ("--costs costs.json --picture costs.json/x.png", "cannot write the picture costs.json/x.png: File exists"),
])  # fmt: skip
def test_a_wrong_option(planned: Planned, options: str, sentence: str) -> None:
    said = planned(*options.split(), code=2)
    assert said.startswith(f"Error: {sentence}")
    assert said.count("\n") == 1


@pytest.mark.parametrize(("text", "sentence"), [
    ("{", "is no JSON object of seconds by kind, as --help shows: Input data was truncated"),
    ("[1]", "is no JSON object of seconds by kind, as --help shows: Expected `object`, got `array`"),
    ('{"rollout": -1}', "Expected `float` >= 0.0"),
    ('{"score": {"batch": 1}}', "missing required field `each`"),
    ('{"score": {"batch": 1, "each": 1, "alpha": 1}}', "unknown field `alpha`"),
    ('{"roll-out": 1}', 'unknown kind "roll-out"; did you mean "rollout"?'),
    ('{"advantage": 1}', 'unknown kind "advantage"; known are '),
    ('{"decode/colour": 1}', 'unknown kind "decode/colour"; did you mean "decode"?'),
    ('{"transfer": {"batch": 1, "each": 1}}', "transfer is one number of seconds; only judges take batches"),
])  # fmt: skip
def test_a_wrong_cost_file(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(sentence)) as caught:
        read_costs(tmp_path / "costs.json")
    assert str(caught.value).startswith(f"--costs: {tmp_path / 'costs.json'}")


def test_help_shows_a_cost_file_that_can_be_used(planned: Planned, tmp_path: Path) -> None:
    """And every option of a run, so that its config.toml and its command line serve for its plan."""
    out = planned("--help")
    shown = re.search(r"\{\"rollout\".*\}", " ".join(out.split()))
    assert shown
    assert json.loads(shown[0]) == FIGURE_16
    assert all(f"--{name.replace('_', '-')}" in out for name in RunConfig.__struct_fields__)


def test_a_chart_shows_what_a_rank_did_longest() -> None:
    """Capitals where tasks begin, dots where it idled for half of a cell, nothing of transfers and the controller."""
    spans = [
        Span(0, DEVICE, "rollout", ("rollout/0",), 0.0, 3.2, 1),
        Span(0, DEVICE, "decode", ("decode/0",), 4.6, 7.0, 2),
        Span(1, DEVICE, "score", ("score/0",), 6.0, 8.0, 3),
        Span(1, DEVICE, "score", ("score/1",), 8.0, 10.0, 4),
        Span(-1, DEVICE, "reward", ("reward/0",), 6.0, 8.0, 5),
        Span(1, TRANSFER, "frames", ("decode/0",), 1.0, 5.0, 1),
    ]
    lines = click.unstyle(gantt.chart(Trace(spans, 10.0), 18)).splitlines()
    assert lines[:2] == ["rank 0  Rrr··Dd···", "rank 1  ······SsSs"]
    assert lines[2] == "        0 s 10.0 s"
    assert lines[3] == "R rollout  D decode  S score"


def test_a_judge_that_is_apart_has_a_row_of_its_own() -> None:
    spans = [
        Span(0, "judge vr", "compare", ("compare/0",), 2.0, 8.0, 2),
        Span(0, DEVICE, "rollout", ("rollout/0",), 0.0, 4.0, 1),
    ]
    lines = click.unstyle(gantt.chart(Trace(spans, 10.0), 28)).splitlines()
    assert lines[:2] == ["rank 0            Rrrr······", "rank 0, judge vr  ··Cccccc··"]
    assert lines[3] == "R rollout  C compare"


def test_every_kind_that_a_rank_runs_has_a_letter_of_its_own() -> None:
    """But for the two ways to judge, which look alike."""
    assert {*gantt.STYLES} == {*Kind} - LOCAL_KINDS
    assert len({letter for letter, _ in gantt.STYLES.values()}) == len(gantt.STYLES)
    assert len({colour for _, colour in gantt.STYLES.values()}) == len(gantt.STYLES) - 1


def test_a_step_that_takes_no_time_has_a_chart() -> None:
    trace = Trace([Span(0, DEVICE, "rollout", ("rollout/0",), 0.0, 0.0, 1)])
    assert click.unstyle(gantt.chart(trace, 18)).startswith("rank 0  ··········\n")
