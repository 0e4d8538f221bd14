"""Recomputes a trajectory's units and their gradients, from what was recorded alone: no score is among the inputs.

Every chunk reads a cache made of the recorded clean chunks before it, without gradient. The orders give the same up to
rounding, and differ in what one forward holds:

* `by-chunk`: one chunk at one denoising step. The batch is the rollout's, so under the rollout's weights the first
  units are the recorded bits; and activations are the fewest. A step's units are known after the last chunk only, so
  until then each has a gradient of its own.
* `batched`: one chunk at all steps.
* `packed`: all chunks at one step. Its units are known before its backward, which therefore adds at once to the few
  sums that are asked for.

Engines of policy ranks call it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from asyncflow.engine import Cancelled
from engines.adapter import Adapter, GradientSum
from engines.gradients import compress, distinct
from engines.kernel import Units, chunk_units
from engines.policy import KVCache, Policy
from engines.rollout import Trajectory

Order = Literal["by-chunk", "batched", "packed"]
Weigh = Callable[[Tensor, slice], Tensor]
"""The weights [B, W, k, M] float64 for the units [B, k, M] of those of the replayed steps."""


class Replay(NamedTuple):
    """Units [B, K, M] float32, and the sums [B, W, P] of their gradients by `weights` [B, W, K, M] float64."""

    units: Tensor
    weights: Tensor
    sums: Tensor


@dataclass(frozen=True, kw_only=True)
class Replayer:
    """A replay of one trajectory at the denoising `steps`, K of them, which give their order.

    text [B, L, D] as in the rollout; `reference` [K, B, C, F, H, W] is what `velocities` gave under the frozen policy,
    for units that need it. `is_unneeded` is asked before each forward; where it agrees, `Cancelled` is raised.
    """

    policy: Policy
    trajectory: Trajectory
    text: Tensor
    units: Units
    steps: Sequence[int]
    order: Order = "by-chunk"
    reference: Tensor | None = None
    is_unneeded: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        stochastic = range(len(self.trajectory.noisy) - 1)
        assert set(self.steps) <= set(stochastic), f"only steps {stochastic} are stochastic"

    def replay(self, adapter: Adapter, weigh: Weigh) -> Replay:
        """Units and the weighted sums of their gradients. A candidate's do not depend on the others of its batch."""
        return self._step_by_step(adapter, weigh) if self.order == "packed" else self._chunk_by_chunk(adapter, weigh)

    @torch.no_grad()
    def forward_only(self) -> Tensor:
        """The units [B, K, M] of `replay`, the same bits; without reference only those that need none."""
        units: list[Tensor] = []
        for part in self._parts():
            made = self._units(part)
            units = units or list(made.new_zeros(len(self.steps), *made[:, 0].shape))
            for place in part.places:
                units[place] = units[place] + made[:, place - part.places.start]
        return torch.stack(units, dim=1)

    @torch.no_grad()
    def velocities(self) -> Tensor:
        """The policy's predictions [K, B, C, F, H, W]."""
        made = torch.empty_like(self.trajectory.noisy[: len(self.steps)])
        for part in self._parts():
            made[part.places.start : part.places.stop, :, :, part.frames] = self._velocity(part).transpose(0, 1)
        return made

    def _chunk_by_chunk(self, adapter: Adapter, weigh: Weigh) -> Replay:
        batch, count = len(self.trajectory.clean), self.units.per_step
        units = torch.zeros(batch, len(self.steps), count, device=self.policy.device)
        gradients = torch.zeros(*units.shape, adapter.size, device=self.policy.device)
        for part in self._parts():
            places = slice(part.places.start, part.places.stop)
            with torch.enable_grad(), adapter.recording():
                made = self._units(part)
                for unit in range(count):
                    total = GradientSum(gradients[:, places, unit].flatten(0, 1))
                    adapter.backward(made[:, :, unit].flatten(), [total], keep_graph=unit + 1 < count)
            units[:, places] += made.detach()
        weights = distinct(weigh(units, slice(None)))
        return Replay(units, weights, compress(gradients.flatten(1, 2), weights.flatten(2)))

    def _step_by_step(self, adapter: Adapter, weigh: Weigh) -> Replay:
        batch, count = len(self.trajectory.clean), self.units.per_step
        units, weights = [], []
        sums = {0: torch.zeros(batch, adapter.size, device=self.policy.device)}
        for part in self._parts():
            with torch.enable_grad(), adapter.recording():
                made = self._units(part)
                units.append(made.detach())
                weights.append(weigh(units[-1], slice(part.places.start, part.places.stop)))
                of_step = weights[-1].squeeze(2).to(sums[0])
                for row in range(1, of_step.shape[1]):  # a sum of its own from the first weights that differ
                    if row not in sums and not torch.equal(of_step[:, row], of_step[:, 0]):
                        sums[row] = sums[0].clone()
                for unit in range(count):
                    columns = ((total, of_step[:, row, unit]) for row, total in sums.items())
                    if asked := [GradientSum(total, column) for total, column in columns if column.any()]:
                        adapter.backward(made[:, 0, unit], asked, keep_graph=unit + 1 < count)
        rows = sorted(sums)
        return Replay(
            torch.cat(units, dim=1),
            torch.cat(weights, dim=2)[:, rows],
            torch.stack([sums[row] for row in rows], dim=1),
        )

    def _parts(self) -> Iterator["_Part"]:
        """Every forward of the replay; what follows a chunk is given once its recorded latents are in the cache."""
        settings, clean, all_steps = self.policy.settings, self.trajectory.clean, range(len(self.steps))
        packed = self.order == "packed"
        cache = self.policy.new_cache(*clean.shape[-2:], recent=settings.latent_frames if packed else None)
        for chunk in settings.chunks:
            if self.order == "batched":
                yield self._part(all_steps, (chunk,), cache)
            elif not packed:
                yield from (self._part(all_steps[place : place + 1], (chunk,), cache) for place in all_steps)
            if chunk.stop < settings.latent_frames:
                self._go_on()
                self.policy.write_context(clean[:, :, chunk.start : chunk.stop], self.text, cache, chunk.start)
        if packed:
            yield from (self._part(all_steps[place : place + 1], settings.chunks, cache) for place in all_steps)

    def _part(self, places: range, chunks: tuple[range, ...], cache: KVCache) -> "_Part":
        self._go_on()
        return _Part(places, chunks, cache)

    def _go_on(self) -> None:
        if self.is_unneeded():
            raise Cancelled

    def _velocity(self, part: "_Part") -> Tensor:
        """The policy's predictions [B, k, C, f, H, W] for the part's frames at each of its steps."""
        steps = [self.steps[place] for place in part.places]
        x = torch.stack([self.trajectory.noisy[step, :, :, part.frames] for step in steps], dim=1).flatten(0, 1)
        sigmas = [self.policy.settings.sigmas[step] for step in steps]
        if self.order == "packed":
            made = self.policy.packed_velocity(x, sigmas[0], self.text, part.cache)
        else:
            made = self.policy.velocity(x, sigmas, self.text, part.cache, part.frames.start)
        return made.unflatten(0, (-1, len(steps)))

    def _units(self, part: "_Part") -> Tensor:
        """The contribution [B, k, M] of the part's chunks to the units of its steps."""
        velocity, first = self._velocity(part), part.frames.start
        made = []
        for place, of_step in zip(part.places, velocity.unbind(dim=1), strict=True):
            parts = [
                self._of_chunk(place, chunk, of_step[:, :, chunk.start - first : chunk.stop - first])
                for chunk in part.chunks
            ]
            made.append(torch.stack(parts).sum(dim=0))
        return torch.stack(made, dim=1)

    def _of_chunk(self, place: int, chunk: range, velocity: Tensor) -> Tensor:
        """The contribution [B, M] of one chunk at one step."""
        step, span = self.steps[place], slice(chunk.start, chunk.stop)
        return chunk_units(
            self.units,
            len(chunk) / self.policy.settings.latent_frames,
            self.trajectory.noisy[step, :, :, span],
            velocity,
            self.trajectory.noisy[step + 1, :, :, span],
            *self.policy.settings.sigmas[step : step + 2],
            reference=None if self.reference is None else self.reference[place, :, :, span],
        )


class _Part(NamedTuple):
    """One forward: chunks that lie side by side, at the steps in those places of `Replayer.steps`."""

    places: range
    chunks: tuple[range, ...]
    cache: KVCache

    @property
    def frames(self) -> slice:
        """The frames of the chunks."""
        return slice(self.chunks[0].start, self.chunks[-1].stop)
