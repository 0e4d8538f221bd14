"""The causal Wan policy: stock diffusers weights, chunk-by-chunk attention with a KV cache."""

from engines.policy.cache import KVCache
from engines.policy.load import check_policy, load_policy
from engines.policy.policy import Policy
from engines.policy.settings import CausalSettings, load_settings

__all__ = ["CausalSettings", "KVCache", "Policy", "check_policy", "load_policy", "load_settings"]
