"""DanceGRPO's advantages: whose statistics, who is kept, and that an invalid reward touches nobody else."""

import math

import pytest
import torch
from torch import Tensor

from algorithms.dancegrpo import DanceGRPO, DanceGRPOConfig

NAN = math.nan


def column(*rewards: float) -> Tensor:
    return torch.tensor(rewards, dtype=torch.float64)[:, None]


def algorithm(*weights: float, **config: object) -> DanceGRPO:
    return DanceGRPO(DanceGRPOConfig(**{"model": "m", "prompts": "p.txt", **config}), weights or (1.0,))


def test_a_group_is_normalised_by_its_own_mean_and_unbiased_deviation():
    """(r - mean) / (std + 1e-8) with n - 1 in the variance; other groups do not matter."""
    made = algorithm().advantages(1, {1: column(1.0, 2.0, 3.0, 6.0)})
    deviation = math.sqrt((4 + 1 + 0 + 9) / 3)
    expected = [(r - 3.0) / (deviation + 1e-8) for r in (1.0, 2.0, 3.0, 6.0)]
    assert made.advantages.dtype == torch.float64
    assert made.advantages[:, 0].tolist() == pytest.approx(expected, rel=1e-14)
    assert made.kept.tolist() == [True] * 4


def test_global_statistics_pool_all_groups():
    """With `statistics = global` mean and deviation are those of every valid reward of the step."""
    rewards = {0: column(0.0, 1.0), 1: column(10.0, NAN), 2: column(5.0, 4.0)}
    pool = torch.tensor([0.0, 1.0, 10.0, 5.0, 4.0], dtype=torch.float64)
    made = algorithm(statistics="global").advantages(2, rewards)
    torch.testing.assert_close(made.advantages, (column(5.0, 4.0) - pool.mean()) / (pool.std() + 1e-8))
    assert algorithm(statistics="global").global_statistics
    assert not algorithm().global_statistics


def test_advantages_are_clamped():
    rewards = column(*([0.0] * 99), 1.0)
    made = algorithm(advantage_clamp=2.5, group_size=100).advantages(0, {0: rewards}).advantages
    assert made.max() == 2.5
    assert algorithm(group_size=100).advantages(0, {0: rewards}).advantages.max() == 5.0


def test_an_invalid_candidate_is_left_out_of_everything():
    """The valid ones get what they would get without it; it is not kept and its advantage is 0, not NaN."""
    made = algorithm().advantages(0, {0: column(1.0, NAN, 2.0, 4.0)})
    alone = algorithm().advantages(0, {0: column(1.0, 2.0, 4.0)})
    assert made.kept.tolist() == [True, False, True, True]
    assert made.advantages[[0, 2, 3]].tolist() == alone.advantages.tolist()
    assert made.advantages[1].item() == 0


def test_one_invalid_reward_of_several_is_enough():
    """A candidate is judged by all rewards or by none."""
    rewards = torch.tensor([[1.0, NAN], [2.0, 0.0], [3.0, 1.0]], dtype=torch.float64)
    made = algorithm(1.0, 1.0).advantages(0, {0: rewards})
    assert made.kept.tolist() == [False, True, True]
    assert made.advantages[1:, 0].tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


@pytest.mark.parametrize("statistics", ["group", "global"])
@pytest.mark.parametrize("weighting", ["after", "before"])
def test_nobody_is_kept_of_a_group_with_fewer_than_two_valid(statistics, weighting):
    """One candidate has nobody to be compared with, even if other groups have plenty."""
    rewards = {0: column(NAN, 3.0), 1: column(1.0, 2.0)}
    mine = rewards if statistics == "global" else {0: rewards[0]}
    made = algorithm(statistics=statistics, weighting=weighting).advantages(0, mine)
    assert not made.kept.any()
    assert made.advantages.abs().max() == 0


def test_half_of_a_group_must_be_valid():
    """Of eight candidates four are enough, three are not; of three and four, two are."""
    for size, valid, kept in ((8, 4, 4), (8, 3, 0), (7, 4, 4), (7, 3, 0), (4, 2, 2), (3, 2, 2)):
        rewards = column(*map(float, range(valid)), *[NAN] * (size - valid))
        assert algorithm().advantages(0, {0: rewards}).kept.sum() == kept, (size, valid)


def test_best_of_n_keeps_the_extremes():
    """The worst and the best half of n, by advantage; statistics are still those of the whole group."""
    rewards = column(3.0, 0.0, 9.0, 5.0, 1.0, 4.0)
    made = algorithm(best_of_n=4).advantages(0, {0: rewards})
    assert made.kept.tolist() == [False, True, True, True, True, False]
    assert made.advantages.tolist() == algorithm().advantages(0, {0: rewards}).advantages.tolist()


def test_best_of_n_chooses_among_the_valid():
    """An invalid candidate is never one of the extremes, and the halves shrink rather than overlap."""
    made = algorithm(best_of_n=4).advantages(0, {0: column(NAN, 1.0, 2.0, NAN, 3.0)})
    assert made.kept.tolist() == [False, True, False, False, True]


def test_best_of_n_ranks_by_the_weighted_sum():
    rewards = torch.tensor([[0.0, 3.0], [1.0, 2.0], [2.0, 1.0], [3.0, 0.0]], dtype=torch.float64)
    by_first = algorithm(1.0, 0.0, best_of_n=2).advantages(0, {0: rewards}).kept
    by_second = algorithm(0.1, 1.0, best_of_n=2).advantages(0, {0: rewards}).kept
    assert by_first.tolist() == by_second.tolist() == [True, False, False, True]
    middle = torch.tensor([[0.0, 0.0], [4.0, -9.0], [2.0, 9.0], [3.0, 1.0]], dtype=torch.float64)
    assert algorithm(1.0, 0.0, best_of_n=2).advantages(0, {0: middle}).kept.tolist() == [True, True, False, False]
    assert algorithm(0.0, 1.0, best_of_n=2).advantages(0, {0: middle}).kept.tolist() == [False, True, True, False]


