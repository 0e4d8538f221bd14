"""What is computed in bfloat16 on a GPU, and what stays in float32; forced here, on a CPU."""

from pathlib import Path

import msgspec
import pytest
import torch

from algorithms.kernels import ConsistencyKernel
from asyncflow.core.graph import Kind, Task
from asyncflow.engine import Result, Work
from engines import rank
from engines.adapter import AdapterSettings
from engines.kernel import LogProbUnits
from engines.optimizer import OptimizerSettings
from engines.orders import ReplayOrder, RolloutOrder
from engines.policy.load import keeps_float32
from engines.rank import PolicyEngine, PolicyJob

PROMPTS = ("a red square moving left", "a blue circle moving up")


def engine(model: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> PolicyEngine:
    """A policy rank's engine that computes in bfloat16, its adapter away from its start."""
    monkeypatch.setattr(rank, "compute_dtype", lambda _: torch.bfloat16)
    kernel = ConsistencyKernel()
    fields = {
        "model": model,
        "device": "cpu",
        "kernel": kernel,
        "units": LogProbUnits(kernel),
        "weights": lambda units, old, trained: torch.ones(len(units), 1, *units.shape[1:], dtype=torch.float64),
        "replay_order": "by-chunk",
        "adapter": AdapterSettings(rank=2, alpha=4.0),
        "optimizer": OptimizerSettings(),
        "prompts": PROMPTS,
        "seed": 3,
        "exact": False,
    }
    made = PolicyEngine(PolicyJob(**(fields | changes)))
    made._adapter.assign(torch.randn(made._adapter.size, generator=torch.Generator().manual_seed(1)) * 0.1)
    return made


def run(engine: PolicyEngine, kind: Kind, order: object, tensors: dict[str, torch.Tensor]) -> Result:
    payload = msgspec.msgpack.decode(msgspec.msgpack.encode(order))
    return getattr(engine, kind)(Work((Task(f"{kind}/0/0", kind),), tensors, payload, None))


def replay(engine: PolicyEngine) -> tuple[Result, Result]:
    """A rollout, and its replay."""
    sampled = run(engine, Kind.ROLLOUT, RolloutOrder(PROMPTS, ((1, 11), (1, 12))), {})
    return sampled, run(engine, Kind.REPLAY, ReplayOrder(PROMPTS, (0, 1), None, [[True, True]] * 2), sampled.tensors)


def test_only_the_frozen_weights_are_bfloat16(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA, moments, sampler steps, log-probabilities and gradients are float32, as is what diffusers keeps so."""
    made = engine(tiny_model, monkeypatch)
    for name, parameter in made._policy.model.named_parameters():
        lora = "lora_" in name
        assert parameter.dtype == (torch.float32 if lora or keeps_float32(name) else torch.bfloat16), name
    assert made._adapter.vector.dtype == torch.float32
    assert {parameter.dtype for parameter in made._vae.parameters()} == {torch.float32}
    sampled, replayed = replay(made)
    assert {tensor.dtype for tensor in (*sampled.tensors.values(), *replayed.tensors.values())} == {torch.float32}
    rounded = [tensor.bfloat16().float() for tensor in sampled.tensors.values()]
    assert not any(torch.equal(*pair) for pair in zip(rounded, sampled.tensors.values(), strict=True))


def test_the_first_ratio_is_one(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay chunk by chunk has the rollout's rounding too, and so its log-probabilities to the bit."""
    sampled, replayed = replay(engine(tiny_model, monkeypatch))
    units = [[step[0] for step in row] for row in replayed.values["replay/0/0"].units]
    assert units == sampled.values["rollout/0/0"]


def test_gradients_are_near_those_in_float32(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They point the same way, whatever the rounding of the forward."""
    _, half = replay(engine(tiny_model, monkeypatch))
    made = engine(tiny_model, monkeypatch)
    monkeypatch.setattr(rank, "compute_dtype", lambda _: torch.float32)
    full_engine = PolicyEngine(made._job)
    full_engine._adapter.assign(made._adapter.flatten())
    _, full = replay(full_engine)
    (low,), (high,) = half.tensors.values(), full.tensors.values()
    assert (torch.nn.functional.cosine_similarity(low.flatten(1), high.flatten(1)) > 0.97).all()


def test_gradient_checkpointing_changes_no_bit(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key reaches the model, whose blocks are computed again in a backward."""
    plain, checkpointed = (engine(tiny_model, monkeypatch, gradient_checkpointing=on) for on in (False, True))
    assert (plain._policy.model.gradient_checkpointing, checkpointed._policy.model.gradient_checkpointing) == (
        False,
        True,
    )
    (expected,), (found,) = (replay(made)[1].tensors.values() for made in (plain, checkpointed))
    assert torch.equal(expected, found)
