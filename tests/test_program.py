"""What the controller orders during a step: pure in the step, keyed by who is sampled, and exact in its scalars."""

import math
from typing import Any

import msgspec
import pytest
import torch

from algorithms.dancegrpo import DanceGRPO, DanceGRPOConfig
from algorithms.program import Sample, SamplingProgram, StepProgram, samples_of
from algorithms.prompts import Prompt
from algorithms.step import evaluation_graph
from algorithms.train import dataflow
from asyncflow.core.graph import Kind
from asyncflow.core.schedules import cluster, schedule
from asyncflow.engine import Invalid
from asyncflow.errors import TrainingError
from engines.gradients import distinct
from engines.orders import ExportOrder, ForwardOrder, JudgeOrder, Replayed, ReplayOrder, RolloutOrder, UpdateOrder
from engines.rewards.registry import WeightedReward
from engines.rewards.testing import BaseDuel, Brightness, BrightnessDuel

REWARDS = [WeightedReward(Brightness(), 1.0)]
STEPS = 2


def step(
    *, groups=2, group_size=4, rewards=REWARDS, mini_batches=1, forward_replays=False, trained=None, **config: object
) -> StepProgram:
    """A program of `groups` groups in micro-batches of two."""
    settings = DanceGRPOConfig(
        model="m",
        prompts="p.txt",
        group_size=group_size,
        prompts_per_step=groups,
        mini_batches=mini_batches,
        task_batch=2,
        **config,
    )
    algorithm = DanceGRPO(settings, tuple(reward.weight for reward in rewards))
    graph = dataflow(settings, algorithm, rewards)
    graph, _ = schedule("colocated", graph, cluster("colocated", 1, 0), forward_replays=forward_replays)
    samples = [[Sample(f"prompt {g}", g, 10 * g + c) for c in range(group_size)] for g in range(groups)]
    everything = torch.ones(group_size, STEPS, dtype=torch.bool)
    return StepProgram(graph, samples, algorithm, rewards, trained or [everything] * groups)


def judge(program: StepProgram, scores: dict[int, list[object]]) -> list[str]:
    """Give the groups their scores; returns the tasks that are then not needed."""
    unneeded: list[str] = []
    graph = program.graph
    for group, outcomes in scores.items():
        values = {f"score/brightness/{group}/{place}": outcome for place, outcome in enumerate(outcomes)}
        assert program.local(graph[f"reward/{group}"], values) == (None, ())
    for group in scores:
        unneeded += program.local(graph[f"advantage/{group}"], {})[1]
    return unneeded


def units(program: StepProgram, groups: list[int], *, new: float = 0.0) -> dict[str, Any]:
    """The values of rollouts (0) and replays (`new`) of groups of two micro-batches."""
    places = [f"{group}/{first}" for group in groups for first in (0, 2)]
    values: dict[str, Any] = {f"rollout/{place}": [[0.0] * STEPS] * 2 for place in places}
    return values | {f"replay/{place}": replay(program, place, [[new] * STEPS] * 2) for place in places}


def replay(program: StepProgram, place: str, rows: list[list[float]]) -> dict[str, Any]:
    """The value of a replay, as it comes over the wire, that found these units and whose rollout recorded 0."""
    order = program.payload((program.graph[f"replay/{place}"],), {f"rollout/{place}": [[0.0] * STEPS] * 2})
    new = torch.tensor(rows, dtype=torch.float64)[:, :, None]
    old = new[:, :, 0] if order.old_units is None else torch.tensor(order.old_units, dtype=torch.float64)
    weights = distinct(program._algorithm.weights(new, old, torch.tensor(order.trained)))
    return msgspec.to_builtins(Replayed(new.tolist(), weights.tolist(), [True] * len(rows)))


def order(program: StepProgram, update: str, values: dict[str, object]) -> UpdateOrder:
    return program.payload((program.graph[update],), values)


def by_unit(program: StepProgram, update: str, values: dict[str, Any]) -> dict[str, list[list[float]]]:
    """The coefficients of the units themselves, from those of the sums that the ranks keep."""
    return {
        name: torch.einsum(
            "nw,nwk->nk", torch.tensor(rows).double(), torch.tensor(values[name]["weights"]).double().squeeze(3)
        ).tolist()
        for name, rows in order(program, update, values).coefficients.items()
    }


