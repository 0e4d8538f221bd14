"""The memory estimate: each term against the bytes that are counted when it is done, and the real model's figures."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import Tensor, nn
from transformers import UMT5Config

from algorithms import memory
from algorithms.dancegrpo import DanceGRPO, DanceGRPOConfig
from algorithms.dancegrpo import main as dancegrpo
from algorithms.kernels import ConsistencyKernel
from algorithms.prepare import prepare
from asyncflow import launch
from asyncflow.config import resolve
from asyncflow.core.graph import Kind, Task
from asyncflow.engine import Work
from asyncflow.errors import ModelError
from asyncflow.options import run
from engines.adapter import BLOCK_LINEARS, Adapter, AdapterSettings
from engines.kernel import LogProbUnits
from engines.live_bytes import LiveBytes
from engines.memory import (
    UPDATE_VECTORS,
    Estimate,
    Shapes,
    Workload,
    decoding_bytes,
    empty_transformer,
    encoder_bytes,
    estimate,
    lora_size,
    transformer_bytes,
)
from engines.optimizer import Optimizer, OptimizerSettings
from engines.policy import CausalSettings, KVCache, Policy, load_policy
from engines.policy.load import keeps_float32
from engines.policy.original import read_generator
from engines.rank import PolicyEngine, PolicyJob
from engines.replay import Order, Replayer
from engines.rollout import Seeds, rollout
from engines.testing import CHANNELS, TEXT_DIM, original_names, texts, tiny_settings, tiny_vae
from engines.text import load_text_encoder
from engines.vae import StreamingDecoder, empty_vae, load_vae

KERNEL = ConsistencyKernel()
UNITS = LogProbUnits(KERNEL)
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
SEEDS = (Seeds(7, 1), Seeds(7, 2))
ORDERS = ("by-chunk", "batched", "packed")


def workload(**changes: object) -> Workload:
    """Two candidates of a tiny model, two steps of which are replayed."""
    values = {
        "settings": tiny_settings(),
        "adapter": AdapterSettings(rank=4),
        "dtype": torch.float32,
        "order": "by-chunk",
        "checkpointing": False,
        "exact": False,
        "batch": 2,
        "steps": 2,
        "units": 1,
        "sums": 2,
        "candidates": 2,
        "pending": 2,
    }
    return Workload(**(values | changes))


def tensors_bytes(tensors: object) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights(tiny_model: Path, dtype: torch.dtype) -> None:
    """Transformer, VAE and text encoder as they are loaded."""
    policy = load_policy(tiny_model, dtype=dtype).model.parameters()
    assert transformer_bytes(empty_transformer(tiny_model), dtype) == tensors_bytes(policy)
    terms = estimate(tiny_model, workload(dtype=dtype)).terms
    vae = load_vae(tiny_model).parameters()
    assert terms["weights"] == transformer_bytes(empty_transformer(tiny_model), dtype) + tensors_bytes(vae)
    encoder = load_text_encoder(tiny_model, 8, dtype=dtype)._pipeline.text_encoder.parameters()
    assert encoder_bytes(tiny_model, dtype) == tensors_bytes(encoder)


@pytest.mark.parametrize("targets", [BLOCK_LINEARS, ATTENTION, ("attn2.to_k", "ffn.net.2")])
def test_lora_and_adamw(tiny_model: Path, targets: tuple[str, ...]) -> None:
    """The adapter's vector, and two moments once a step was made."""
    settings = AdapterSettings(rank=3, targets=targets)
    adapter = Adapter(load_policy(tiny_model).model, settings, seed=0)
    optimizer = Optimizer(adapter.vector, OptimizerSettings())
    optimizer.step(torch.ones(adapter.size))
    assert lora_size(empty_transformer(tiny_model), settings) == adapter.size
    moments = [tensor for tensor in optimizer._adamw.state[adapter.vector].values() if tensor.ndim]
    expected = tensors_bytes([adapter.vector, *moments])
    assert estimate(tiny_model, workload(adapter=settings)).terms["LoRA and AdamW"] == expected


@pytest.mark.parametrize("exact", [False, True])
def test_update(tiny_model: Path, exact: bool) -> None:
    """Applying coefficients and stepping take what is estimated, once there are moments."""
    weights = {"kernel": KERNEL, "units": UNITS, "weights": None, "replay_order": "by-chunk"}
    engine = PolicyEngine(
        PolicyJob(
            model=tiny_model,
            device="cpu",
            adapter=AdapterSettings(rank=16),
            optimizer=OptimizerSettings(),
            prompts=["a red square moving left"],
            seed=0,
            exact=exact,
            **weights,
        )
    )
    size = engine._adapter.size
    for _ in range(2):
        gradients = {"replay/0/0.gradients": torch.full((2, 2, size), 1e-3)}
        order = {"coefficients": {"replay/0/0": [[1.0, 0.5]] * 2}}
        with LiveBytes() as live:
            engine.update(Work((Task("update/0", Kind.UPDATE),), gradients, order, lambda total: total))
    assert UPDATE_VECTORS[exact] * 4 * size == pytest.approx(live.peak, rel=0.01)


