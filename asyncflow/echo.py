"""`python -m asyncflow.echo CHANNEL`: two ranks, and a tensor that goes from one to the other and back.

It runs as any run does, with a launcher, a controller and a channel, and exits 0 if the same tensor came back; else it
says why not. The doctor starts it.
"""

import sys

import msgspec
import torch

from asyncflow.controller import Controller
from asyncflow.core.graph import Graph, Kind, Task
from asyncflow.core.plan import Plan
from asyncflow.engine import Engine, Result, Work
from asyncflow.errors import TransferError
from asyncflow.launch import ChannelName, run_rank, start_ranks, this_rank
from asyncflow.testing import NoProgram

TENSOR = torch.arange(2**16, dtype=torch.float32)

GRAPH = Graph(
    [
        Task("rollout/there", Kind.ROLLOUT),
        Task("decode/back", Kind.DECODE, inputs=("rollout/there.tensor",)),
        Task("export/compare", Kind.EXPORT, inputs=("decode/back.tensor",)),
    ]
)
PLAN = Plan({"rollout/there": (0,), "decode/back": (1,), "export/compare": (0,)}, tuple(GRAPH.tasks))


class EchoEngine(Engine):
    """Makes the tensor, hands on what it is given, and compares."""

    def run(self, work: Work) -> Result:
        """See `Engine`. Raises TransferError if another tensor came back."""
        (task,) = work.tasks
        (tensor,) = work.tensors.values() or [TENSOR]
        if not torch.equal(tensor, TENSOR):
            raise TransferError("the tensor that came is not the one that was sent")
        return Result({f"{task.id}.tensor": tensor})


async def lead(controller: Controller) -> None:
    """The one step."""
    await controller.run(GRAPH, PLAN, NoProgram())


def main(channel: ChannelName) -> int:
    """Start two ranks, or be one of them; return the exit code."""
    place = this_rank()
    if place is None:
        return start_ranks(2, "asyncflow.echo", [channel])
    run_rank(place, EchoEngine, lead, channel)
    return 0


if __name__ == "__main__":
    sys.exit(main(msgspec.convert(sys.argv[1], ChannelName)))
