"""The optimizer is AdamW with warm-up and clipping; it survives bad gradients and resumes to the same bits."""

import pytest
import torch
from torch import nn

from asyncflow.errors import TrainingError
from engines.optimizer import Optimizer, OptimizerSettings

SETTINGS = OptimizerSettings(lr=0.01, warmup=4, max_grad_norm=0.5, weight_decay=0.1)
NAN = torch.full((6,), float("nan"))


def _vector() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1.0, 1.0, 6))


def _gradient(step: int) -> torch.Tensor:
    return torch.randn(6, generator=torch.Generator().manual_seed(step))


def test_equals_torch_adamw_with_clipping_and_warmup() -> None:
    """Six steps equal torch's AdamW, clip_grad_norm_ and a linear warm-up."""
    vector, reference = _vector(), _vector()
    optimizer = Optimizer(vector, SETTINGS)
    adamw = torch.optim.AdamW([reference], lr=0.01, betas=(0.9, 0.999), weight_decay=0.1)
    warmup = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: min(1.0, (step + 1) / 4))
    for step in range(6):
        metrics = optimizer.step(_gradient(step))
        reference.grad = _gradient(step)
        norm = nn.utils.clip_grad_norm_([reference], 0.5)
        assert metrics.lr == pytest.approx(warmup.get_last_lr()[0])
        adamw.step()
        warmup.step()
        assert metrics.grad_norm == pytest.approx(norm.item())
        torch.testing.assert_close(vector, reference)


def test_small_gradients_are_not_scaled_up() -> None:
    """Clipping only shortens: a gradient below the norm gives its own first moment."""
    optimizer = Optimizer(_vector(), SETTINGS)
    optimizer.step(torch.full((6,), 1e-3))
    moment = optimizer.state_dict()["adamw"]["state"][0]["exp_avg"]
    torch.testing.assert_close(moment, torch.full((6,), 1e-4))


def test_non_finite_gradient_is_skipped() -> None:
    """It changes neither weights nor moments nor warm-up, and is counted."""
    skipping, plain = Optimizer(vector := _vector(), SETTINGS), Optimizer(expected := _vector(), SETTINGS)
    for optimizer in (skipping, plain):
        optimizer.step(_gradient(0))
    metrics = skipping.step(NAN)
    assert metrics.skipped
    assert skipping.skipped == 1
    for optimizer in (skipping, plain):
        optimizer.step(_gradient(1))
    assert torch.equal(vector, expected)


def test_too_many_skips_in_a_row_end_training() -> None:
    """Two bad gradients pass, a good one starts the count again, three in a row raise."""
    optimizer = Optimizer(_vector(), SETTINGS)
    for gradient in (NAN, NAN, _gradient(0), NAN, NAN):
        optimizer.step(gradient)
    with pytest.raises(TrainingError, match="3 times in a row"):
        optimizer.step(torch.full((6,), float("inf")))


def test_resumes_to_the_same_bits(tmp_path: object) -> None:
    """Weights and state saved in the middle continue exactly as if never stopped."""
    vector = _vector()
    optimizer = Optimizer(vector, SETTINGS)
    for step in range(3):
        optimizer.step(_gradient(step))
    path = f"{tmp_path}/state.pt"
    torch.save((vector.detach(), optimizer.state_dict()), path)
    weights, state = torch.load(path, weights_only=True)
    resumed = Optimizer(again := nn.Parameter(weights), SETTINGS)
    resumed.load_state_dict(state)
    for step in range(3, 6):
        assert optimizer.step(_gradient(step)) == resumed.step(_gradient(step))
    assert torch.equal(vector, again)
    assert optimizer.weights_sha256() == resumed.weights_sha256()


def test_hash_sees_one_bit() -> None:
    """The hash of the weights changes with the last bit of one of them, and with nothing else."""
    first, second = _vector(), _vector()
    hashes = [Optimizer(vector, SETTINGS).weights_sha256() for vector in (first, second)]
    assert hashes[0] == hashes[1]
    second.data[3] = torch.nextafter(second.data[3], torch.tensor(9.0))
    assert Optimizer(second, SETTINGS).weights_sha256() != hashes[0]


def test_gradient_is_left_alone() -> None:
    """A step does not change the vector it was given."""
    gradient = 10 * _gradient(0)
    Optimizer(_vector(), SETTINGS).step(gradient)
    assert torch.equal(gradient, 10 * _gradient(0))
