"""What the ranks of a run need of memory, and what cache each judge gets, before anything is loaded.

Invariant: on a GPU that judges, everything together stays within a share of it, whichever part is busy. `prepare` and
`command` call it.
"""

import math
from collections import Counter
from collections.abc import Mapping
from functools import cached_property

import torch

from algorithms.train import Run
from asyncflow.errors import ConfigError
from engines.gradients import distinct
from engines.memory import Estimate, Workload, estimate, gib
from engines.policy import CausalSettings
from engines.rank import compute_dtype, pick_device
from engines.rewards.base import Needs

SHARE = 0.92
"""Of a GPU that judges, what is given out; the rest is for contexts, graphs and fragmentation of each process on it."""
CACHE = "judge KV cache"


class RunMemory:
    """What each rank of a run needs: the policy's parts, what the judges hold, and caches for these from what is left.

    A rank's parts are counted as if all were at their largest at once, so none has to give anything back in time.
    Computed when it is asked for, which is before anything is loaded.
    """

    def __init__(self, run: Run, settings: CausalSettings) -> None:
        self._run = run
        self._settings = settings

    @cached_property
    def policy(self) -> Estimate:
        """What a policy rank's own work needs. Raises `ModelError`."""
        return estimate(self._run.config.folder, workload(self._run, self._settings))

    @cached_property
    def needs(self) -> dict[str, Needs]:
        """By the name of each reward, of those that need any. Raises ConfigError."""
        height, width, device = self._settings.height, self._settings.width, self._device(self._run.cluster.judges[0])
        made = {}
        for reward in self._run.rewards:
            try:
                made[reward.name] = reward.reward.needs(height, width, torch.device(device))
            except ConfigError as error:
                raise ConfigError(f"--reward {reward.name}: {error}") from None
        return {name: needs for name, needs in made.items() if needs.held}

    def grants(self, rank: int) -> dict[str, int]:
        """The bytes of the cache of each reward that `needs` any, on a rank that judges. Raises ConfigError."""
        device = self._device(rank)
        if not device.startswith("cuda"):  # a CPU's memory is not looked at
            return {name: needs.most_cache for name, needs in self.needs.items()}
        if not self.needs:
            return {}
        given = int(SHARE * device_memory(device))
        others = self._rank(rank, dict.fromkeys(self.needs, 0))
        least = self._rank(rank, {name: needs.least_cache for name, needs in self.needs.items()})
        if least.total > given:
            raise ConfigError(self._too_much(rank, least))
        return split(given - others.total, self.needs)

    def check(self) -> None:
        """Raises ConfigError where a rank's GPU has less than the rank needs, with what to do."""
        for rank in self._run.cluster.judges:
            self.grants(rank)
        for rank in self._run.cluster.policy:
            device = self._device(rank)
            if device.startswith("cuda") and self.policy.total > device_memory(device):
                raise ConfigError(
                    f"--device: {device} has {gib(device_memory(device))}, and a policy rank needs about "
                    f"{self.policy}; {self.policy.advice}"
                )

    def __str__(self) -> str:
        """A line for each kind of rank."""
        lines = []
        for rank in self._run.cluster.ranks:
            judges = rank in self._run.cluster.judges
            needed = self._rank(rank, self.grants(rank) if judges else {})
            if needed.total:
                lines.append(f"{self._kind(rank)} needs about {needed}")
        return "\n".join(dict.fromkeys(lines))

    def _device(self, rank: int) -> str:
        return pick_device(self._run.config.device, rank)

    def _kind(self, rank: int) -> str:
        roles = {"policy": rank in self._run.cluster.policy, "reward": rank in self._run.cluster.judges and self.needs}
        return f"a {' and '.join(role for role, has in roles.items() if has)} rank"

    def _rank(self, rank: int, caches: Mapping[str, int]) -> Estimate:
        """A rank's terms, with the judges of `caches`."""
        terms = Counter(self.policy.terms if rank in self._run.cluster.policy else {})
        for name, cache in caches.items():
            terms.update({**self.needs[name].held, CACHE: cache})
        return Estimate(dict(terms))

    def _too_much(self, rank: int, least: Estimate) -> str:
        device = self._device(rank)
        size = device_memory(device)
        has = f"{device} has {gib(size)}, {SHARE:.0%} of which can be given out"
        for name, needs in self.needs.items():
            alone = Estimate({**needs.held, CACHE: needs.least_cache})
            if alone.total > SHARE * size:
                return (
                    f"--reward: {has}, and {name} alone needs at least {alone}; a judge over several GPUs is not "
                    "supported yet: serve it yourself (vllm serve --tensor-parallel-size N) and give its url, or "
                    f"{alone.advice}"
                )
        apart = "; or choose --schedule merged-replay, whose reward ranks hold no policy"
        return (
            f"--reward: {has}, and {self._kind(rank)} needs at least {least}; {least.advice}"
            f"{apart if rank in self._run.cluster.policy else ''}"
        )


def split(room: int, needs: Mapping[str, Needs]) -> dict[str, int]:
    """The caches of judges that share `room` bytes, which are enough for the least of each.

    Beyond its least each gets the same share of what it could use, at most all of that.
    """
    least = sum(wanted.least_cache for wanted in needs.values())
    more = sum(wanted.most_cache - wanted.least_cache for wanted in needs.values())
    assert room >= least, "too little for the least of each"
    rest = min(room - least, more)
    return {
        name: wanted.least_cache + (rest * (wanted.most_cache - wanted.least_cache) // more if more else 0)
        for name, wanted in needs.items()
    }


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


def device_memory(device: str) -> int:
    """Bytes of a GPU's memory."""
    size: int = torch.cuda.get_device_properties(device).total_memory
    return size
