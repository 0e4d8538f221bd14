"""Makes a stock diffusers `WanTransformer3DModel` causal without forking it.

The model calls `rope(hidden_states)` once a forward and hands the result, unread, to every block's self-attention. Here
the replaced rope returns the active `CausalContext` instead, and the replaced processors attend as it says. Without an
active context both do what the stock ones do, bit for bit. Called by `policy.Policy` alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor, WanRotaryPosEmbed
from torch import Tensor, nn

from engines.policy.cache import KVCache, Past


class Segment(NamedTuple):
    """A run of a forward's tokens that attends to itself and to cached frames: `past` has an entry a layer, or none."""

    tokens: int
    past: tuple[Past, ...]


@dataclass(frozen=True)
class CausalContext:
    """What one forward attends to.

    `rotation` is complex64 [tokens, 1, head_dim / 2]; `segments` cover the tokens in order, each blind to the others;
    without any, all tokens see each other as `mask` says, a boolean [queries, keys], True where attention is allowed.
    With `written`, the keys and values of its `frames` go to that cache.
    """

    rotation: Tensor
    segments: tuple[Segment, ...] = ()
    mask: Tensor | None = None
    frames: range = range(0)
    written: KVCache | None = None


_active: ContextVar[CausalContext | None] = ContextVar("causal_context", default=None)


@contextmanager
def active(context: CausalContext) -> Iterator[None]:
    """Every forward in this thread or task attends as `context` says."""
    token = _active.set(context)
    try:
        yield
    finally:
        _active.reset(token)


class CausalRope(nn.Module):
    """Stands in for the model's rope: returns the active context, or what the stock rope returns."""

    def __init__(self, stock: WanRotaryPosEmbed) -> None:
        super().__init__()
        self.stock = stock
        self._rotations: dict[tuple[range, int, int], Tensor] = {}

    def forward(self, hidden_states: Tensor) -> CausalContext | tuple[Tensor, Tensor]:
        context = _active.get()
        return self.stock(hidden_states) if context is None else context

    def rotation(self, frames: range, height: int, width: int) -> Tensor:
        """Rotations of all tokens of `frames`, `height` x `width` tokens each: complex64 [tokens, 1, head_dim / 2]."""
        name = (frames, height, width)
        if name not in self._rotations:
            self._rotations[name] = self._rotation(frames, height, width)
        return self._rotations[name]

    def _rotation(self, frames: range, height: int, width: int) -> Tensor:
        stock = self.stock
        # Both tables repeat every angle twice, once for each half of a rotated pair.
        table = torch.complex(stock.freqs_cos[:, ::2].float(), stock.freqs_sin[:, ::2].float())
        of_time, of_row, of_column = table.split([stock.t_dim // 2, stock.h_dim // 2, stock.w_dim // 2], dim=1)
        shape = (len(frames), height, width, -1)
        parts = [
            of_time[frames.start : frames.stop, None, None].expand(shape),
            of_row[None, :height, None].expand(shape),
            of_column[None, None, :width].expand(shape),
        ]
        return torch.cat(parts, dim=-1).reshape(len(frames) * height * width, 1, -1)


class CausalProcessor:
    """Self-attention of one layer over cached clean frames and the chunk itself."""

    _attention_backend = None
    _parallel_config = None

    def __init__(self, layer: int, stock: WanAttnProcessor) -> None:
        self._layer = layer
        self._stock = stock

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: CausalContext | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        if not isinstance(rotary_emb, CausalContext):
            plain: Tensor = self._stock(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
            return plain
        context = rotary_emb
        heads = (attn.heads, -1)
        query = _rotate(attn.norm_q(attn.to_q(hidden_states)).unflatten(2, heads), context.rotation)
        key = _rotate(attn.norm_k(attn.to_k(hidden_states)).unflatten(2, heads), context.rotation)
        value = attn.to_v(hidden_states).unflatten(2, heads)
        if context.written is not None:
            context.written.write(self._layer, context.frames, key, value)
        if not context.segments:
            attended = self._attend(query, key, value, context.mask)
        elif len(context.segments) == 1:  # without a split, whose backward would copy
            attended = self._attend(query, *self._behind(context.segments[0], key, value))
        else:
            lengths = [segment.tokens for segment in context.segments]
            own = zip(*(states.split(lengths, dim=1) for states in (query, key, value)), strict=True)
            parts = zip(context.segments, own, strict=True)
            attended = torch.cat([self._attend(q, *self._behind(segment, k, v)) for segment, (q, k, v) in parts], dim=1)
        projected: Tensor = attn.to_out[0](attended.flatten(2, 3).type_as(query))
        return projected

    def _behind(self, segment: Segment, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """A segment's own keys and values, behind those of the cached frames that it sees."""
        if not segment.past:
            return key, value
        past = segment.past[self._layer]
        return _continued(past.keys, key), _continued(past.values, value)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        attended: Tensor = dispatch_attention_fn(
            query, key, value, attn_mask=mask, dropout_p=0.0, is_causal=False, backend=self._attention_backend
        )
        return attended


def _continued(past: list[Tensor], own: Tensor) -> Tensor:
    """Cached [B, tokens, ...], then the chunk's own [B * levels, tokens, ...], of which a video's are neighbours."""
    if past and len(own) > len(past[0]):
        levels = len(own) // len(past[0])
        apart = own.unflatten(0, (-1, levels))
        return torch.cat([*(part[:, None].expand(-1, levels, -1, -1, -1) for part in past), apart], dim=2).flatten(0, 1)
    return _joined([*past, own])


def _joined(parts: list[Tensor]) -> Tensor:
    """The tokens [B, tokens, ...] of all parts; one part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _rotate(states: Tensor, rotation: Tensor) -> Tensor:
    """RoPE of [B, tokens, heads, head_dim], in float32, neighbouring components as pairs."""
    pairs = torch.view_as_complex(states.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).type_as(states)


def make_causal(model: WanTransformer3DModel) -> CausalRope:
    """Replace the model's rope and self-attention processors in place and return the new rope."""
    rope = model.rope
    if not isinstance(rope, CausalRope):
        rope = model.rope = CausalRope(rope)
        for layer, block in enumerate(model.blocks):
            block.attn1.set_processor(CausalProcessor(layer, block.attn1.processor))
    return rope