@pytest.mark.parametrize("value", [0.1, 1 / 3, 7e5])
def test_equal_rewards_have_no_advantage(value):
    """Exactly 0, whatever rounding makes of their mean; they still count as kept, unless they are to be dropped."""
    made = algorithm().advantages(0, {0: column(value, value, value)})
    assert (made.advantages.abs().max(), made.kept.tolist()) == (0, [True] * 3)
    dropping = algorithm(drop_zero_advantages=True)
    assert not dropping.advantages(0, {0: column(value, value, value)}).kept.any()
    assert dropping.advantages(1, {1: column(0.0, 1.0, 2.0)}).kept.tolist() == [True, False, True]


def test_an_advantage_of_one_reward_is_enough_to_stay():
    """Only a candidate with no advantage by any reward is dropped."""
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 0.5]], dtype=torch.float64)
    made = algorithm(1.0, 1.0, drop_zero_advantages=True).advantages(0, {0: rewards})
    assert made.kept.tolist() == [True, True, False]


MIXED = torch.tensor([[1.0, 10.0], [2.0, 40.0], [3.0, 10.0]], dtype=torch.float64)


def test_rewards_are_weighed_after_they_are_normalised():
    """A column each, by its own deviation: (-1, 0, 1), and 10, 40, 10 about 20 over the root of 300."""
    made = algorithm(1.0, 0.5).advantages(0, {0: MIXED}).advantages
    assert made[:, 0].tolist() == pytest.approx([-1.0, 0.0, 1.0], rel=1e-7)
    assert made[:, 1].tolist() == pytest.approx([x / math.sqrt(300) for x in (-10, 20, -10)], rel=1e-7)


def test_rewards_are_weighed_before_their_sum_is_normalised():
    """1 r1 + 0.5 r2 is 6, 22, 8: about 12 over the root of 76; one column, which counts once in loss and best-of-n."""
    before = algorithm(1.0, 0.5, weighting="before")
    made = before.advantages(0, {0: MIXED}).advantages
    assert made.tolist() == [pytest.approx([x / math.sqrt(76)], rel=1e-7) for x in (-6, 10, -4)]
    units = torch.zeros(3, 1, 1, dtype=torch.float64)
    losses = [
        a.loss(units, units[:, :, 0], made, torch.ones(3, 1, dtype=torch.bool)).value
        for a in (before, algorithm(1.0))
    ]
    assert losses[0] == losses[1]
    extremes = algorithm(1.0, 0.5, weighting="before", best_of_n=2).advantages(0, {0: MIXED}).kept
    assert extremes.tolist() == [True, True, False]


def test_rewards_are_weighed_before_global_statistics():
    """The sums 6, 22, 8 of one group and 0, 4 of another, with an invalid one left out: about 8 over the root of 70."""
    rewards = {0: MIXED, 1: torch.tensor([[0.0, 0.0], [NAN, 90.0], [2.0, 4.0]], dtype=torch.float64)}
    made = algorithm(1.0, 0.5, weighting="before", statistics="global").advantages(1, rewards)
    assert made.advantages.tolist() == [pytest.approx([x / math.sqrt(70)], rel=1e-7) for x in (-8, 0, -4)]
    assert made.kept.tolist() == [True, False, True]


@pytest.mark.parametrize("weighting", ["after", "before"])
@pytest.mark.parametrize("statistics", ["group", "global"])
def test_a_reward_without_weight_has_no_influence(weighting, statistics):
    """Whether it is huge, differs where the others do not, or is invalid everywhere."""
    options = {"weighting": weighting, "statistics": statistics, "best_of_n": 2, "drop_zero_advantages": True}
    useless = torch.tensor([[1e9, NAN], [NAN, NAN], [-1e9, NAN]], dtype=torch.float64)
    for rewards in (MIXED, torch.ones_like(MIXED)):
        given = torch.cat([useless[:, :1], rewards, useless[:, 1:]], dim=1)
        alone = algorithm(1.0, 0.5, **options).advantages(0, {0: rewards})
        made = algorithm(0.0, 1.0, 0.5, 0.0, **options).advantages(0, {0: given})
        assert made.advantages.tolist() == alone.advantages.tolist()
        assert made.kept.tolist() == alone.kept.tolist()


@pytest.mark.parametrize("weighting", ["after", "before"])
def test_any_invalid_reward_that_counts_leaves_its_candidate_out(weighting):
    """And nobody else: the others get what they would get without it."""
    rewards = torch.cat([MIXED, torch.tensor([[9.0, NAN], [NAN, 9.0]], dtype=torch.float64)])
    made = algorithm(1.0, 0.5, weighting=weighting).advantages(0, {0: rewards})
    alone = algorithm(1.0, 0.5, weighting=weighting).advantages(0, {0: MIXED})
    assert made.kept.tolist() == [True, True, True, False, False]
    assert made.advantages[:3].tolist() == alone.advantages.tolist()
    assert made.advantages[3:].abs().max() == 0


def test_a_reward_of_huge_scale():
    """Weighed after, scales do not matter; before, the huge one alone decides."""
    huge = MIXED * torch.tensor([1.0, 1e12], dtype=torch.float64)
    after, plain = (algorithm(1.0, 0.5).advantages(0, {0: r}).advantages for r in (huge, MIXED))
    torch.testing.assert_close(after, plain)
    before = algorithm(1.0, 0.5, weighting="before").advantages(0, {0: huge}).advantages
    torch.testing.assert_close(before, plain[:, 1:])