def test_parts_that_describe_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """An encoder or a VAE without a configuration is named."""
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "text_encoder" / "config.json").unlink()
    with pytest.raises(ModelError, match="text_encoder describes no UMT5 encoder"):
        estimate(tmp_path / "model", workload())
    (tmp_path / "model" / "vae" / "config.json").write_text("{")
    with pytest.raises(ModelError, match="vae describes no AutoencoderKLWan"):
        estimate(tmp_path / "model", workload())


def cache_bytes(cache: KVCache) -> int:
    return sum(tensors_bytes([held.keys, held.values]) for held in cache._layers if held)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("window", [{}, {"local_attn_size": 4}, {"local_attn_size": 5, "sink_size": 1}])
def test_cache_gradients_and_trajectories(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, window: dict[str, int], order: Order
) -> None:
    """A rollout and a replay hold what is estimated, to the byte."""
    work = workload(order=order, settings=tiny_settings(**window))
    policy = load_policy(tiny_model, settings=work.settings)
    adapter = Adapter(policy.model, work.adapter, seed=0)
    held, kept = [], []
    new_cache, backward = policy.new_cache, adapter.backward

    def watched_cache(*args: int, **kwargs: int) -> KVCache:
        held.append(new_cache(*args, **kwargs))
        return held[-1]

    def watched_backward(values: Tensor, sums: list, **kwargs: bool) -> None:
        kept.append({total.untyped_storage().data_ptr(): total.untyped_storage().nbytes() for total, _ in sums})
        backward(values, sums, **kwargs)

    monkeypatch.setattr(policy, "new_cache", watched_cache)
    monkeypatch.setattr(adapter, "backward", watched_backward)
    text = texts(1).expand(2, -1, -1)
    trajectory = rollout(policy, text, SEEDS, (4, 4), KERNEL, UNITS)
    replayer = Replayer(policy=policy, trajectory=trajectory, text=text, units=UNITS, steps=(0, 1), order=order)

    def weigh(units: Tensor, steps: slice) -> Tensor:
        rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
        return rows[:, steps, None].expand(2, -1, -1, -1)

    sums = replayer.replay(adapter, weigh).sums
    terms = estimate(tiny_model, work).terms
    assert terms["gradient sums"] == tensors_bytes([sums])
    assert terms["trajectories"] == tensors_bytes([trajectory.noisy, trajectory.clean])
    terms = Shapes.of(policy.model, empty_vae(tiny_model), work).replay(work, tensors_bytes([adapter.vector]))
    assert terms["KV cache"] == max(map(cache_bytes, held))
    alone = max(sum(storages.values()) for storages in kept)
    assert terms["unit gradients"] == (0 if order == "packed" else alone)


