"""DanceGRPO (Xue et al., arXiv 2505.07818; code XueZeyue/DanceGRPO at 15cc71d) on a few-step autoregressive model.

Group-relative policy optimisation over the denoising steps: each candidate's chunks share one ratio a step, and the
clipped surrogate is the authors' (fastvideo/train_grpo_hunyuan.py:436-479). Where the defaults differ from the authors'
recipe, and why:

* `kernel` consistency, not their SDE step: it is the exact policy of the re-noising few-step sampler these models were
  distilled for, while the SDE step would change the sampler. `dance-sde` is theirs.
* `step_fraction` 1.0, not 0.6: of 4 denoising steps 3 are stochastic, and 0.6 would train one.
* `chunk_reduce` mean weighs chunks so that log p is the mean over the whole clip, as theirs; sum is StageBreaker's
  Eq. 4.
* `lr` 3e-4 with LoRA, as in their LoRA recipe; their full fine-tuning uses 1e-5.
* `lora_rank` and `lora_alpha` 32, on every linear of a block, which are LongLive's targets; theirs are rank 128 and
  alpha 256 on the attention's.
* `group_size` 8 and `mini_batches` 1, not 12 to 24 and mostly 2: the toy trains in minutes, and the only mini-batch's
  ratio starts at 1, so nothing is clipped.
* `share_noise` shares the initial noise within a group; theirs shares it between all prompts of a rank as well, which
  would tie results to the rank count.
* `statistics` group, as in their video recipe; global is their image recipes'.

Several rewards have advantages and clipped losses of their own, which are weighted (theirs, :374-409 and 450-477), so
their scales do not matter. With `weighting` before, the weighted sum of the raw rewards is normalised instead, as
Flow-GRPO (flow_grpo/rewards.py, multi_score) has it and Pref-GRPO for its win rates: there a scale is a weight, too.
"""

import functools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor

from algorithms.algorithm import GroupAdvantages, Loss, enough_valid, valid_candidates
from algorithms.command import command
from algorithms.config import RunConfig
from algorithms.kernels import ConsistencyKernel, DanceSDEKernel
from asyncflow.errors import ConfigError
from asyncflow.options import run
from engines.kernel import Kernel, LogProbUnits


class DanceGRPOConfig(RunConfig, frozen=True, kw_only=True):
    """DanceGRPO's own keys."""

    kernel: Annotated[
        Literal["consistency", "dance-sde"], Meta(description="Policy of a stochastic denoising step.")
    ] = "consistency"
    eta: Annotated[float, Meta(gt=0, description="Noise of the dance-sde kernel.")] = 0.3
    chunk_reduce: Annotated[
        Literal["mean", "sum"], Meta(description="How the chunks' log-probabilities make the clip's.")
    ] = "mean"
    clip: Annotated[float, Meta(gt=0, description="The ratio is clipped to 1 - clip .. 1 + clip.")] = 1e-4
    clip_high: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="Clip above 1 instead, for asymmetric clipping.")
    ] = None
    dual_clip: Annotated[
        Annotated[float, Meta(gt=1)] | None,
        Meta(description="Ratio from which a negative advantage trains no more; none by default."),
    ] = None
    kl: Annotated[float, Meta(ge=0, description="Weight of the KL to the policy without its LoRA; 0 for none.")] = 0.0
    advantage_clamp: Annotated[float, Meta(gt=0, description="Advantages are clamped to this size.")] = 5.0
    statistics: Annotated[
        Literal["group", "global"], Meta(description="Whose mean and deviation normalise the rewards.")
    ] = "group"
    weighting: Annotated[
        Literal["after", "before"],
        Meta(description="Weigh rewards after each is normalised by itself, or before, and normalise their sum."),
    ] = "after"
    step_fraction: Annotated[
        float, Meta(gt=0, le=1, description="Share of the stochastic steps that is trained, drawn for each candidate.")
    ] = 1.0
    best_of_n: Annotated[
        int, Meta(ge=0, description="Train only the best and worst halves of this many candidates a group; 0 for all.")
    ] = 0
    drop_zero_advantages: Annotated[
        bool, Meta(description="Leave candidates whose advantages are all 0 out of the loss and its denominator.")
    ] = False
    share_noise: Annotated[bool, Meta(description="Give the candidates of a group one initial noise.")] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of_n % 2 or self.best_of_n > self.group_size:
            raise ConfigError(
                f"--best-of-n: expected an even number up to --group-size {self.group_size}, got {self.best_of_n}"
            )
        if self.dual_clip is not None and self.dual_clip <= 1 + (self.clip_high or self.clip):
            raise ConfigError(f"--dual-clip: expected a ratio beyond the clip, got {self.dual_clip:g}")


