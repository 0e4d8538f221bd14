"""Randomness belongs to the work, not to the rank: a seed is a pure function of what is drawn for whom.

Keyed by (seed, step, position of the prompt, candidate), so that placement, schedule and rank count cannot change what
is sampled. Called wherever a generator is made.
"""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed, never negative, that depends on every part, its type and its place.

    The parts are hashed with BLAKE2b; each is written with its type and length, so that no two keys share an encoding
    (`"1", "2"` is not `"12"`, and `1` is not `"1"`).
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        assert isinstance(part, int | str)
        assert not isinstance(part, bool)
        text = str(part).encode()
        digest.update(f"{'i' if isinstance(part, int) else 's'}{len(text)}:".encode() + text)
    return int.from_bytes(digest.digest()) >> 1
