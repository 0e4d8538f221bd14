"""Which attention a rank computes: the backend that diffusers dispatches to, and of torch's own the kernel it takes.

The user chooses by the variable DIFFUSERS_ATTN_BACKEND. `prepare` checks that before a run, whose directory records it.
"""

import torch
from diffusers.models.attention_dispatch import attention_backend
from diffusers.utils.constants import DIFFUSERS_ATTN_BACKEND
from torch.nn.attention import SDPBackend

from asyncflow.errors import ConfigError

NATIVE = "native"
DETERMINISTIC = (NATIVE, "_native_flash", "_native_efficient", "_native_math")
"""The backends whose backward `use_deterministic_kernels` reaches."""


def check_attention(*, deterministic: bool) -> None:
    """Raises ConfigError where the chosen backend cannot be used, or is not deterministic and has to be.

    Loads its kernels where those come from the hub, which diffusers does not do for the variable alone.
    """
    try:
        with attention_backend(DIFFUSERS_ATTN_BACKEND):
            pass
    except (RuntimeError, ValueError, ImportError, OSError) as error:
        raise ConfigError(f"DIFFUSERS_ATTN_BACKEND: {error} Or unset it, for torch's own attention.") from None
    if deterministic and DIFFUSERS_ATTN_BACKEND not in DETERMINISTIC:
        raise ConfigError(
            f"--deterministic, --exact: the attention backend {DIFFUSERS_ATTN_BACKEND} is not known to be "
            f"deterministic; unset DIFFUSERS_ATTN_BACKEND, or give one of {', '.join(DETERMINISTIC)}"
        )


def attention_in_use(device: str, dtype: torch.dtype, heads: int, head_dim: int) -> str:
    """What attends to queries of that kind, of which a backward is needed, for a person."""
    if DIFFUSERS_ATTN_BACKEND != NATIVE:
        return DIFFUSERS_ATTN_BACKEND
    tokens = torch.zeros(1, heads, 8, head_dim, device=device, dtype=dtype, requires_grad=True)
    # The public torch.backends.cuda.can_use_* tell what could be taken, on a GPU, but not which of them goes first.
    kernel = SDPBackend(torch._fused_sdp_choice(tokens, tokens, tokens))
    return f"{NATIVE} (torch scaled_dot_product_attention, {kernel.name.lower().replace('_', ' ')})"
