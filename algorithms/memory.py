"""Whether a run fits into its ranks' memory, judged before anything is loaded. Called by `prepare` and `command`."""

import math

import torch

from algorithms.train import Run
from asyncflow.errors import ConfigError
from engines.gradients import distinct
from engines.memory import Estimate, Workload, estimate, gib
from engines.policy import CausalSettings
from engines.rank import compute_dtype, pick_device


def policy_rank_memory(run: Run, settings: CausalSettings) -> Estimate:
    """What a policy rank needs. Raises `ModelError`."""
    return estimate(run.config.folder, workload(run, settings))


def workload(run: Run, settings: CausalSettings) -> Workload:
    """What an actor does in a step, which is at least as much as any other policy rank does."""
    config, steps, units = run.config, run.stochastic_steps, run.algorithm.units
    tasks = config.prompts_per_step * math.ceil(config.group_size / config.task_batch)
    actors = run.cluster.actors
    made = torch.zeros(1, steps, units.per_step, dtype=torch.float64)
    sums = run.algorithm.weights(made, made[:, :, 0], torch.ones(1, steps, dtype=torch.bool)).flatten(2)
    if config.mini_batches == 1:  # then nothing is ever clipped
        sums = distinct(sums)
    return Workload(
        settings=settings,
        adapter=config.adapter,
        dtype=compute_dtype(pick_device(config.device, actors[0])),
        order=config.replay_order,
        checkpointing=config.gradient_checkpointing,
        exact=config.exact,
        batch=min(config.task_batch, config.group_size),
        steps=steps,
        units=units.per_step,
        sums=sums.shape[1],
        candidates=math.ceil(tasks / len(actors)) * config.task_batch,
        pending=math.ceil(tasks / config.mini_batches / len(actors)) * config.task_batch,
    )


def check_memory(run: Run, settings: CausalSettings) -> None:
    """Raises ConfigError where a policy rank's GPU has less than it needs. A CPU's memory is not looked at."""
    devices = [pick_device(run.config.device, rank) for rank in run.cluster.policy]
    sizes = {device: device_memory(device) for device in devices if device.startswith("cuda")}
    if not sizes:
        return
    needed, smallest = policy_rank_memory(run, settings), min(sizes, key=lambda device: sizes[device])
    if needed.total > sizes[smallest]:
        raise ConfigError(
            f"--device: {smallest} has {gib(sizes[smallest])}, and a policy rank needs about {needed}; {needed.advice}"
        )


def device_memory(device: str) -> int:
    """Bytes of a GPU's memory."""
    size: int = torch.cuda.get_device_properties(device).total_memory
    return size
