"""The object store of a rank: tensors by name, each a future until it is made or arrives.

Invariant: a name is put once and dropped once, when the dispatcher says so; then nothing holds it. The worker owns it.
"""

import asyncio

import torch


class ObjectStore:
    """Tensors that tasks of this rank made or will read."""

    def __init__(self) -> None:
        self._tensors: dict[str, asyncio.Future[torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Resolve `name`."""
        future = self._future(name)
        assert not future.done(), f"{name} was put twice"
        future.set_result(tensor)

    async def get(self, name: str) -> torch.Tensor:
        """The tensor, once it is here."""
        return await asyncio.shield(self._future(name))

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor, which must be here."""
        assert name in self._tensors and self._tensors[name].done(), f"{name} is not here"
        return self._tensors[name].result()

    def drop(self, name: str) -> None:
        """Forget a tensor, which must be here."""
        assert name in self._tensors and self._tensors[name].done(), f"{name} was dropped before it was here"
        del self._tensors[name]

    def _future(self, name: str) -> asyncio.Future[torch.Tensor]:
        if name not in self._tensors:
            self._tensors[name] = asyncio.get_running_loop().create_future()
        return self._tensors[name]