def wide_policy(dtype: torch.dtype) -> tuple[Policy, Workload]:
    """Three layers wide enough that what is counted a token, whatever the width, weighs little."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = WanTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=32,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            text_dim=TEXT_DIM,
            freq_dim=16,
            ffn_dim=700,
            num_layers=3,
        )
    for name, parameter in model.requires_grad_(False).named_parameters():
        parameter.data = parameter.data.to(torch.float32 if keeps_float32(name) else dtype)
    settings = tiny_settings(height=128, width=128)
    return Policy(model.eval(), settings), workload(settings=settings, dtype=dtype)


@pytest.mark.parametrize(
    ("order", "checkpointing", "dtype", "targets"),
    [
        *((order, on, torch.bfloat16, BLOCK_LINEARS) for order in ORDERS for on in (False, True)),
        ("by-chunk", False, torch.float32, BLOCK_LINEARS),
        ("by-chunk", False, torch.bfloat16, ATTENTION),
    ],
)
def test_activations(order: Order, checkpointing: bool, dtype: torch.dtype, targets: tuple[str, ...]) -> None:
    """A forward keeps what is estimated to 2 %, and with its backward takes at most what is estimated to 3 %."""
    policy, work = wide_policy(dtype)
    settings = AdapterSettings(rank=4, targets=targets)
    work = dataclasses.replace(work, order=order, checkpointing=checkpointing, adapter=settings)
    adapter = Adapter(policy.model, settings, seed=0)
    if checkpointing:
        policy.model.enable_gradient_checkpointing()
    text, size = texts(1).expand(2, -1, -1), (16, 16)
    clean = torch.zeros(policy.latent_shape(2, *size))
    cache = policy.new_cache(*size, recent=6)
    for chunk in policy.settings.chunks[:-1]:
        policy.write_context(clean[:, :, :2], text, cache, chunk.start)
    shapes = Shapes.of(policy.model, tiny_vae(residual=False), work)
    before = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    before |= {tensor.untyped_storage().data_ptr() for held in cache._layers for tensor in held}
    saved: dict[int, Tensor] = {}

    def forward() -> Tensor:
        if order == "packed":
            return policy.packed_velocity(clean, 0.7, text, cache)
        levels = [0.7, 0.5] if order == "batched" else 0.7
        x = clean[:, :, :2].repeat_interleave(2, dim=0) if order == "batched" else clean[:, :, :2]
        return policy.velocity(x, levels, text, cache, 4)

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in before:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), adapter.recording():
        forward()
    counted = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    assert shapes.kept(work) == pytest.approx(counted, rel=0.02)
    saved.clear()
    with LiveBytes() as live, adapter.recording():
        adapter.backward(forward().sum(dim=(1, 2, 3, 4)), [])
    assert shapes.kept(work) + shapes.working(work) == pytest.approx(live.peak, rel=0.03)


@pytest.mark.parametrize("residual", [False, True])
def test_decoding(residual: bool) -> None:
    """What a decode of meta tensors takes is what it takes with data."""
    vae, work = tiny_vae(residual=residual), workload()
    with LiveBytes() as live:
        StreamingDecoder(vae).decode(torch.zeros(2, CHANNELS, 2, 4, 4))
    assert decoding_bytes(vae.to("meta"), work) == live.peak > 0
    del vae


def test_live_bytes() -> None:
    """Counts storages once, while they are alive, and none that was there before."""
    weight = torch.ones(10, 10)
    with LiveBytes() as live:
        made = weight.t() + 1.0
        assert (live.now, live.peak) == (400, 400)
        view = made[1:]
        del made
        assert live.now == 400
        other = view * 2.0
        del view
        assert (live.now, live.peak) == (360, 760)
        del other
    assert (live.now, live.peak) == (0, 760)


def test_an_estimate_in_words() -> None:
    """The largest terms first, those that are 0 left out, and advice for what can be lowered."""
    made = Estimate({"weights": 3 * 2**30, "activations": 5 * 2**30, "update": 2**29, "trajectories": 0})
    assert made.total == 17 * 2**29
    assert str(made) == "8.5 GiB: activations 5.0 GiB, weights 3.0 GiB, update 512.0 MiB"
    assert made.advice == (
        "for less activations, turn on --gradient-checkpointing, or lower --height, --width or --task-batch; for less "
        "update, lower --lora-rank"
    )


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configurations of Wan2.1-T2V-1.3B-Diffusers, without its weights."""
    folder = tmp_path_factory.mktemp("wan")
    with init_empty_weights():
        WanTransformer3DModel(
            num_attention_heads=12,
            attention_head_dim=128,
            in_channels=16,
            out_channels=16,
            text_dim=4096,
            freq_dim=256,
            ffn_dim=8960,
            num_layers=30,
        ).save_config(folder / "transformer")
        AutoencoderKLWan().save_config(folder / "vae")
    UMT5Config(
        vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64
    ).save_pretrained(folder / "text_encoder")
    return folder


def test_the_real_model(wan: Path) -> None:
    """Wan2.1-1.3B has 1.42 billion parameters, of which bfloat16 keeps 4.6 million in float32."""
    model = empty_transformer(wan)
    parameters = dict(model.named_parameters())
    assert sum(parameter.numel() for parameter in parameters.values()) == 1_418_996_800
    assert len(parameters) == 825
    kept = sum(parameter.numel() for name, parameter in parameters.items() if keeps_float32(name))
    assert transformer_bytes(model, torch.bfloat16) == 2 * 1_418_996_800 + 2 * kept
    assert sum(parameter.numel() for parameter in empty_vae(wan).parameters()) == 126_892_531


def test_the_names_of_the_released_checkpoints(wan: Path, tmp_path: Path) -> None:
    """Those of Wan's code, of which there are 825 in 30 blocks, are the model's."""
    names = original_names(30)
    assert len(names) == 825
    torch.save({"generator_ema": {f"model.{name}": torch.zeros(1) for name in names}}, tmp_path / "names.pt")
    assert read_generator(tmp_path / "names.pt").keys() == empty_transformer(wan).state_dict().keys()


