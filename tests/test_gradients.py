"""Combined gradients are the coefficients' sums; in exact mode no order or placement changes a bit."""

import pytest
import torch

from asyncflow.errors import TrainingError
from engines.gradients import combine, combine_exact, compress, distinct, from_fixed, solve, to_fixed

GENERATOR = torch.Generator().manual_seed(0)
COEFFICIENTS = torch.randn(12, 3, generator=GENERATOR) / 12
# Magnitudes far apart, so that float sums depend on their order.
GRADIENTS = torch.randn(12, 3, 50, generator=GENERATOR) * 10.0 ** torch.randint(-6, 2, (12, 3, 1), generator=GENERATOR)


def _placed(order: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """The exact sum over micro-batches of `sizes` candidates, taken in `order`."""
    parts = [combine_exact(COEFFICIENTS[part], GRADIENTS[part], 12) for part in order.split(sizes)]
    return torch.stack(parts).sum(dim=0)


def test_combines_with_the_coefficients() -> None:
    """Both modes equal the contraction in float64."""
    expected = torch.einsum("bu,bup->p", COEFFICIENTS.double(), GRADIENTS.double())
    torch.testing.assert_close(combine(COEFFICIENTS, GRADIENTS).double(), expected, rtol=1e-5, atol=1e-6)
    exact = from_fixed(combine_exact(COEFFICIENTS, GRADIENTS, 12))
    torch.testing.assert_close(exact.double(), expected, rtol=1e-7, atol=1e-12)


def test_exact_sums_do_not_depend_on_order_or_placement() -> None:
    """Any permutation of candidates over any micro-batches gives the same bits; float sums do not."""
    expected = _placed(torch.arange(12), (12,))
    for seed, sizes in enumerate([(1,) * 12, (4, 4, 4), (5, 7), (1, 11)]):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(_placed(order, sizes), expected)
    backwards = combine(COEFFICIENTS.flip(0), GRADIENTS.flip(0))
    assert not torch.equal(backwards, combine(COEFFICIENTS, GRADIENTS))


@pytest.mark.parametrize("exact", [False, True])
def test_zero_coefficient_skips_its_gradient(exact: bool) -> None:
    """A candidate that is filtered out does not matter, not even where its gradient is NaN."""
    gradients, coefficients = GRADIENTS.clone(), COEFFICIENTS.clone()
    gradients[3], coefficients[3] = float("nan"), 0.0
    kept = [place for place in range(12) if place != 3]
    if exact:
        found, expected = (
            combine_exact(c, g, 12) for c, g in ((coefficients, gradients), (COEFFICIENTS[kept], GRADIENTS[kept]))
        )
    else:
        found, expected = (combine(c, g) for c, g in ((coefficients, gradients), (COEFFICIENTS[kept], GRADIENTS[kept])))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("value", [2048.0, -2048.0])
def test_out_of_range_is_an_error(value: float) -> None:
    """What could overflow in a sum of four is refused."""
    with pytest.raises(TrainingError, match="exceeds 2048"):
        to_fixed(torch.tensor([0.0, value]), terms=4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_gradient_that_is_not_finite_poisons_the_sum(value: float) -> None:
    """One candidate's bad gradient makes the whole sum NaN, whatever the others' order, so that the step is skipped."""
    bad = GRADIENTS[:1].clone()
    bad[0, 0, 0] = value
    total = combine_exact(COEFFICIENTS[1:], GRADIENTS[1:], 12) + combine_exact(torch.ones(1, bad.shape[1]), bad, 12)
    assert from_fixed(total).isnan().all()


def test_largest_values_do_not_overflow() -> None:
    """The sum of as many of the largest values as was announced is right."""
    largest = torch.nextafter(torch.tensor(2048.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64))
    total = torch.stack([to_fixed(torch.tensor([largest, 0.0]), terms=4)] * 4).sum(dim=0)
    assert from_fixed(total).item() == pytest.approx(8192.0)


def test_fixed_point_resolution() -> None:
    """Values are kept to 2^-51."""
    values = torch.tensor([1.0, -0.375, 3e-15, 2.0**-50])
    fixed = torch.cat([to_fixed(values, 1), torch.zeros(1, dtype=torch.int64)])
    torch.testing.assert_close(from_fixed(fixed), values, rtol=0, atol=2.0**-51)


def test_sums_with_solved_coefficients_are_the_gradient():
    """Two weighted sums of four units hold any coefficients that are a combination of the weights, to 1e-12."""
    generator = torch.Generator().manual_seed(1)
    gradients = torch.randn(3, 4, 7, dtype=torch.float64, generator=generator)
    weights = torch.randn(3, 2, 4, dtype=torch.float64, generator=generator)
    weights[1, 1] = weights[1, 0]  # for one candidate both sums are the same
    coefficients = torch.einsum("nw,nwu->nu", torch.randn(3, 2, dtype=torch.float64, generator=generator), weights)
    alpha = solve(weights, coefficients)
    expected = torch.einsum("nu,nup->p", coefficients, gradients)
    found = torch.einsum("nw,nwp->p", alpha, compress(gradients, weights))
    assert (found - expected).norm() <= 1e-12 * expected.norm()


def test_a_wrong_weight_stops_the_run():
    """An error of 1 % in one weight leaves a residual; coefficients that are zero or not finite are no error."""
    weights = torch.tensor([[[1.0, 2.0, 0.5]]], dtype=torch.float64)
    coefficients = torch.tensor([[-0.2, -0.4, -0.1]], dtype=torch.float64)
    assert solve(weights, coefficients).item() == pytest.approx(-0.2)
    wrong = weights * torch.tensor([1.0, 1.01, 1.0], dtype=torch.float64)
    with pytest.raises(TrainingError, match="do not fit the loss"):
        solve(wrong, coefficients)
    assert solve(weights, torch.zeros(1, 3, dtype=torch.float64)).item() == 0.0
    assert solve(weights, torch.full((1, 3), torch.nan, dtype=torch.float64)).isnan().all()


def test_rows_that_are_alike_for_all_candidates_are_kept_once():
    same = torch.ones(2, 2, 3)
    assert distinct(same).shape == (2, 1, 3)
    same[1, 1, 2] = 0.0
    assert torch.equal(distinct(same), same)