def test_orders_name_prompts_and_seeds_of_a_micro_batch():
    program = step()
    rollout = program.payload((program.graph["rollout/1/2"],), {})
    assert rollout == RolloutOrder(("prompt 1", "prompt 1"), ((1, 12), (1, 13)))
    old = [[0.5, 0.6], [0.7, 0.8]]
    assert program.payload((program.graph["replay/1/2"],), {"rollout/1/2": old}) == ReplayOrder(
        ("prompt 1", "prompt 1"), (0, 1), old, [[True, True]] * 2
    )
    assert program.payload((program.graph["decode/1/2"],), {}) is None


def test_a_judge_batch_may_mix_groups_and_places():
    """One order for several tasks: each with its prompt and where its video lies in its micro-batch."""
    program = step()
    tasks = tuple(program.graph[f"score/brightness/{place}"] for place in ("0/1", "1/2"))
    assert program.payload(tasks, {}) == JudgeOrder(("prompt 0", "prompt 1"), ((1,), (0,)))


def test_a_comparison_says_where_both_videos_lie():
    program = step(rewards=[WeightedReward(BrightnessDuel(), 1.0)])
    tasks = tuple(program.graph[f"compare/brightness-duel/0/{pair}"] for pair in ("0-3", "2-3"))
    assert program.payload(tasks, {}) == JudgeOrder(("prompt 0", "prompt 0"), ((0, 1), (0, 1)))


def test_only_the_first_videos_of_an_evaluation_are_written():
    graph = evaluation_graph(4, 3, task_batch=2, rewards=REWARDS)
    samples = [Sample("p", 0, c, f"{c}.mp4" if c < 3 else "") for c in range(4)]
    program = SamplingProgram(graph, [samples])
    assert program.payload((graph["export/0/0"],), {}) == ExportOrder(("0.mp4", "1.mp4"))
    assert program.payload((graph["export/0/2"],), {}) == ExportOrder(("2.mp4", ""))


def test_only_the_steps_that_someone_trains_are_replayed():
    """A micro-batch replays the union of its candidates' trained steps; its coefficients have that width."""
    some = torch.tensor([[True, False], [True, False], [True, False], [False, True]])
    program = step(trained=[some, some])
    rolled = units(program, [0, 1])
    assert program.payload((program.graph["replay/0/0"],), rolled).steps == (0,)
    both = program.payload((program.graph["replay/0/2"],), rolled)
    assert (both.steps, both.trained) == ((0, 1), [[True, False], [False, True]])
    judge(program, {0: [1.0, 2.0, 3.0, 4.0], 1: [1.0, 2.0, 3.0, 4.0]})
    values = units(program, [0, 1])
    values |= {f"replay/{group}/0": replay(program, f"{group}/0", [[0.0], [0.0]]) for group in (0, 1)}
    made = by_unit(program, "update/0", values)
    assert [len(row) for row in made["replay/0/0"]] == [1, 1]
    assert made["replay/0/2"][0][1] == 0.0
    assert made["replay/0/2"][1][0] == 0.0
    assert made["replay/0/2"][1][1] < 0  # the best candidate's probability is to rise


def test_coefficients_are_the_loss_over_the_whole_mini_batch():
    """At ratio 1: -A / (candidates x steps), A of the candidate's own group."""
    program = step()
    judge(program, {0: [0.0, 0.0, 1.0, 1.0], 1: [5.0, 6.0, 6.0, 5.0]})
    made = by_unit(program, "update/0", units(program, [0, 1]))
    size = 0.5 / math.sqrt(1 / 3) / (8 * STEPS)
    expected = {"0/0": (1, 1), "0/2": (-1, -1), "1/0": (1, -1), "1/2": (-1, 1)}
    assert set(made) == {f"replay/{place}" for place in expected}
    for place, signs in expected.items():
        for row, sign in zip(made[f"replay/{place}"], signs, strict=True):
            assert row == pytest.approx([sign * size] * STEPS)
    assert program.report.start_deviation == 0.0


def test_one_sum_a_candidate_while_nothing_is_clipped_and_two_afterwards():
    """Coefficients have an entry for each sum that a rank keeps; of a clipped candidate the side of its sign counts."""
    program = step(groups=1)
    judge(program, {0: [0.0, 0.0, 1.0, 1.0]})
    values = units(program, [0])
    assert {len(row) for rows in order(program, "update/0", values).coefficients.values() for row in rows} == {1}
    values["replay/0/0"] = replay(program, "0/0", [[0.5, 0.0], [-0.5, 0.0]])
    made = order(program, "update/0", values).coefficients
    assert {len(row) for row in made["replay/0/0"]} == {2}
    assert {len(row) for row in made["replay/0/2"]} == {1}
    losing = by_unit(program, "update/0", values)["replay/0/0"]
    assert losing[0][0] > 0, "a loser that became likelier is pushed back"
    assert losing[1][0] == pytest.approx(0, abs=1e-15), "one that became unlikelier is clipped"


