"""The engine of a rank: computes each kind of task with the models that its role loads.

Invariant: what a task gives depends on its inputs, its order and the weights' version alone, not on the rank. Policy
ranks load DiT, LoRA, optimizer, VAE and the prompts' embeddings; judges load the rewards. The worker calls `run`.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec import convert
from torch import Tensor

from asyncflow import checkpoint
from asyncflow.core.graph import JUDGE_KINDS, Kind, producer
from asyncflow.engine import Cancelled, Result, Work
from asyncflow.errors import CheckpointError, ConfigError
from asyncflow.video import write_mp4
from engines.adapter import Adapter, AdapterSettings
from engines.gradients import combine, combine_exact, from_fixed
from engines.judge import JudgeEngine
from engines.kernel import Kernel, Units
from engines.optimizer import Optimizer, OptimizerSettings, StepMetrics
from engines.orders import (
    CheckpointOrder,
    ExportOrder,
    ForwardOrder,
    Replayed,
    ReplayOrder,
    RolloutOrder,
    UpdateOrder,
)
from engines.policy import CausalSettings, load_policy, load_settings
from engines.replay import Order, Replayer
from engines.rollout import Seeds, Trajectory, rollout
from engines.text import load_text_encoder
from engines.vae import StreamingDecoder, load_vae

ADAPTER_FILE = "adapter.pt"
OPTIMIZER_FILE = "optimizer.pt"


@dataclass(frozen=True, kw_only=True)
class PolicyJob:
    """What a policy rank needs.

    `model`, `checkpoint`, `base_lora` and `settings` are as for `load_policy`. `kernel`, `units` and `weights` are the
    algorithm's. `prompts` are all that the run will ever sample. It starts from the checkpoint's files in `resume`,
    else from the weights of `init_adapter`, else from a fresh adapter.
    """

    model: Path
    device: str
    kernel: Kernel
    units: Units
    weights: Callable[[Tensor, Tensor, Tensor], Tensor]
    replay_order: Order
    adapter: AdapterSettings
    optimizer: OptimizerSettings
    prompts: Sequence[str]
    seed: int
    exact: bool
    init_adapter: Path | None = None
    resume: Mapping[str, bytes] | None = None
    checkpoint: Path | None = None
    base_lora: Path | None = None
    settings: CausalSettings | None = None
    gradient_checkpointing: bool = False


def pick_device(name: str, rank: int) -> str:
    """The torch device of a rank: `auto` is its GPU where there is one. Raises ConfigError if a GPU is missing."""
    gpus = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and not gpus):
        return "cpu"
    if rank >= gpus:
        raise ConfigError(f"--device {name}: rank {rank} needs a GPU of its own, and this host has {gpus}")
    return f"cuda:{rank}"


def compute_dtype(device: str) -> torch.dtype:
    """What models compute in: bfloat16 on a GPU, float32 on the CPU."""
    return torch.bfloat16 if device.startswith("cuda") else torch.float32


def encode_prompts(folder: Path, prompts: Sequence[str], device: str) -> dict[str, Tensor]:
    """The embedding [L, D] of every prompt, on the host; the encoder, larger than a real policy, is gone afterwards."""
    length, dtype = load_settings(folder).text_length, compute_dtype(device)
    encoder = load_text_encoder(folder, length, device=device, dtype=dtype)
    return {prompt: encoder.encode([prompt])[0].cpu() for prompt in dict.fromkeys(prompts)}


class PolicyEngine:
    """Samples, decodes, replays and updates."""

    def __init__(self, job: PolicyJob) -> None:
        self._job = job
        dtype = compute_dtype(job.device)
        self._texts = encode_prompts(job.model, job.prompts, job.device)
        self._policy = load_policy(
            job.model,
            checkpoint=job.checkpoint,
            base_lora=job.base_lora,
            settings=job.settings,
            device=job.device,
            dtype=dtype,
        )
        if job.gradient_checkpointing:
            self._policy.model.enable_gradient_checkpointing()
        self._vae = load_vae(job.model, device=job.device)
        self._adapter = Adapter(self._policy.model, job.adapter, job.seed)
        self._optimizer = Optimizer(self._adapter.vector, job.optimizer)
        if job.resume:
            self._adapter.assign(_loaded(job.resume[ADAPTER_FILE]).to(job.device))
            self._optimizer.load_state_dict(_loaded(job.resume[OPTIMIZER_FILE]))
        elif job.init_adapter:
            self._adapter.load(job.init_adapter)
        settings, scale = self._policy.settings, self._vae.config.scale_factor_spatial
        self._size = settings.height // scale, settings.width // scale

    def rollout(self, work: Work) -> Result:
        """Trajectories of a micro-batch: tensors `noisy` and `clean`, and the old units as value."""
        order = convert(work.payload, RolloutOrder)
        seeds = [Seeds(*pair) for pair in order.seeds]
        job, text = self._job, self._text(order.prompts)
        with self._adapter.disabled() if order.base else nullcontext():
            made = rollout(
                self._policy, text, seeds, self._size, job.kernel, job.units,
                on_chunk=lambda *_: _stop_if_unneeded(work),
            )  # fmt: skip
        (task,) = work.tasks
        return Result({f"{task.id}.noisy": made.noisy, f"{task.id}.clean": made.clean}, {task.id: made.units.tolist()})

    def decode(self, work: Work) -> Result:
        """The `frames` of a micro-batch, uint8 [B, T, H, W, 3] on the host, decoded chunk by chunk."""
        (task,) = work.tasks
        (clean,) = work.tensors.values()
        decoder = StreamingDecoder(self._vae)
        frames = []
        for chunk in clean.to(self._job.device).split(self._policy.settings.frames_per_chunk, dim=2):
            _stop_if_unneeded(work)
            frames.append(decoder.decode(chunk).cpu())
        return Result({f"{task.id}.frames": torch.cat(frames, dim=1)})

    def reference(self, work: Work) -> Result:
        """The frozen policy's `velocity` [K, B, C, F, H, W] at each replayed step of a micro-batch."""
        order = convert(work.payload, ForwardOrder)
        with self._adapter.disabled():
            velocity = self._replayer(work, order).velocities()
        return Result({f"{work.tasks[0].id}.velocity": velocity})

    def forward(self, work: Work) -> Result:
        """The units [B, K, M] of a micro-batch under the current weights, as value."""
        units = self._replayer(work, convert(work.payload, ForwardOrder)).forward_only()
        return Result(values={work.tasks[0].id: units.tolist()})

    def replay(self, work: Work) -> Result:
        """The `gradients` [B, W, P] of a micro-batch: weighted sums; their weights and the units as value."""
        order = convert(work.payload, ReplayOrder)
        old = None if order.old_units is None else torch.tensor(order.old_units, dtype=torch.float64)
        trained = torch.tensor(order.trained)

        def weigh(units: Tensor, steps: slice) -> Tensor:
            now = units.cpu().double()
            return self._job.weights(now, now[:, :, 0] if old is None else old[:, steps], trained[:, steps])

        made = self._replayer(work, order).replay(self._adapter, weigh)
        finite = made.sums.isfinite().flatten(1).all(dim=1)
        value = Replayed(made.units.tolist(), made.weights.tolist(), finite.tolist())
        return Result({f"{work.tasks[0].id}.gradients": made.sums}, {work.tasks[0].id: value})

    def update(self, work: Work) -> Result:
        """One optimizer step of the gang, from the unit gradients that lie here and those of the other ranks.

        The tensor `total` is their sum over the gang, in float32 [P] or with `exact` as int64 fixed point [P + 1].
        Without coefficients, that is, if no candidate was kept, it is empty, and there is no step.
        """
        (task,) = work.tasks
        total = self._sum(work, convert(work.payload, UpdateOrder))
        return Result({f"{task.id}.total": total}, {task.id: self._step(total)})

    def catch_up(self, work: Work) -> Result:
        """The optimizer step of an update that this rank had no part in, from its `total`; the same value."""
        (task,), (total,) = work.tasks, work.tensors.values()
        return Result(values={task.id: self._step(total.to(self._job.device))})

    def _step(self, total: Tensor) -> dict[str, Any]:
        """Descend along the sum of the gradients, unless it is empty; the value of an update."""
        made = StepMetrics(0.0, self._optimizer.lr, False)
        if len(total):
            made = self._optimizer.step(from_fixed(total) if self._job.exact else total)
        return {**made._asdict(), "skipped": self._optimizer.skipped, "sha256": self._optimizer.weights_sha256()}

    def _sum(self, work: Work, order: UpdateOrder) -> Tensor:
        assert work.sum_over_ranks is not None, "an update is a gang task"
        exact, size = self._job.exact, self._adapter.size
        dtype = torch.int64 if exact else self._adapter.vector.dtype
        if not order.coefficients:
            return torch.empty(0, dtype=dtype, device=self._job.device)
        terms = sum(len(rows) for rows in order.coefficients.values())
        total = torch.zeros(size + exact, dtype=dtype, device=self._job.device)
        for name, gradients in sorted(work.tensors.items()):
            coefficients = torch.tensor(order.coefficients[producer(name)], dtype=torch.float64)
            total += combine_exact(coefficients, gradients, terms) if exact else combine(coefficients, gradients)
        return work.sum_over_ranks(total)

    def export(self, work: Work) -> Result:
        """Write the videos of a micro-batch as mp4 files."""
        order = convert(work.payload, ExportOrder)
        (frames,) = work.tensors.values()
        for path, video in zip(order.paths, frames, strict=True):
            if path:
                write_mp4(Path(path), video.numpy(), fps=self._policy.settings.fps)
        return Result()

    def checkpoint(self, work: Work) -> Result:
        """Write weights and optimizer as a checkpoint, and the adapter in its own format; invalid where it failed."""
        order = convert(work.payload, CheckpointOrder)
        files = {
            ADAPTER_FILE: _saved(self._adapter.flatten().cpu()),
            OPTIMIZER_FILE: _saved(self._optimizer.state_dict()),
        }
        (task,) = work.tasks
        try:
            path = checkpoint.save(Path(order.root), order.step, files, order.meta)
            self._adapter.save(Path(order.adapter))
        except CheckpointError as error:
            return Result(invalid={task.id: str(error)})
        return Result(values={task.id: str(path)})

    def _replayer(self, work: Work, order: ForwardOrder | ReplayOrder) -> Replayer:
        parts = {name.rpartition(".")[2]: tensor.to(self._job.device) for name, tensor in work.tensors.items()}
        return Replayer(
            policy=self._policy,
            trajectory=Trajectory(parts["noisy"], parts["clean"], torch.empty(0)),
            text=self._text(order.prompts),
            units=self._job.units,
            steps=order.steps,
            order=self._job.replay_order,
            reference=parts.get("velocity"),
            is_unneeded=work.is_unneeded,
        )

    def _text(self, prompts: Sequence[str]) -> Tensor:
        return torch.stack([self._texts[prompt] for prompt in prompts]).to(self._job.device)


