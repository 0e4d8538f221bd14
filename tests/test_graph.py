"""A graph refuses what makes no sense, and knows who reads what."""

import pytest

from asyncflow.core.graph import Graph, Kind, Task, producer
from asyncflow.core.plan import CONTROLLER, Cluster, Plan

TASKS = [
    Task("rollout/0", Kind.ROLLOUT),
    Task("decode/0", Kind.DECODE, inputs=("rollout/0.path",)),
    Task("replay/0", Kind.REPLAY, inputs=("rollout/0.path", "rollout/0.log"), after=("decode/0",)),
    Task("reward/0", Kind.REWARD, values=("replay/0", "decode/0")),
]


def test_predecessors_are_the_makers_of_inputs_the_values_and_what_comes_before():
    assert TASKS[2].predecessors == {"rollout/0", "decode/0"}
    assert TASKS[3].predecessors == {"replay/0", "decode/0"}


def test_a_graph_knows_who_waits_and_who_reads():
    graph = Graph(TASKS)
    assert graph.successors["rollout/0"] == ["decode/0", "replay/0"]
    assert graph.successors["decode/0"] == ["replay/0", "reward/0"]
    assert graph.consumers == {"rollout/0.path": ["decode/0", "replay/0"], "rollout/0.log": ["replay/0"]}
    assert graph.outputs["rollout/0"] == ("rollout/0.log", "rollout/0.path")
    assert graph.outputs["replay/0"] == ()
    assert graph.edges() == 5


def test_a_graph_keeps_the_order_of_declaration():
    graph = Graph(reversed(TASKS))
    assert [task.id for task in graph] == ["reward/0", "replay/0", "decode/0", "rollout/0"]
    assert [task.id for task in graph.of(Kind.ROLLOUT, Kind.REPLAY)] == ["replay/0", "rollout/0"]
    assert len(graph) == 4
    assert graph["decode/0"] is TASKS[1]


def test_the_producer_of_a_tensor_is_all_but_its_part():
    assert producer("score/0.1.frames") == "score/0.1"


@pytest.mark.parametrize(
    ("tasks", "complaint"),
    [
        ([Task("a/0", Kind.ROLLOUT), Task("a/0", Kind.ROLLOUT)], "a/0 is declared twice"),
        ([Task("a/0", Kind.ROLLOUT, after=("b/0",))], "a/0 waits for b/0, which is not in the graph"),
        ([Task("a/0", Kind.ROLLOUT, after=("b/0",)), Task("b/0", Kind.ROLLOUT, after=("a/0",))], "cycle: "),
        ([Task("a/0", Kind.ROLLOUT, after=("a/0",))], "cycle: a/0 -> a/0"),
        ([Task("a/0", Kind.REWARD), Task("b/0", Kind.DECODE, inputs=("a/0.x",))], "no reward makes any"),
    ],
)
def test_a_graph_refuses_what_makes_no_sense(tasks: list[Task], complaint: str):
    with pytest.raises(AssertionError, match=complaint):
        Graph(tasks)


def plan(**ranks: tuple[int, ...]) -> Plan:
    places = {"rollout/0": (0,), "decode/0": (0,), "replay/0": (0,), "reward/0": (CONTROLLER,), "update/0": (0, 1)}
    places |= {f"{kind}/0": at for kind, at in ranks.items()}
    return Plan(places, tuple(places))


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"decode": (2,)}, "decode/0 cannot run on rank 2"),
        ({"update": (0,)}, r"update/0 is a gang task of the ranks \(0, 1\), not of \(0,\)"),
        ({"reward": (0,)}, "reward/0 runs on the controller"),
        ({"score": (2,)}, "the order must name every task once"),
    ],
)
def test_a_plan_is_checked_against_the_cluster(wrong: dict[str, tuple[int, ...]], complaint: str):
    graph = Graph([*TASKS, Task("update/0", Kind.UPDATE, after=("reward/0",))])
    cluster = Cluster(actors=(0, 1), policy=(0, 1), judges=(2,))
    plan().validate(graph, cluster)
    with pytest.raises(AssertionError, match=complaint):
        plan(**wrong).validate(graph, cluster)


def test_a_judge_task_needs_a_judge():
    graph = Graph([Task("score/0", Kind.SCORE)])
    with pytest.raises(AssertionError, match="score/0 cannot run on rank 0"):
        Plan({"score/0": (0,)}, ("score/0",)).validate(graph, Cluster(actors=(0,), policy=(0,), judges=(1,)))
    Plan({"score/0": (1,)}, ("score/0",)).validate(graph, Cluster(actors=(0,), policy=(0,), judges=(1,)))