@dataclass(frozen=True)
class DanceGRPO:
    """The algorithm; `reward_weights` [R] are the rewards'. One of weight 0 has no part in it, valid or not."""

    config: DanceGRPOConfig
    reward_weights: tuple[float, ...]

    @functools.cached_property
    def kernel(self) -> Kernel:
        """See `Algorithm`."""
        return ConsistencyKernel() if self.config.kernel == "consistency" else DanceSDEKernel(self.config.eta)

    @functools.cached_property
    def units(self) -> LogProbUnits:
        """The log-probability of a candidate's transition at each step, and its KL where the loss has one."""
        return LogProbUnits(self.kernel, self.config.chunk_reduce, with_kl=self.config.kl > 0)

    @property
    def global_statistics(self) -> bool:
        """See `Algorithm`."""
        return self.config.statistics == "global"

    @property
    def share_noise(self) -> bool:
        """See `Algorithm`."""
        return self.config.share_noise

    @functools.cached_property
    def _weights(self) -> tuple[float, ...]:
        """Of each column of the advantages, in the loss: those of the rewards that count or, weighted before, 1."""
        return (1.0,) if self.config.weighting == "before" else tuple(w for w in self.reward_weights if w)

    def _columns(self, rewards: Tensor) -> Tensor:
        """What is normalised of rewards [G, R]: those that count or their weighted sum, NaN where one is."""
        weights = torch.tensor(self.reward_weights, dtype=rewards.dtype)
        counted, weights = rewards[:, weights > 0], weights[weights > 0]
        return counted @ weights[:, None] if self.config.weighting == "before" else counted

    def trained_steps(self, stochastic_steps: int, seeds: Sequence[int]) -> Tensor:
        """The first int((K - 1) * fraction) of a random order of the steps (train_grpo_hunyuan.py:411-431)."""
        count = int(stochastic_steps * self.config.step_fraction)
        if not count:
            raise ConfigError(
                f"--step-fraction: {self.config.step_fraction} of {stochastic_steps} stochastic steps trains none; "
                f"give at least {math.ceil(100 / stochastic_steps) / 100:g}"
            )
        trained = torch.zeros(len(seeds), stochastic_steps, dtype=torch.bool)
        for place, seed in enumerate(seeds):
            trained[place, random.Random(seed).sample(range(stochastic_steps), count)] = True
        return trained

    def advantages(self, group: int, rewards: Mapping[int, Tensor]) -> GroupAdvantages:
        """(r - mean) / (unbiased std + 1e-8), clamped; best-of-n then keeps the extremes of the weighted sum.

        From train_grpo_hunyuan.py:374-409, but exactly 0 where all rewards are equal. A candidate of which any reward
        that counts is invalid (its `on_invalid` may have made it so) is not kept, nor a group without `enough_valid`.
        """
        columns = {name: self._columns(of_group) for name, of_group in rewards.items()}
        own = columns[group]
        valid = valid_candidates(own)
        pool = torch.cat([of_group[valid_candidates(of_group)] for of_group in columns.values()])
        if not enough_valid(valid):
            return GroupAdvantages(torch.zeros_like(own), torch.zeros_like(valid))
        centred = torch.where(pool.amax(dim=0) == pool.amin(dim=0), 0.0, own - pool.mean(dim=0))
        advantages = centred / (pool.std(dim=0) + 1e-8)
        advantages = advantages.where(valid[:, None], torch.zeros(()).double())
        advantages = advantages.clamp(-self.config.advantage_clamp, self.config.advantage_clamp)
        kept = self._best_and_worst(advantages, valid)
        return GroupAdvantages(advantages, kept & advantages.any(dim=1) if self.config.drop_zero_advantages else kept)

    def _best_and_worst(self, advantages: Tensor, valid: Tensor) -> Tensor:
        half = min(self.config.best_of_n, int(valid.sum())) // 2
        if not half:
            return valid
        score = advantages @ torch.tensor(self._weights, dtype=advantages.dtype)
        ranked = [i for i in score.argsort(stable=True).tolist() if valid[i]]
        kept = torch.zeros_like(valid)
        kept[ranked[:half] + ranked[-half:]] = True
        return kept

    @property
    def _range(self) -> tuple[float, float, float]:
        """The ratios at which the surrogate is clipped: below 1, above 1, and where A < 0 far above 1."""
        config = self.config
        return 1 - config.clip, 1 + (config.clip_high or config.clip), config.dual_clip or math.inf

    def weights(self, units: Tensor, old_units: Tensor, trained: Tensor) -> Tensor:
        """g+ and g- (StageBreaker, Eq. 7): rho where a positive, and where a negative advantage clips nothing.

        They are alike while no ratio is clipped. The sign of an advantage decides which of them its surrogate has, so
        with several rewards both may count. The KL has a sum of its own, all of whose steps count alike.
        """
        low, high, dual = self._range
        ratio = (units[:, :, 0] - old_units).exp()
        sides = (ratio <= high, (ratio >= low) & (ratio <= dual))
        made = units.new_zeros(len(units), len(sides) + units.shape[2] - 1, *units.shape[1:])
        for row, side in enumerate(sides):
            made[:, row, :, 0] = torch.where(side & trained, ratio, 0.0)
        if self.config.kl:
            made[:, len(sides), :, 1] = trained
        return made

    def loss(self, units: Tensor, old_units: Tensor, advantages: Tensor, trained: Tensor) -> Loss:
        """mean max(-A rho, -A clip(rho)), one clipped loss a column of A, weighted (train_grpo_hunyuan.py:436-479).

        With a dual clip (Ye et al., arXiv 1912.09729, Eq. 5) no more than -A dual where A < 0. With a KL, plus its
        weight times the mean KL (as Flow-GRPO adds it, scripts/train_sd3.py:894-899).
        """
        low, high, dual = self._range
        ratio = (units[:, :, 0] - old_units).exp()
        total = torch.zeros((), dtype=units.dtype)
        for advantage, weight in zip(advantages.T[:, :, None], self._weights, strict=True):
            surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))
            if self.config.dual_clip:
                surrogate = torch.where((advantage < 0) & (ratio > dual), -advantage * dual, surrogate)
            total = total + weight * surrogate[trained].mean()
        inside, log_ratio = ratio.detach()[trained], (units.detach()[:, :, 0] - old_units)[trained]
        metrics = {
            "actor/ratio_mean": inside.mean().item(),
            "actor/ratio_std": inside.std(unbiased=False).item(),
            "actor/pg_clipfrac": ((inside < low) | (inside > high)).double().mean().item(),
            "actor/ppo_kl": -log_ratio.mean().item(),
        }
        if self.config.kl:
            divergence = units[:, :, 1][trained].mean()
            total = total + self.config.kl * divergence
            metrics["actor/kl_loss"] = divergence.item()
        return Loss(total, {"actor/loss": total.item(), **metrics})


main = command(
    "dancegrpo",
    DanceGRPOConfig,
    DanceGRPO,
    module="algorithms.dancegrpo",
    summary="Train a LoRA with DanceGRPO; without options the built-in toy, on two ranks.",
)

if __name__ == "__main__":
    raise SystemExit(run(main))
