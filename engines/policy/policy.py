"""A causal video policy: velocities of one chunk given the clean chunks before it.

Tensors are [B, C, F, H, W] in float32 whatever the model's own dtype; the model's timestep is 1000 sigma. Chunk by
chunk with a cache, all chunks at once over the same cache (`packed_velocity`), and clean and noisy chunks in one
forward (`teacher_forced_velocity`) compute the same function. Used by the rollout, replay and pre-training engines.
"""

from collections.abc import Sequence

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from engines.policy.cache import KVCache
from engines.policy.causal import CausalContext, Segment, active, make_causal
from engines.policy.settings import TRAIN_TIMESTEPS, CausalSettings


class Policy:
    """A Wan transformer made causal in place, with the sampler it was distilled for."""

    def __init__(self, model: WanTransformer3DModel, settings: CausalSettings) -> None:
        self.model = model
        self.settings = settings
        self._rope = make_causal(model)
        self._masks: dict[tuple[int, int], Tensor] = {}

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def latent_shape(self, batch: int, height: int, width: int) -> tuple[int, int, int, int, int]:
        """Shape of the whole clips' latents, for latents of `height` x `width`."""
        return batch, self.model.config.in_channels, self.settings.latent_frames, height, width

    def new_cache(self, height: int, width: int, *, recent: int | None = None) -> KVCache:
        """An empty cache for latents of `height` x `width`.

        `recent` frames stay in it beside the sink; by default as many as the attention window can still reach.
        """
        settings = self.settings
        if recent is None and settings.local_attn_size != -1:
            recent = settings.local_attn_size - settings.sink_size - settings.frames_per_chunk
        return KVCache(
            len(self.model.blocks), self._tokens_per_frame(height, width), sink=settings.sink_size, recent=recent
        )

    def velocity(
        self,
        x: Tensor,
        sigma: float | Sequence[float],
        text: Tensor,
        cache: KVCache,
        first_frame: int,
        visible: Sequence[int] | None = None,
    ) -> Tensor:
        """Predicted velocity (noise minus clean) of the noisy chunk `x` that starts at `first_frame`.

        x [B, C, f, H, W]; text [B, L, D]; the cache is only read. `visible` names the cached frames the chunk attends
        to, ascending; by default those of the attention window. Returns float32 [B, C, f, H, W]. With several noise
        levels, x [B * levels, ...] and the result hold each video's chunk at all of them, one video after the other.
        """
        return self._forward(x, sigma, text, cache, first_frame, visible, write=False)

    def packed_velocity(self, x: Tensor, sigma: float, text: Tensor, cache: KVCache) -> Tensor:
        """The velocities of a clip's chunks in one forward, each given the clean frames before it.

        x [B, C, F, H, W] holds every chunk at noise level `sigma`, the cache every clean frame that a chunk sees. Only
        attention goes chunk by chunk, so that there is no mask, and none of the work that one would hide.
        """
        rows, columns = self._token_grid(*x.shape[-2:])
        segments = tuple(
            Segment(len(chunk) * rows * columns, cache.past(self.settings.visible(chunk)))
            for chunk in self.settings.chunks
        )
        context = CausalContext(self._rope.rotation(range(x.shape[2]), rows, columns), segments)
        return self._call(x, *self._levels(sigma, text), context)

    @torch.no_grad()
    def write_context(
        self, clean: Tensor, text: Tensor, cache: KVCache, first_frame: int, visible: Sequence[int] | None = None
    ) -> None:
        """Add the clean chunk [B, C, f, H, W] to the cache, by a forward at timestep 0 that sees what was there."""
        self._forward(clean, 0.0, text, cache, first_frame, visible, write=True)

    def teacher_forced_velocity(
        self, clean: Tensor, noisy: Tensor, sigma: Tensor, text: Tensor, context_sigma: float = 0.0
    ) -> Tensor:
        """Velocities of all noisy chunks in one forward, each given the clean chunks before it.

        clean, noisy [B, C, F, H, W]; sigma [B, F], alike within a chunk; text [B, L, D]. `context_sigma` is the noise
        level the model is told for `clean` (whoever calls has added that noise). Gradients reach the clean tokens as
        well. Returns float32 [B, C, F, H, W].
        """
        frames, height, width = clean.shape[2:]
        rows, columns = self._token_grid(height, width)
        both = torch.cat([clean, noisy], dim=2)
        levels = torch.cat([torch.full_like(sigma, context_sigma), sigma], dim=1)
        timestep = (levels * TRAIN_TIMESTEPS).repeat_interleave(rows * columns, dim=1)
        rotation = self._rope.rotation(range(frames), rows, columns)
        context = CausalContext(
            torch.cat([rotation, rotation]), mask=self._teacher_mask(frames, rows * columns)
        )
        return self._call(both, timestep, text, context)[:, :, frames:]

    def _forward(
        self,
        x: Tensor,
        sigma: float | Sequence[float],
        text: Tensor,
        cache: KVCache,
        first_frame: int,
        visible: Sequence[int] | None,
        write: bool,
    ) -> Tensor:
        _, _, frames, height, width = x.shape
        chunk = range(first_frame, first_frame + frames)
        if visible is None:
            visible = self.settings.visible(chunk)
        rotation = self._rope.rotation(chunk, *self._token_grid(height, width))
        context = CausalContext(
            rotation,
            (Segment(len(rotation), cache.past(visible)),),
            frames=chunk,
            written=cache if write else None,
        )
        return self._call(x, *self._levels(sigma, text), context)

    def _levels(self, sigma: float | Sequence[float], text: Tensor) -> tuple[Tensor, Tensor]:
        """Timesteps and text of a batch in which each video stands once for each noise level."""
        levels = [sigma] if isinstance(sigma, float) else sigma
        timesteps = torch.tensor([level * TRAIN_TIMESTEPS for level in levels], device=text.device)
        repeated = text if len(levels) == 1 else text.repeat_interleave(len(levels), dim=0)
        return timesteps.repeat(len(text)), repeated

    def _call(self, x: Tensor, timestep: Tensor, text: Tensor, context: CausalContext) -> Tensor:
        dtype = self.model.dtype
        velocity: Tensor
        with active(context):
            (velocity,) = self.model(x.to(dtype), timestep, text.to(dtype), return_dict=False)
        return velocity.float()

    def _token_grid(self, height: int, width: int) -> tuple[int, int]:
        _, rows, columns = self.model.config.patch_size
        return height // rows, width // columns

    def _tokens_per_frame(self, height: int, width: int) -> int:
        rows, columns = self._token_grid(height, width)
        return rows * columns

    def _teacher_mask(self, frames: int, tokens: int) -> Tensor:
        """Boolean mask over the tokens of [clean | noisy]: a chunk sees itself and the clean chunks of its window."""
        name = (frames, tokens)
        if name not in self._masks:
            size = self.settings.frames_per_chunk
            mask = torch.zeros(2 * frames, 2 * frames, dtype=torch.bool)
            for first in range(0, frames, size):
                chunk = range(first, min(first + size, frames))
                for offset in (0, frames):
                    rows = slice(offset + chunk.start, offset + chunk.stop)
                    mask[rows, list(self.settings.visible(chunk))] = True
                    mask[rows, rows] = True
            dense = mask.repeat_interleave(tokens, dim=0).repeat_interleave(tokens, dim=1)
            self._masks[name] = dense.to(self.device)
        return self._masks[name]
