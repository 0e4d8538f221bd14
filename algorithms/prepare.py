"""From a configuration to a run: everything that can be wrong is found here, before any process starts or model loads.

Called by the command in the parent and again in every rank; it reads little and never writes.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from diffusers import WanTransformer3DModel
from safetensors import SafetensorError, safe_open

from algorithms.algorithm import Algorithm
from algorithms.config import RunConfig
from algorithms.memory import RunMemory
from algorithms.prompts import read_prompts
from algorithms.resume import Progress, checkpoint_of
from algorithms.train import Run
from asyncflow import checkpoint
from asyncflow.core import schedules
from asyncflow.errors import ConfigError, ModelError
from engines.adapter import CONFIG_FILE, WEIGHTS_FILE, AdapterSettings
from engines.attention import check_attention
from engines.optimizer import OptimizerSettings
from engines.policy import CausalSettings, check_policy
from engines.policy.load import empty_transformer
from engines.policy.settings import FILE_NAME
from engines.rank import PolicyJob, pick_device
from engines.rewards.base import PairwiseReward
from engines.rewards.pairs import pairs_of
from engines.rewards.registry import parse_rewards
from engines.toy import EVAL_PROMPTS, PROMPTS
from engines.vae import empty_vae

MODEL_PARTS = ("transformer", "vae", "text_encoder", "tokenizer")
BLOCKS, BLOCK_BYTES = 64, 65536
"""How much of a large file goes into a model's hash: so many blocks, spread over it."""


@dataclass(frozen=True)
class Prepared:
    """A run, its sampler and memory, the files of the checkpoint that it goes on from, and sentences for its user."""

    run: Run
    settings: CausalSettings
    memory: RunMemory
    resume: Mapping[str, bytes] | None
    notes: Sequence[str]

    def policy_job(self, rank: int) -> PolicyJob:
        """What rank `rank` loads if it is a policy rank."""
        run, config = self.run, self.run.config
        return PolicyJob(
            model=config.folder,
            device=pick_device(config.device, rank),
            kernel=run.algorithm.kernel,
            units=run.algorithm.units,
            weights=run.algorithm.weights,
            replay_order=config.replay_order,
            adapter=config.adapter,
            optimizer=OptimizerSettings(
                lr=config.lr,
                weight_decay=config.weight_decay,
                warmup=config.warm_up,
                max_grad_norm=config.max_grad_norm,
            ),
            prompts=[*run.prompts, *run.eval_prompts],
            seed=config.seed,
            exact=config.exact,
            init_adapter=Path(config.init_adapter) if config.init_adapter else None,
            resume=self.resume,
            **config.weights,
            settings=self.settings,
            gradient_checkpointing=config.gradient_checkpointing,
        )


def prepare(
    name: str, config: RunConfig, algorithm: Callable[[Any, tuple[float, ...]], Algorithm], ranks: int
) -> Prepared:
    """Check `config` for a run of `ranks` ranks and read what it names. Raises ConfigError and its kin."""
    cluster = schedules.cluster(config.schedule, ranks, config.judges(ranks))
    for rank in cluster.ranks:
        if pick_device(config.device, rank) == "cpu" and config.channel == "nccl":
            raise ConfigError(
                f"--channel nccl: rank {rank} needs a GPU of its own; without, choose shared-memory or gloo"
            )
    check_attention(deterministic=config.deterministic_kernels)
    rewards = parse_rewards(config.reward)
    for weighted in rewards:
        if isinstance(weighted.reward, PairwiseReward):
            pairs_of(weighted.reward, config.group_size)
    model = config.folder
    check_model(model)
    settings = config.settings()
    check_policy(model, **config.weights, settings=settings)
    check_size(model, settings)
    for weighted in rewards:
        weighted.reward.fps = settings.fps
    stochastic_steps = len(settings.denoising_steps) - 1
    if not stochastic_steps:
        raise ModelError(f"--model: {model} samples in one denoising step, which leaves no stochastic step to train")
    made = algorithm(config, tuple(reward.weight for reward in rewards))
    made.trained_steps(stochastic_steps, [0])
    prompts = read_prompts(Path(config.prompts) if config.prompts else PROMPTS)
    eval_prompts = _eval_prompts(config)
    if config.init_adapter and not config.resume:
        _check_adapter(config)
    model_sha256 = hash_model(model, *config.weights.values())
    resumed, saved, notes = (
        checkpoint_of(config, type(made).__name__, model_sha256) if config.resume else (None, None, [])
    )
    progress = saved.progress if saved else Progress()
    if progress.step >= config.steps:
        raise ConfigError(f"--steps: the checkpoint is of step {progress.step}; give more than that to go on")
    run = Run(
        config=config,
        algorithm=made,
        rewards=rewards,
        cluster=cluster,
        prompts=prompts,
        eval_prompts=eval_prompts,
        stochastic_steps=stochastic_steps,
        out=_out(name, config, resumed),
        model_sha256=model_sha256,
        progress=progress,
    )
    memory = RunMemory(run, settings)
    memory.check()
    return Prepared(run, settings, memory, resumed.files if resumed else None, notes)