def test_a_mini_batch_is_a_loss_of_its_own():
    """The second update's denominators count its own groups, and only the first measures the starting ratio."""
    program = step(mini_batches=2)
    judge(program, {0: [0.0, 0.0, 1.0, 1.0], 1: [5.0, 6.0, 6.0, 5.0]})
    first = order(program, "update/0", units(program, [0], new=0.1)).coefficients
    second = order(program, "update/1", units(program, [1], new=7.0)).coefficients
    assert set(first) == {"replay/0/0", "replay/0/2"}
    assert set(second) == {"replay/1/0", "replay/1/2"}
    assert program.report.start_deviation == pytest.approx(math.exp(0.1) - 1)
    assert len(program.report.losses) == 2


def test_forward_replays_give_the_new_units():
    """With them an update's ratio comes from the forward-only replay, as in the systems that have one."""
    program = step(groups=1, forward_replays=True)
    judge(program, {0: [0.0, 0.0, 1.0, 1.0]})
    values = units(program, [0])
    values |= {f"forward/0/{first}": values[f"replay/0/{first}"]["units"] for first in (0, 2)}
    order(program, "update/0", values)
    assert program.report.losses[0].metrics["actor/ratio_mean"] == 1.0
    values |= {f"forward/0/{first}": [[[3.0], [0.1]]] * 2 for first in (0, 2)}
    with pytest.raises(TrainingError, match="do not fit the loss"):  # the replay's ratios are others
        order(program, "update/0", values)


def test_recomputed_old_units_replace_the_recorded_ones():
    """The first mini-batch's replays find theirs; the second's ratios start from passes before the first update."""
    program = step(mini_batches=2, old_log_probs="recomputed")
    graph = program.graph
    assert program.payload((graph["replay/0/0"],), {}).old_units is None
    assert program.payload((graph["old-log-prob/1/2"],), {}) == ForwardOrder(("prompt 1", "prompt 1"), (0, 1))
    old = {"old-log-prob/1/2": [[[0.5], [0.6]], [[0.7], [0.8]]]}
    assert program.payload((graph["replay/1/2"],), old).old_units == [[0.5, 0.6], [0.7, 0.8]]
    judge(program, {0: [0.0, 0.0, 1.0, 1.0], 1: [5.0, 6.0, 6.0, 5.0]})
    values = {name: value for name, value in units(program, [0], new=0.1).items() if name.startswith("replay")}
    order(program, "update/0", values)
    assert program.report.losses[0].metrics["actor/ratio_mean"] == 1.0


def test_replays_that_nobody_needs_are_named():
    """After best-of-n the micro-batches of the middle, and the forward-only replays that go with them."""
    program = step(groups=2, group_size=6, best_of_n=2, forward_replays=True)
    scores = [0.0, 0.1, 0.5, 0.5, 0.9, 1.0]
    assert judge(program, {0: scores, 1: [1.0, 0.0, 0.2, 0.3, 0.4, 0.5]}) == [
        "forward/0/2",
        "replay/0/2",
        "forward/1/2",
        "replay/1/2",
        "forward/1/4",
        "replay/1/4",
    ]


def test_coefficients_leave_out_who_is_not_kept():
    """A skipped replay is in no denominator, and a candidate that is not kept has exact zeros."""
    program = step(groups=1, best_of_n=2)
    assert judge(program, {0: [1.0, 0.0, 0.6, 0.5]}) == ["replay/0/2"]
    values = units(program, [0])
    del values["replay/0/2"]
    made = by_unit(program, "update/0", values)
    assert set(made) == {"replay/0/0"}
    deviation = torch.tensor([1.0, 0.0, 0.6, 0.5]).double().std().item()
    assert made["replay/0/0"][0] == pytest.approx([-(1 - 0.525) / deviation / (2 * STEPS)] * STEPS)
    other = step(groups=1, best_of_n=2)
    judge(other, {0: [1.0, 0.6, 0.0, 0.5]})
    made = by_unit(other, "update/0", units(other, [0]))
    assert made["replay/0/0"][1] == made["replay/0/2"][1] == [0.0] * STEPS


