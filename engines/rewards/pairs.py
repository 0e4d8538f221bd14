"""Pair schemes: who meets whom in a group, and who is shown first; pure, and the same for every group of a size.

Candidates of a group differ by their noise alone, so a fixed design is as fair as a drawn one, and keeps a step's graph
the same. A judge tends to prefer what it sees first: round-robin pairs show each candidate first as often as second,
as nearly as the numbers allow. Pairs with the same first video stand together, since they share a prefix.
"""

from asyncflow.errors import ConfigError
from engines.rewards.base import PairwiseReward

ALL, ANCHOR, REFERENCE = "all", "anchor", "reference"


def scheme(name: str | int, group_size: int, *, both_orders: bool) -> list[tuple[int, int]]:
    """The pairs of a group: everyone with everyone, with candidate 0, with the base model's video, or so many others.

    That video, at `group_size`, is shown second to all: a schedule places a comparison by its first video, and so
    spreads these as it does the candidates. With `both_orders` each pair meets again the other way round. Raises
    ConfigError if there are not so many others.
    """
    if name == ANCHOR:
        pairs = [(0, other) for other in range(1, group_size)]
    elif name == REFERENCE:
        pairs = [(candidate, group_size) for candidate in range(group_size)]
    else:
        pairs = _round_robin(group_size - 1 if name == ALL else int(name), group_size)
    return sorted({*pairs, *((second, first) for first, second in pairs)}) if both_orders else pairs


def pairs_of(reward: PairwiseReward, group_size: int) -> list[tuple[int, int]]:
    """Whom `reward` compares in a group. Raises ConfigError if that cannot be, or leaves a candidate out."""
    pairs = [(first, second) for first, second in reward.pairs(group_size)]  # which may be anybody's code
    candidates, met = set(range(group_size)), {position for pair in pairs for position in pair}
    alone = any(first == second for first, second in pairs)
    if alone or len(set(pairs)) < len(pairs) or not candidates <= met <= {*candidates, group_size}:
        raise ConfigError(
            f"--reward: pairs({group_size}) of {reward.name} must have each candidate from 0 to {group_size - 1} meet "
            f"another, or {group_size}, the base model's video, and none the same twice in one order"
        )
    return pairs


def _round_robin(opponents: int, size: int) -> list[tuple[int, int]]:
    """Each candidate on a ring meets so many others, half of them ahead of it, and itself is shown first to those."""
    if not 1 <= opponents < size or opponents * size % 2:
        raise ConfigError(
            f"--reward: pairs = {opponents}: in a group of {size} not every candidate can meet so many others; give "
            f'"{ALL}", or {"an even" if size % 2 else "a"} number below --group-size {size}'
        )
    ahead = [(place, (place + step) % size) for place in range(size) for step in range(1, opponents // 2 + 1)]
    opposite = [(place, place + size // 2) for place in range(size // 2)] if opponents % 2 else []
    return sorted([*ahead, *opposite])