def test_the_loras_of_the_real_model(wan: Path) -> None:
    """LongLive's is on ten linears of each block, 350 million weights at rank 256."""
    model = empty_transformer(wan)
    for targets, linears, size in ((BLOCK_LINEARS, 300, 1_367_040), (ATTENTION, 240, 737_280)):
        found = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name.endswith(tuple(f".{target}" for target in targets))
        ]
        assert len(found) == linears
        assert lora_size(model, AdapterSettings(rank=1, targets=targets)) == size
    assert lora_size(model, AdapterSettings(rank=256)) == 349_962_240


def test_the_cache_of_the_real_model(wan: Path) -> None:
    """287 MB a latent frame in bfloat16; a window holds what its last chunk sees."""
    model, vae = empty_transformer(wan), empty_vae(wan)
    frame = 30 * 2 * 1560 * 1536 * 2
    for changes, frames in (({}, 18), ({"local_attn_size": 12, "sink_size": 3, "latent_frames": 33}, 9)):
        work = workload(settings=CausalSettings(**changes), dtype=torch.bfloat16, batch=1)
        assert Shapes.of(model, vae, work).cache == frames * frame
    assert frame == 287_539_200


def test_what_the_real_model_needs(wan: Path) -> None:
    """Self-Forcing at 480p: 28 GiB, most of it activations, of which gradient checkpointing leaves a 14th."""
    work = workload(
        settings=CausalSettings(),
        adapter=AdapterSettings(rank=128, targets=ATTENTION),
        dtype=torch.bfloat16,
        batch=1,
        steps=3,
        candidates=6,
        pending=3,
    )
    plain = estimate(wan, work)
    assert plain.total / 2**30 == pytest.approx(28.2, abs=0.1)
    assert plain.largest[:3] == ["activations", "KV cache", "weights"]
    fewer = dataclasses.replace(work, checkpointing=True)
    replay = Shapes.of(empty_transformer(wan), empty_vae(wan), fewer).replay(fewer, 0)
    assert plain.terms["activations"] / replay["activations"] == pytest.approx(14, abs=1)


@pytest.fixture
def given(tiny_model: Path, tmp_path: Path) -> list[str]:
    """Options of a run of the tiny model."""
    (tmp_path / "prompts.txt").write_text("a red square moving left\n")
    return [f"--model={tiny_model}", f"--prompts={tmp_path / 'prompts.txt'}", "--reward=colour", "--eval-every=0"]


def test_a_run_that_does_not_fit(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is refused before anything is loaded, with the terms and with what to do; and with less it fits."""
    sizes = {"cuda:0": 2**40, "cuda:1": 2**21}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(memory, "device_memory", sizes.__getitem__)
    dry_run = [*given, "--device=cuda", "--ranks=2", "--dry-run"]
    assert run(dancegrpo, [*dry_run, "--lora-rank=64"]) == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith("Error: --device: cuda:1 has 2.0 MiB, and a policy rank needs about ")
    assert "; for less gradient sums, lower --lora-rank, or raise --mini-batches or the number of ranks; " in sentence
    assert sentence.count("\n") == 1
    assert run(dancegrpo, [*dry_run, "--lora-rank=1", "--task-batch=1"]) == 0
    assert "\na policy rank needs about 1.5 MiB: weights 0.7 MiB, decoding " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"batch": 3, "sums": 1, "candidates": 12, "pending": 12, "units": 1}),
        ({"mini_batches": 2}, {"sums": 2, "candidates": 12, "pending": 6}),
        ({"kl": 0.5}, {"sums": 2, "units": 2}),
        ({"group_size": 2, "task_batch": 8}, {"batch": 2, "candidates": 16}),
        ({"schedule": "async-reward"}, {"candidates": 24, "pending": 24}),
        ({"exact": True, "replay_order": "packed"}, {"exact": True, "order": "packed"}),
    ],
)
def test_what_a_rank_has_to_do(given: list[str], changes: dict[str, object], expected: dict[str, object]) -> None:
    """Of four prompts' groups of six, in tasks of three, on two ranks; sums wait for their mini-batch's update."""
    values = {name.replace("-", "_"): value for name, value in (option[2:].split("=") for option in given)}
    values["reward"] = [values["reward"]]
    config = resolve(DanceGRPOConfig, {**values, "device": "cpu", "group_size": 6, "task_batch": 3, **changes})
    prepared = prepare("dancegrpo", config, DanceGRPO, 2)
    made = memory.workload(prepared.run, prepared.settings)
    assert {name: getattr(made, name) for name in expected} == expected
    assert (made.steps, made.dtype, made.settings) == (2, torch.float32, tiny_settings(text_length=8))


def test_rank_0_says_what_a_run_needs(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the start, and no other rank does."""
    monkeypatch.setattr(launch, "run_rank", lambda *_: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for number, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", number)
        assert run(dancegrpo, [*given, "--device=cpu"]) == 0
        assert capsys.readouterr().out.count("a policy rank needs about ") == lines