def test_an_invalid_reward_is_reported_and_masked():
    """Its reason names reward, candidate and prompt; NaN in the report, zero in the coefficients."""
    program = step(groups=1)
    assert judge(program, {0: [1.0, Invalid("no object"), 0.0, 0.5]}) == []
    assert program.report.invalid == ["brightness of candidate 1 of prompt 'prompt 0': no object"]
    assert program.report.rewards[0].isnan().flatten().tolist() == [False, True, False, False]
    made = by_unit(program, "update/0", units(program, [0]))
    assert made["replay/0/0"][1] == [0.0] * STEPS
    assert all(math.isfinite(c) for rows in made.values() for row in rows for c in row)


def of_candidates(order: UpdateOrder) -> list[float]:
    """The coefficients of each candidate's sums together, which here all have the same weights."""
    return [sum(row) for _, rows in sorted(order.coefficients.items()) for row in rows]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["replay", "rollout", "gradient"])
def test_who_is_not_finite_is_named_and_left_out(where: str, value: float):
    """As if it were not kept: the others' coefficients are those of a mini-batch without it."""
    scores = [1.0, 0.5, 0.0, 0.7]
    program, without = step(groups=1), step(groups=1)
    for each in (program, without):
        judge(each, {0: scores})
    values = units(program, [0])
    match where:
        case "replay":
            values["replay/0/0"] = replay(program, "0/0", [[0.0, 0.0], [0.0, value]])
        case "rollout":
            values["rollout/0/0"] = [[0.0, 0.0], [value, 0.0]]
        case "gradient":
            values["replay/0/0"]["finite"] = [True, False]
    without.report.advantages[0].kept[1] = False
    expected, made = order(without, "update/0", units(without, [0])), order(program, "update/0", values)
    assert of_candidates(made) == pytest.approx(of_candidates(expected))
    assert [any(row) for row in made.coefficients["replay/0/0"]] == [True, False]
    what = "gradient" if where == "gradient" else "log-probability"
    sentence = f"replay/0/0: the {what} of candidate 1 of prompt 'prompt 0' is not finite; it is left out"
    assert (program.report.invalid, program.report.not_finite) == ([sentence], 1)
    assert program.report.start_deviation == 0.0


def test_a_mini_batch_of_which_nobody_is_finite_ends_the_run():
    program = step(groups=1)
    judge(program, {0: [1.0, 0.5, 0.0, 0.7]})
    values = units(program, [0])
    for first in (0, 2):
        values[f"replay/0/{first}"]["finite"] = [False, False]
    with pytest.raises(TrainingError, match=r"^update/0: no candidate is left whose log-probabilities and gradients"):
        order(program, "update/0", values)


def test_the_judgement_of_a_rollout_that_is_not_finite_never_counts():
    """Its score is invalid, whatever the judge made of the frames, and the others' advantages are those without it."""
    program, without = step(groups=1), step(groups=1)
    scores = {f"score/brightness/0/{place}": score for place, score in enumerate([1.0, 9.0, 0.0, 0.5])}
    rollouts = {"rollout/0/0": [[0.0] * STEPS, [0.0, math.nan]], "rollout/0/2": [[0.0] * STEPS] * 2}
    program.local(program.graph["reward/0"], scores | rollouts)
    program.local(program.graph["advantage/0"], {})
    judge(without, {0: [1.0, Invalid("missing"), 0.0, 0.5]})
    made, expected = (each.report.advantages[0] for each in (program, without))
    assert torch.equal(made.advantages, expected.advantages)
    assert made.kept.tolist() == [True, False, True, True]
    assert "rollout is not finite" in program.report.invalid[0]


def test_no_comparison_counts_with_a_video_that_is_not_finite():
    """Neither for who was sampled so nor for whom it met; one of the base model leaves nobody a reward."""
    rewards = [WeightedReward(BrightnessDuel(), 1.0), WeightedReward(BaseDuel(), 1.0)]
    program = step(groups=1, rewards=rewards)
    program.samples[0].append(Sample("prompt 0", 0, 4, base=True))
    values: dict[str, Any] = {task.id: 1.0 for task in program.graph if task.judge}
    finite = {f"rollout/0/{first}": [[0.0] * STEPS] * 2 for first in (0, 2)}
    broken = finite | {"rollout/0/2": [[0.0, math.inf], [0.0] * STEPS], "rollout/0/4": [[0.0] * STEPS]}
    program.local(program.graph["reward/0"], values | broken)
    duel, base = program.report.rewards[0].T.tolist()
    assert (duel[:2], duel[3], math.isnan(duel[2])) == ([1.0, 0.5], 0.0, True)
    assert (base[:2], base[3], math.isnan(base[2])) == ([0.5, 0.5], 0.5, True)
    program.local(program.graph["reward/0"], values | finite | {"rollout/0/4": [[math.nan, 0.0]]})
    duel, base = program.report.rewards[0].T.tolist()
    assert duel == [1.0, 2 / 3, 1 / 3, 0.0] and all(map(math.isnan, base))


