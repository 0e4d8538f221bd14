"""The object store: a tensor is awaited by name until it is there, and forgotten when told."""

import asyncio

import pytest
import torch

from asyncflow.store import ObjectStore
from asyncflow.testing import VirtualLoop


def test_a_tensor_can_be_awaited_before_it_is_there():
    async def main() -> None:
        store, tensor = ObjectStore(), torch.ones(2)
        waiting = [asyncio.create_task(store.get("rollout/0.path")) for _ in range(2)]
        await asyncio.sleep(1)
        assert not any(task.done() for task in waiting)
        store.put("rollout/0.path", tensor)
        assert await asyncio.gather(*waiting) == [tensor, tensor]
        assert await store.get("rollout/0.path") is store["rollout/0.path"] is tensor

    VirtualLoop.run(main())


def test_a_reader_that_gives_up_does_not_spoil_it_for_the_others():
    async def main() -> None:
        store = ObjectStore()
        impatient = asyncio.create_task(store.get("x.y"))
        patient = asyncio.create_task(store.get("x.y"))
        await asyncio.sleep(1)
        impatient.cancel()
        await asyncio.sleep(1)
        store.put("x.y", torch.ones(2))
        assert (await patient).sum() == 2

    VirtualLoop.run(main())


def test_what_is_dropped_is_gone():
    async def main() -> None:
        store = ObjectStore()
        store.put("x.y", torch.zeros(3))
        store.put("x.z", torch.zeros(2))
        assert len(store) == 2
        store.drop("x.y")
        assert len(store) == 1

    VirtualLoop.run(main())


def test_misuse_is_refused():
    async def main() -> None:
        store = ObjectStore()
        for use in (store.drop, store.__getitem__):
            with pytest.raises(AssertionError, match=r"x\.y"):
                use("x.y")
        store.put("x.y", torch.zeros(3))
        with pytest.raises(AssertionError, match="x.y was put twice"):
            store.put("x.y", torch.zeros(3))

    VirtualLoop.run(main())
