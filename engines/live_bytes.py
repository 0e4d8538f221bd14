"""Counts the bytes of the tensors that operations make and that are alive at once, on any device, `meta` included.

Called by `memory`, and by the tests that hold its estimates against counted bytes.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """While it is active: `now`, the bytes of storages that were made since and still are, and the `peak` of that."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(made):
            if storage._cdata not in self._alive | given:  # what is given and not alive was there before: weights
                self._alive.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return made

    def _free(self, identity: int, size: int) -> None:
        self._alive.discard(identity)
        self.now -= size


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    return (leaf.untyped_storage() for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor))