def test_a_rollout_is_of_one_policy():
    """Its order says whose; a micro-batch that mixed them would be sampled wrongly."""
    samples = [Sample("p", 0, c, base=c > 1) for c in range(4)]
    graph = evaluation_graph(2, 0, task_batch=2, rewards=[WeightedReward(BrightnessDuel(), 1.0)])
    program = SamplingProgram(graph, [samples])
    orders = [program.payload((task,), {}) for task in graph.of(Kind.ROLLOUT)]
    assert orders == [
        RolloutOrder(("p", "p"), ((0, 0), (0, 1)), base=False), RolloutOrder(("p", "p"), ((0, 2), (0, 3)), base=True)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="too many values"):
        SamplingProgram(graph, [samples[1:]]).payload((graph["rollout/0/0"],), {})


def test_an_update_with_nobody_kept_has_no_coefficients():
    """Neither if all its replays were skipped nor if some had begun before that was known."""
    program = step(groups=1)
    blind = Invalid("too dark")
    unneeded = judge(program, {0: [1.0, blind, blind, blind]})
    assert unneeded == ["replay/0/0", "replay/0/2"]
    assert order(program, "update/0", {"rollout/0/0": [[0.0] * STEPS] * 2}) == UpdateOrder({})
    assert order(program, "update/0", units(program, [0])) == UpdateOrder({})
    assert program.report.losses == []


def test_several_rewards_make_columns():
    """In the order of the configuration, a pairwise one among them as win rates."""
    program = step(groups=1, rewards=[WeightedReward(BrightnessDuel(), 1.0), *REWARDS])
    wins = {f"compare/brightness-duel/0/{first}-{second}": 1.0 for first in range(4) for second in range(first + 1, 4)}
    scores = {f"score/brightness/0/{candidate}": float(candidate) for candidate in range(4)}
    program.local(program.graph["reward/0"], {**scores, **wins})
    assert program.report.rewards[0].tolist() == [[1.0, 0.0], [2 / 3, 1.0], [1 / 3, 2.0], [0.0, 3.0]]


def test_seeds_are_keyed_by_seed_step_position_and_candidate():
    """No two differ in only one of these and agree; who else is sampled, and the prompt's text, do not matter."""
    prompts = [Prompt(0, 5, "a"), Prompt(1, 2, "b")]
    base = samples_of(prompts, group_size=3, seed=0, step=1, share_noise=True)
    again = samples_of([prompts[0], Prompt(1, 9, "other")], group_size=2, seed=0, step=1, share_noise=True)
    assert [s.step_seed for s in base[1][:3]] == [s.step_seed for s in again[1]]
    assert [s.initial_seed for s in base[1][:3]] == [s.initial_seed for s in again[1]]
    others = [samples_of(prompts, group_size=3, seed=s, step=t, share_noise=True) for s, t in ((1, 1), (0, 2))]
    drawn = [sample.step_seed for made in (base, *others) for group in made for sample in group]
    drawn += [group[0].initial_seed for made in (base, *others) for group in made]
    assert len(set(drawn)) == len(drawn)


def test_a_group_shares_its_initial_noise_if_asked():
    """As does the base model's video, which stands behind its candidates."""
    prompts = [Prompt(0, 0, "a"), Prompt(1, 1, "a")]
    shared = samples_of(prompts, group_size=3, seed=0, step=1, share_noise=True)
    apart = samples_of(prompts, group_size=3, seed=0, step=1, share_noise=False)
    assert [len({sample.initial_seed for sample in group}) for group in shared] == [1, 1]
    assert shared[0][0].initial_seed != shared[1][0].initial_seed
    assert len({sample.initial_seed for group in apart for sample in group}) == 8
    assert [[sample.base for sample in group] for group in shared] == [[False] * 3 + [True]] * 2
