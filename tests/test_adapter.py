"""The adapter is PEFT's LoRA: same forward, loadable by stock diffusers; its weights are one vector."""

import json
import math
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from asyncflow.errors import ModelError
from engines.adapter import Adapter, AdapterSettings, CandidateLinear, GradientSum
from engines.policy import Policy
from engines.testing import latents, texts, tiny_policy, tiny_settings, tiny_transformer

SETTINGS = AdapterSettings(rank=3, alpha=12.0)


def _adapted(settings: AdapterSettings = SETTINGS) -> tuple[Policy, Adapter]:
    policy = tiny_policy()
    adapter = Adapter(policy.model, settings, seed=3)
    adapter.assign(0.2 * torch.randn(adapter.size, generator=torch.Generator().manual_seed(5)))
    return policy, adapter


def _velocity(policy: Policy, batch: int = 1) -> Tensor:
    return policy.velocity(latents(batch, frames=2), 0.7, texts(batch), policy.new_cache(4, 4), 0)


def test_untrained_adapter_changes_nothing() -> None:
    """B is zero at first, so the policy is the base model's bits."""
    policy = tiny_policy()
    Adapter(policy.model, SETTINGS, seed=3)
    assert torch.equal(_velocity(policy), _velocity(tiny_policy()))


def test_initial_weights_depend_on_the_seed_alone() -> None:
    """Ranks that build the adapter after other random draws get the same bits; A is drawn as PEFT draws it."""
    first = Adapter(tiny_policy().model, SETTINGS, seed=3)
    torch.rand(5)
    again, other = (Adapter(tiny_policy().model, SETTINGS, seed=seed) for seed in (3, 4))
    assert torch.equal(first.flatten(), again.flatten())
    assert not torch.equal(first.flatten(), other.flatten())
    a = dict(first.model.named_parameters())["blocks.0.attn1.to_q.lora_A.policy.weight"]
    assert a.abs().max() <= 1 / math.sqrt(32)
    assert a.std().item() == pytest.approx(1 / math.sqrt(3 * 32), rel=0.2)


def test_covers_every_block_linear() -> None:
    """P counts rank x (in + out) of the ten linears of each of the two blocks; nothing else is trainable."""
    policy, adapter = _adapted()
    per_block = 3 * (8 * (32 + 32) + 2 * (32 + 48))
    assert adapter.size == 2 * per_block
    trainable = sum(parameter.numel() for parameter in policy.model.parameters() if parameter.requires_grad)
    assert trainable == adapter.size


def test_vector_is_the_weights() -> None:
    """Changing the vector in place changes the model; assigning a flattened copy restores it."""
    policy, adapter = _adapted()
    before, saved = _velocity(policy), adapter.flatten()
    with torch.no_grad():
        adapter.vector.mul_(0.5)
    assert (_velocity(policy) - before).abs().max() > 1e-3
    adapter.assign(saved)
    assert torch.equal(_velocity(policy), before)


def test_recording_leaves_the_forward_alone() -> None:
    """Velocities are the same bits with and without gradients recorded."""
    policy, adapter = _adapted()
    with torch.no_grad():
        expected = _velocity(policy, 2)
    with adapter.recording():
        assert torch.equal(_velocity(policy, 2), expected)


def test_candidate_gradients() -> None:
    """Recorded rows equal autograd's gradients candidate by candidate, and add to what the buffer held."""
    policy, adapter = _adapted()
    buffer = torch.ones(3, 2, adapter.size)
    with adapter.recording():
        values = _velocity(policy, 3).square().flatten(1).sum(dim=1)
        adapter.backward(values, [GradientSum(buffer[:, 1])])
    assert torch.equal(buffer[:, 0], torch.ones(3, adapter.size))
    weights = [p for p in policy.model.parameters() if p.requires_grad]
    for candidate in range(3):
        one = slice(candidate, candidate + 1)
        x, text = latents(3, frames=2)[one], texts(3)[one]
        value = policy.velocity(x, 0.7, text, policy.new_cache(4, 4), 0).square().sum()
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(value, weights)])
        scale = expected.abs().max().item()
        torch.testing.assert_close(buffer[candidate, 1] - 1.0, expected, rtol=1e-3, atol=1e-4 * scale)


def test_half_precision_model_keeps_float32_weights() -> None:
    """On a bfloat16 model the vector and the recorded gradients stay float32; the factors compute in bfloat16."""
    policy = Policy(tiny_transformer().to(torch.bfloat16), tiny_settings())
    adapter = Adapter(policy.model, SETTINGS, seed=3)
    computed_in: set[torch.dtype] = set()
    for module in policy.model.modules():
        if isinstance(module, CandidateLinear):
            module.register_forward_hook(lambda _module, _inputs, output: computed_in.add(output.dtype))
    full, same = _adapted()
    adapter.assign(same.flatten())
    buffers = []
    for one_policy, one_adapter in ((policy, adapter), (full, same)):
        buffer = torch.zeros(1, one_adapter.size)
        with one_adapter.recording():
            one_adapter.backward(_velocity(one_policy).square().flatten(1).mean(dim=1), [GradientSum(buffer)])
        buffers.append(buffer)
    assert adapter.vector.dtype == torch.float32
    assert computed_in == {torch.bfloat16}
    assert torch.nn.functional.cosine_similarity(buffers[0], buffers[1]).item() > 0.99


def test_stock_diffusers_loads_it(tmp_path: Path) -> None:
    """The saved adapter gives the same velocities on a stock model, alpha included, by the documented call."""
    policy, adapter = _adapted()
    adapter.save(tmp_path)
    stock: WanTransformer3DModel = tiny_transformer()
    stock.load_lora_adapter(tmp_path, prefix="base_model.model", weight_name="adapter_model.safetensors")
    inputs = (latents(1), torch.tensor([700.0]), texts(1))
    with torch.no_grad():
        torch.testing.assert_close(stock(*inputs).sample, policy.model(*inputs).sample, rtol=1e-6, atol=1e-6)
        assert (stock(*inputs).sample - tiny_transformer()(*inputs).sample).abs().max() > 0.01


def test_save_and_load(tmp_path: Path) -> None:
    """A loaded adapter has the saved bits."""
    _, adapter = _adapted()
    adapter.save(tmp_path)
    other = Adapter(tiny_policy().model, SETTINGS, seed=9)
    other.load(tmp_path)
    assert torch.equal(other.flatten(), adapter.flatten())
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"


def test_refuses_another_adapter(tmp_path: Path) -> None:
    """Another rank, another model's shapes and a missing folder are refused, and nothing is loaded."""
    _, adapter = _adapted()
    adapter.save(tmp_path)
    other = Adapter(tiny_policy().model, AdapterSettings(rank=2, alpha=12.0), seed=3)
    with pytest.raises(ModelError, match="rank, alpha, targets"):
        other.load(tmp_path)
    larger = WanTransformer3DModel.from_config({**tiny_transformer().config, "ffn_dim": 64})
    with pytest.raises(ModelError, match="do not fit this model"):
        Adapter(larger.requires_grad_(False), SETTINGS, seed=3).load(tmp_path)
    with pytest.raises(ModelError, match="no readable adapter"):
        adapter.load(tmp_path / "nowhere")


def test_refuses_unknown_targets() -> None:
    """Targets that name no linear of the model are refused."""
    with pytest.raises(ModelError, match="No linear of the model"):
        Adapter(tiny_policy().model, AdapterSettings(targets=("to_nothing",)), seed=0)
