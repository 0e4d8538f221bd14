"""Combines a micro-batch's unit gradients with the loss's coefficients: grad L = sum of c[i, u] grad u[i, u].

A candidate's terms are added in the order of its units. Float vectors of several micro-batches depend on the order they
are summed in; exact ones are fixed point, so that no order, placement or number of ranks changes a bit of their sum.
"""

import torch
from torch import Tensor

from asyncflow.errors import TrainingError

FRACTION_BITS = 50
SCALE = float(2**FRACTION_BITS)


def combine(coefficients: Tensor, gradients: Tensor) -> Tensor:
    """Sum of `coefficients` [B, U] times `gradients` [B, U, P], in float32 [P], candidate by candidate.

    A coefficient of zero skips its gradient, whatever that holds.
    """
    total = torch.zeros(gradients.shape[-1], device=gradients.device)
    for row, of_candidate in zip(coefficients.tolist(), gradients, strict=True):
        _add_units(total, row, of_candidate)
    return total


def combine_exact(coefficients: Tensor, gradients: Tensor, terms: int) -> Tensor:
    """The sum of `combine` as int64 fixed point [P + 1]: each candidate's gradient is rounded once, then all is exact.

    The last entry counts the candidates whose gradient is not finite. `terms` is the number of candidates that are
    summed in all, over micro-batches and ranks. Raises `TrainingError` as `to_fixed` does.
    """
    total = torch.zeros(gradients.shape[-1] + 1, dtype=torch.int64, device=gradients.device)
    for row, of_candidate in zip(coefficients.tolist(), gradients, strict=True):
        candidate = torch.zeros(gradients.shape[-1], dtype=torch.float64, device=gradients.device)
        _add_units(candidate, row, of_candidate)
        if candidate.isfinite().all():
            total[:-1] += to_fixed(candidate, terms)
        else:
            total[-1] += 1
    return total


def to_fixed(vector: Tensor, terms: int) -> Tensor:
    """Round a finite vector to int64 multiples of 2^-50, small enough that a sum of `terms` such cannot overflow.

    Raises `TrainingError` on a value that is too large for that.
    """
    limit = 2.0 ** (63 - FRACTION_BITS) / terms
    if not bool((vector.abs() < limit).all()):
        raise TrainingError(
            f"A candidate's gradient exceeds {limit:g}, which is as far as --exact can sum {terms} candidates; "
            "run without --exact, or look at the last rewards and ratios."
        )
    return (vector.double() * SCALE).round().to(torch.int64)


def from_fixed(total: Tensor) -> Tensor:
    """The float32 vector [P] nearest to a sum of `combine_exact`; all NaN if a candidate's gradient was not finite."""
    if total[-1]:
        return torch.full((len(total) - 1,), torch.nan, device=total.device)
    return (total[:-1].double() / SCALE).float()


def _add_units(total: Tensor, coefficients: list[float], gradients: Tensor) -> None:
    for coefficient, gradient in zip(coefficients, gradients, strict=True):
        if coefficient != 0.0:
            total.add_(gradient, alpha=coefficient)