def check_model(folder: Path) -> None:
    """Raises ModelError unless `folder` looks like a diffusers Wan folder."""
    if not folder.is_dir():
        raise ModelError(f"--model: there is no folder {folder}; give a diffusers folder of a causal Wan model")
    missing = [part for part in MODEL_PARTS if not (folder / part).is_dir()]
    if missing:
        raise ModelError(f"--model: {folder} is no diffusers Wan folder: it has no {', '.join(missing)}")
    file = folder / "transformer" / "config.json"
    try:
        kind = json.loads(file.read_bytes())["_class_name"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(f"--model: {file} is missing or damaged; download the model again") from None
    if kind != WanTransformer3DModel.__name__:
        raise ModelError(f"--model: {folder} holds a {kind}; only Wan text-to-video models are trained")


def check_size(folder: Path, settings: CausalSettings) -> None:
    """Raises ConfigError unless the video's height and width are whole numbers of the model's tokens."""
    _, *patch = empty_transformer(folder).config.patch_size
    scale = empty_vae(folder).config.scale_factor_spatial
    for name, pixels, latents in zip(("height", "width"), (settings.height, settings.width), patch, strict=True):
        if pixels % (scale * latents):
            raise ConfigError(f"--{name}: expected a multiple of {scale * latents} for {folder}, got {pixels}")


def hash_model(folder: Path, *weights: Path | None) -> str:
    """SHA-256 of a model's folder and of other files with its weights: names, sizes, and all or many blocks of each."""
    digest = hashlib.sha256()
    parts = (file for part in MODEL_PARTS for file in sorted((folder / part).rglob("*")))
    files = {file: str(file.relative_to(folder)) for file in (folder / FILE_NAME, *parts)}
    files |= {file: str(place) for place, file in enumerate(weights) if file}
    for file, name in files.items():
        if file.is_file():
            size = file.stat().st_size
            digest.update(f"{name} {size}\n".encode())
            with file.open("rb") as opened:
                for place in range(0, size, max(BLOCK_BYTES, size // BLOCKS)):
                    opened.seek(place)
                    digest.update(opened.read(BLOCK_BYTES))
    return digest.hexdigest()


def read_adapter(folder: Path, option: str) -> AdapterSettings:
    """The settings of the adapter folder that `option` names. Raises ModelError if it is none or is damaged."""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise ModelError(f"{option}: {folder} has no {name}; give a folder that a run wrote as adapter/")
    try:
        config = msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=_LoraConfig)
        with safe_open(folder / WEIGHTS_FILE, "pt"):
            pass
    except (msgspec.DecodeError, SafetensorError) as error:
        raise ModelError(f"{option}: {folder} holds no readable LoRA: {error}; give another adapter folder") from None
    return AdapterSettings(rank=config.r, alpha=config.lora_alpha, targets=config.target_modules)


class _LoraConfig(msgspec.Struct):
    """What is read of PEFT's adapter_config.json."""

    r: int
    lora_alpha: float
    target_modules: tuple[str, ...]


def _eval_prompts(config: RunConfig) -> list[str]:
    if not config.eval_every:
        return []
    if config.eval_prompts:
        return read_prompts(Path(config.eval_prompts), "--eval-prompts")
    return [] if config.model else read_prompts(EVAL_PROMPTS)


def _check_adapter(config: RunConfig) -> None:
    found = read_adapter(Path(config.init_adapter), "--init-adapter")
    if (found.rank, found.alpha) != (config.lora_rank, config.lora_alpha):
        raise ModelError(
            f"--init-adapter: {config.init_adapter} has rank {found.rank} and alpha {found.alpha:g}, this run "
            f"{config.lora_rank} and {config.lora_alpha:g}; give --lora-rank {found.rank} --lora-alpha {found.alpha:g}"
        )
    if set(found.targets) != set(config.lora_targets):
        raise ModelError(
            f"--init-adapter: {config.init_adapter} is on other linears than this run's; give "
            + " ".join(f"--lora-targets {name}" for name in sorted(found.targets))
        )


def _out(name: str, config: RunConfig, resumed: checkpoint.Checkpoint | None) -> Path:
    before = resumed.path.parent.parent if resumed else None
    out = Path(config.out) if config.out else before or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out: {out} is no folder; choose another")
    if not (out / "metrics.jsonl").exists():
        return out
    if not (resumed and before and before.samefile(out)):
        raise ConfigError(f"--out: {out} holds a run already; choose another folder, or go on with --resume {out}")
    later = [step for step in checkpoint.steps(out / "checkpoints") if step > resumed.step]
    if later and resumed.path.samefile(config.resume):
        raise ConfigError(
            f"--resume: {out} holds a later checkpoint, of step {later[-1]}; go on with --resume {out}, or give "
            "another --out"
        )
    return out
