"""Combines a micro-batch's unit gradients with the loss's coefficients: grad L = sum of c[i, u] grad u[i, u].

Unit gradients may be kept as fewer weighted sums, whose coefficients `solve` finds. A candidate's terms are added in
the order of its sums. Float vectors of several micro-batches depend on the order they are summed in; exact ones are
fixed point, so that no order, placement or number of ranks changes a bit of their sum.
"""

import torch
from torch import Tensor

from asyncflow.errors import TrainingError

FRACTION_BITS = 50
SCALE = float(2**FRACTION_BITS)
RESIDUAL = 1e-12
"""The largest share of a candidate's coefficients that may be left over, in float64."""


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


def distinct(weights: Tensor) -> Tensor:
    """Of the rows [B, W, U] those that differ from the first for some candidate, and the first: the sums to keep."""
    rows = weights.unbind(dim=1)
    return torch.stack([row for place, row in enumerate(rows) if not place or not torch.equal(row, rows[0])], dim=1)


def compress(gradients: Tensor, weights: Tensor) -> Tensor:
    """Unit gradients [B, U, P] as weighted sums [B, W, P], by `weights` [B, W, U] that know no reward."""
    return torch.bmm(weights.to(gradients), gradients)


def solve(weights: Tensor, coefficients: Tensor) -> Tensor:
    """The alpha [n, W] with which weighted sums make the loss's gradient: the sum over w of alpha_w W_wu is c_u.

    weights [n, W, U] and coefficients [n, U] in float64. NaN where a coefficient is not finite. Raises `TrainingError`
    if there is no such alpha: then the weights do not fit the loss, and training on them would be silently wrong.
    """
    alpha = torch.full(weights.shape[:2], torch.nan, dtype=weights.dtype)
    finite = coefficients.isfinite().all(dim=1) & weights.isfinite().flatten(1).all(dim=1)
    if finite.any():
        columns, wanted = weights[finite].transpose(1, 2), coefficients[finite].unsqueeze(2)
        found = torch.linalg.lstsq(columns, wanted, driver="gelsd").solution
        left = (torch.bmm(columns, found) - wanted).abs().amax(dim=(1, 2))
        worst = (left / wanted.abs().amax(dim=(1, 2)).clamp(min=torch.finfo(wanted.dtype).tiny)).max().item()
        if worst > RESIDUAL:
            raise TrainingError(
                f"the weights of the unit gradients do not fit the loss: {worst:.2g} of a coefficient is left over; "
                "mend the algorithm's `weights`, or let it keep every unit"
            )
        alpha[finite] = found.squeeze(2)
    return alpha


def _add_units(total: Tensor, coefficients: list[float], gradients: Tensor) -> None:
    for coefficient, gradient in zip(coefficients, gradients, strict=True):
        if coefficient != 0.0:
            total.add_(gradient, alpha=coefficient)
