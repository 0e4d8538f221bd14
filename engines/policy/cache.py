"""Keys and values of the clean frames a causal model has already made.

Keys are stored after RoPE with the absolute frame index, so they never move. Everything here is detached: a chunk's
live keys never enter the cache, hence no gradient crosses chunks. Stored tensors are never changed in place, so a
context that read them stays valid while the cache grows (gradient checkpointing reads it again in the backward).
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor


class Past(NamedTuple):
    """Runs of cached frames of one layer, oldest first: tensors [B, tokens, heads, head_dim]."""

    keys: list[Tensor]
    values: list[Tensor]


class _Held(NamedTuple):
    """All cached frames of one layer: tensors [B, tokens, heads, head_dim]."""

    keys: Tensor
    values: Tensor


class KVCache:
    """The cache of one micro-batch of videos.

    `frames` lists the absolute indices held. `sink` first frames and the last `recent` frames are kept when the cache
    grows (`recent=None`: every frame).
    """

    def __init__(self, layers: int, tokens_per_frame: int, *, sink: int = 0, recent: int | None = None) -> None:
        self.frames: tuple[int, ...] = ()
        self._tokens = tokens_per_frame
        self._sink = sink
        self._recent = recent
        self._layers: list[_Held | None] = [None] * layers

    def past(self, frames: Sequence[int]) -> tuple[Past, ...]:
        """Cached keys and values of `frames` (ascending, all of them held), a `Past` a layer, as views of the store."""
        assert set(frames) <= set(self.frames), f"frames {list(frames)} are not all in the cache {self.frames}"
        places = [self.frames.index(frame) for frame in frames]
        # Frames that lie side by side come out as one view, so that the usual case copies nothing.
        runs = [
            [place for _, place in run] for _, run in groupby(enumerate(places), key=lambda pair: pair[1] - pair[0])
        ]
        spans = [slice(run[0] * self._tokens, (run[-1] + 1) * self._tokens) for run in runs]
        return tuple(
            Past([held.keys[:, span] for span in spans], [held.values[:, span] for span in spans])
            for held in self._layers
            if held is not None
        )

    def write(self, layer: int, frames: range, key: Tensor, value: Tensor) -> None:
        """Add the clean `frames`' keys and values [B, tokens, heads, head_dim] of one layer.

        Layers are written in order; the last one makes the frames part of the cache.
        """
        assert not self.frames or frames.start == self.frames[-1] + 1, "frames must follow the cached ones"
        names = (*self.frames, *frames)
        first_recent = 0 if self._recent is None else frames.stop - self._recent
        kept = [place for place, frame in enumerate(names) if frame < self._sink or frame >= first_recent]
        held = self._layers[layer]
        keys, values = key.detach(), value.detach()
        if held is not None:
            keys, values = torch.cat([held.keys, keys], dim=1), torch.cat([held.values, values], dim=1)
        if len(kept) < len(names):
            keys, values = _take(keys, kept, self._tokens), _take(values, kept, self._tokens)
        self._layers[layer] = _Held(keys, values)
        if layer == len(self._layers) - 1:
            self.frames = tuple(names[place] for place in kept)


def _take(tensor: Tensor, places: list[int], tokens: int) -> Tensor:
    frames: Tensor = tensor.unflatten(1, (-1, tokens))
    return frames[:, places].flatten(1, 2)
