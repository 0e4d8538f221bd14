"""A trace file names every lane, and its arrows lead from sender to receiver."""

import json
from pathlib import Path

from asyncflow.core.dispatch import Move, Run
from asyncflow.core.graph import Graph, Kind, Task
from asyncflow.core.plan import CONTROLLER
from asyncflow.core.trace import Trace
from asyncflow.perfetto import events, write

GRAPH = Graph(
    [
        Task("rollout/0", Kind.ROLLOUT),
        Task("score/0", Kind.SCORE, inputs=("rollout/0.path",)),
        Task("score/1", Kind.SCORE),
        Task("score/2", Kind.SCORE, judge="b", apart=True),
        Task("score/3", Kind.SCORE, judge="a", apart=True),
        Task("reward/0", Kind.REWARD, values=("score/0", "score/1")),
    ]
)


def step() -> Trace:
    trace = Trace(invalid={"score/1": "no answer"})
    trace.ran(Run(1, ("rollout/0",), (1,)), GRAPH, 1, 0.0, 1.5)
    trace.moved(Move(1, "rollout/0.path", 1, 0), 1.5, 2.0)
    trace.ran(Run(2, ("score/0", "score/1"), (0,)), GRAPH, 0, 2.0, 2.25)
    trace.ran(Run(3, ("reward/0",), (CONTROLLER,)), GRAPH, CONTROLLER, 2.25, 2.25)
    trace.ran(Run(4, ("score/2",), (0,)), GRAPH, 0, 0.0, 2.0)
    trace.ran(Run(5, ("score/3",), (1,)), GRAPH, 1, 0.0, 1.0)
    return trace


def of(phase: str, made: list[dict]) -> list[dict]:
    return [event for event in made if event["ph"] == phase]


def test_every_rank_and_lane_has_a_name():
    names = {(e["name"], e["pid"], e["tid"]): e["args"].get("name") for e in of("M", events(step()))}
    assert {key: name for key, name in names.items() if name} == {
        ("process_name", CONTROLLER, 0): "controller",
        ("thread_name", CONTROLLER, 0): "device",
        ("process_name", 0, 0): "rank 0",
        ("thread_name", 0, 0): "device",
        ("thread_name", 0, 1): "transfer",
        ("thread_name", 0, 3): "judge b",
        ("process_name", 1, 0): "rank 1",
        ("thread_name", 1, 0): "device",
        ("thread_name", 1, 1): "transfer",
        ("thread_name", 1, 2): "judge a",
    }


def test_spans_are_complete_events_in_microseconds():
    spans = [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in of("X", events(step()))]
    assert sorted(spans) == [
        ("path", 0, 1, 1.5e6, 0.5e6),
        ("path", 1, 1, 1.5e6, 0.5e6),
        ("reward", CONTROLLER, 0, 2.25e6, 0.0),
        ("rollout", 1, 0, 0.0, 1.5e6),
        ("score", 0, 0, 2.0e6, 0.25e6),
        ("score", 0, 3, 0.0, 2.0e6),
        ("score", 1, 2, 0.0, 1.0e6),
    ]


def test_an_arrow_leads_from_the_sender_to_the_receiver():
    (start,), (end,) = of("s", events(step())), of("f", events(step()))
    assert (start["pid"], start["tid"], start["ts"]) == (1, 1, 1.5e6)
    assert (end["pid"], end["tid"], end["ts"]) == (0, 1, 2.0e6)
    assert (start["id"], start["name"], start["cat"]) == (end["id"], end["name"], end["cat"])


def test_a_sum_has_no_arrow():
    """It stands on the transfer lane of every rank of the gang, and belongs to no pair."""
    trace = step()
    trace.summed(Run(4, ("score/0",), (0, 1), sequence=2), 0, 3.0, 3.5)
    made = events(trace)
    assert ("sum", 0, 1, 3.0e6, 0.5e6) in {(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in of("X", made)}
    assert len(of("s", made)) == len(of("f", made)) == 1


def test_a_batch_names_its_tasks_and_the_reasons_of_the_invalid_ones():
    (batch,) = (e for e in of("X", events(step())) if e["name"] == "score" and not e["tid"])
    assert batch["args"] == {"tasks": ["score/0", "score/1"], "number": 2, "invalid": {"score/1": "no answer"}}


def test_what_was_cancelled_says_so():
    trace = step()
    trace.ran(Run(4, ("score/0",), (0,)), GRAPH, 0, 2.5, 3.0, cancelled=True)
    *_, last = of("X", events(trace))
    assert last["args"] == {"tasks": ["score/0"], "number": 4, "cancelled": True}


def test_the_file_is_json_of_these_events(tmp_path: Path):
    path = tmp_path / "trace" / "step_1.json"
    write(step(), path)
    assert json.loads(path.read_text()) == {"traceEvents": events(step()), "displayTimeUnit": "ms"}