class RankEngine:
    """Routes each kind of task to the engine of its role.

    Its judges rest where it goes on to train, if `judges_rest`. That is for schedules that judge all before they train:
    elsewhere a replay may come between two judgements, and to wake a judge takes seconds.
    """

    def __init__(self, policy: PolicyEngine | None, judge: JudgeEngine | None, *, judges_rest: bool = False) -> None:
        self._judge = judge
        self._judges_rest = judges_rest
        self._methods: dict[Kind, Callable[[Work], Result]] = {}
        if policy:
            self._methods |= {
                Kind.ROLLOUT: policy.rollout,
                Kind.DECODE: policy.decode,
                Kind.EXPORT: policy.export,
                Kind.REFERENCE: policy.reference,
                Kind.OLD_LOG_PROB: policy.forward,
                Kind.FORWARD: policy.forward,
                Kind.REPLAY: policy.replay,
                Kind.UPDATE: policy.update,
                Kind.CATCH_UP: policy.catch_up,
                Kind.CHECKPOINT: policy.checkpoint,
            }
        if judge:
            self._methods |= dict.fromkeys(JUDGE_KINDS, judge.judge)

    def run(self, work: Work) -> Result:
        """See `Engine`."""
        kind = work.tasks[0].kind
        if kind is Kind.REPLAY and self._judge and self._judges_rest:
            self._judge.rest()
        return self._methods[kind](work)

    def close(self) -> None:
        """Give back what the judges hold; called once, after the last work."""
        if self._judge:
            self._judge.close()


def _stop_if_unneeded(work: Work) -> None:
    """Asked between two chunks; the question is also a sign of progress."""
    if work.is_unneeded():
        raise Cancelled


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
