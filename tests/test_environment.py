"""What runs where is recorded and printed, an attention that cannot be is refused, and kernels may be deterministic."""

import json
import os

import pytest
import torch

from algorithms.dancegrpo import DanceGRPO, DanceGRPOConfig
from algorithms.prepare import prepare
from asyncflow.errors import ConfigError
from engines import attention
from engines.attention import attention_in_use
from engines.deterministic import use_deterministic_kernels


def test_a_run_records_what_its_numbers_depend_on(torchrun):
    """Versions, the device of each rank, the attention, and that --exact asked for deterministic kernels."""
    found = json.loads((torchrun / "environment.json").read_text())
    assert found["packages"]["torch"] == torch.__version__
    assert set(found["packages"]) == {"torch", "diffusers", "transformers", "peft"}
    assert (len(found["devices"]), found["threads"], found["deterministic"]) == (2, 1, True)
    assert found["attention"] == attention_in_use("cpu", torch.float32, 2, 16)


def test_deterministic_kernels_are_the_same_on_a_cpu(recipe, run_ranks, tmp_path):
    """The switch finds no kernel that has no such form, and changes no bit; one line says what attends."""
    hashes = []
    for name, switch in (("plain", []), ("deterministic", ["--deterministic"])):
        run = tmp_path / name
        options = [*recipe, "--no-exact", "--steps=1", f"--out={run}", *switch]
        codes, output = run_ranks(1, options, tmp_path / "output")
        assert codes == [0], output
        assert output.count("attention: native (torch scaled_dot_product_attention, ") == len(hashes) + 1
        assert json.loads((run / "environment.json").read_text())["deterministic"] == bool(switch)
        hashes.append(json.loads((run / "metrics.jsonl").read_text())["weights/sha256"])
    assert hashes[0] == hashes[1]


def test_the_kernel_that_torch_takes_is_asked_of_torch(monkeypatch):
    """It is the only one left where the others are turned off; another backend of diffusers goes by its own name."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        made = attention_in_use("cpu", torch.float32, 2, 16)
    assert made == "native (torch scaled_dot_product_attention, math)"
    monkeypatch.setattr(attention, "DIFFUSERS_ATTN_BACKEND", "_native_math")
    assert attention_in_use("cpu", torch.float32, 2, 16) == "_native_math"


@pytest.mark.parametrize(
    ("backend", "exact", "sentence"),
    [
        ("flash", False, "DIFFUSERS_ATTN_BACKEND: Flash Attention backend 'flash' is not usable because of missing"),
        ("flash_hub", False, "DIFFUSERS_ATTN_BACKEND: Backend 'flash_hub' is not usable because the `kernels` pack"),
        ("flex", True, "--deterministic, --exact: the attention backend flex is not known to be deterministic; unset"),
    ],
)
def test_an_attention_that_cannot_be_is_refused_before_the_run(backend, exact, sentence, monkeypatch):
    monkeypatch.setattr(attention, "DIFFUSERS_ATTN_BACKEND", backend)
    with pytest.raises(ConfigError) as error:
        prepare("run", DanceGRPOConfig(exact=exact), DanceGRPO, 1)
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize("chosen", [None, ":16:8"])
def test_deterministic_kernels_are_asked_for_strictly(chosen, monkeypatch):
    """Not with warnings, under which attention's backward would go on without; a workspace that is chosen stays."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", chosen or "")
    if not chosen:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    try:
        use_deterministic_kernels()
        assert torch.get_deterministic_debug_mode() == 2
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (chosen or ":4096:8")
    finally:
        torch.use_deterministic_algorithms(False)
