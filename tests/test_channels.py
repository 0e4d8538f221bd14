"""Channels between real processes: every tensor arrives as it left, in order, and a peer that is gone is noticed."""

import contextlib
import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from asyncflow.channels.base import Channel, header_of, sum_over_ranks
from asyncflow.channels.gloo import GlooChannel
from asyncflow.channels.shared_memory import SharedMemoryChannel
from asyncflow.errors import RankLost, TransferError
from asyncflow.wire import Header

CHANNELS = {"shared-memory": SharedMemoryChannel, "gloo": GlooChannel}
NAMES = tuple(CHANNELS)
SOON_S = 30.0

TENSORS = [
    torch.arange(6, dtype=torch.float32).reshape(2, 3),
    torch.tensor([2**62, -1]),
    torch.arange(256, dtype=torch.uint8),
    torch.linspace(-1, 1, 7).bfloat16(),
    torch.tensor([[True, False], [False, True]]),
    torch.tensor(3.5),
    torch.empty(0, 4),
    torch.arange(12.0).reshape(3, 4).T,
    torch.arange(10)[::3],
    torch.tensor(1.0).expand(3, 2),
]

Play = Callable[[Channel], object]


def act(kind: str, rank: int, ranks: int, file: Path, play: Play, report: Connection) -> None:
    """What a forked rank does: its part of a play, and a report of what that returned or raised."""
    code = 1
    try:
        channel = CHANNELS[kind](rank, ranks, dist.FileStore(str(file), ranks))
        report.send(play(channel))
        code = 0
    except (RankLost, TransferError) as error:
        report.send(error)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        report.close()
        os._exit(code)


@contextlib.contextmanager
def on_stage(kind: str, file: Path, *plays: Play) -> Iterator[tuple[list[Connection], list[int]]]:
    """Fork a rank for each play; yield where they report and their processes, and see them to their end."""
    reports, pids = [], []
    for rank, play in enumerate(plays):
        receiver, sender = multiprocessing.Pipe(duplex=False)
        if not (pid := os.fork()):
            act(kind, rank, len(plays), file, play, sender)
        sender.close()
        reports.append(receiver)
        pids.append(pid)
    try:
        yield reports, pids
    finally:
        for report, pid in zip(reports, pids, strict=True):
            report.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def perform(kind: str, file: Path, *plays: Play) -> list[object]:
    """What each rank's play returned or raised."""
    with on_stage(kind, file, *plays) as (reports, _):
        return [heard(report) for report in reports]


def heard(report: Connection) -> object:
    assert report.poll(SOON_S), "a rank says nothing"
    return report.recv()


@pytest.fixture
def meeting(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.parametrize("kind", NAMES)
def test_a_tensor_arrives_as_it_left(kind: str, meeting: Path):
    def send(channel: Channel) -> None:
        for sequence, tensor in enumerate(TENSORS, 1):
            channel.send(sequence, 1, tensor)
        channel.receive(99, 1, Header("uint8", ()))

    def receive(channel: Channel) -> bool:
        for sequence, tensor in enumerate(TENSORS, 1):
            came = channel.receive(sequence, 0, header_of(tensor))
            assert came.dtype == tensor.dtype and came.shape == tensor.shape
            assert torch.equal(came, tensor)
            came.zero_()  # it is the receiver's own
        channel.send(99, 0, torch.zeros((), dtype=torch.uint8))
        channel.close()
        return True

    assert perform(kind, meeting, send, receive) == [None, True]


@pytest.mark.parametrize("kind", NAMES)
def test_what_was_sent_can_be_changed_at_once(kind: str, meeting: Path):
    def send(channel: Channel) -> None:
        tensor = torch.ones(1000)
        channel.send(1, 1, tensor)
        tensor.zero_()
        channel.send(2, 1, tensor)

    def receive(channel: Channel) -> tuple[float, float]:
        first, second = (channel.receive(n, 0, Header("float32", (1000,))) for n in (1, 2))
        return first.sum().item(), second.sum().item()

    assert perform(kind, meeting, send, receive)[1] == (1000.0, 0.0)


@pytest.mark.parametrize("kind", NAMES)
def test_a_pair_that_keeps_one_sequence_does_not_deadlock(kind: str, meeting: Path):
    """Both have much to send and to receive; each launches in the order of the numbers."""
    size = 200_000

    def play(channel: Channel) -> float:
        other, total = 1 - channel.rank, 0.0
        for sequence in range(40):
            if sequence % 2 == channel.rank:
                channel.send(sequence, other, torch.full((size,), float(sequence)))
            else:
                total += channel.receive(sequence, other, Header("float32", (size,)))[-1].item()
        return total

    assert perform(kind, meeting, play, play) == [sum(range(1, 40, 2)), sum(range(0, 40, 2))]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", NAMES)
def test_a_sum_has_the_same_bits_on_all_ranks(kind: str, ranks: int, meeting: Path):
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) * 10.0**rank for rank in range(ranks)]
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part

    def play(channel: Channel) -> bool:
        mine = parts[channel.rank].clone()
        total = sum_over_ranks(channel, 1, tuple(range(ranks)), mine)
        assert torch.equal(mine, parts[channel.rank]), "the input was changed"
        return torch.equal(total, expected)

    assert perform(kind, meeting, *[play] * ranks) == [True] * ranks


@pytest.mark.parametrize("kind", NAMES)
def test_a_sum_over_some_ranks_leaves_the_others_alone(kind: str, meeting: Path):
    def play(channel: Channel) -> int:
        if channel.rank == 1:
            return 0
        return int(sum_over_ranks(channel, 1, (0, 2), torch.tensor([channel.rank + 1])))

    assert perform(kind, meeting, *[play] * 3) == [4, 0, 4]


@pytest.mark.parametrize("kind", NAMES)
def test_a_receive_from_a_rank_that_dies_raises(kind: str, meeting: Path):
    def wait(channel: Channel) -> None:
        channel.send(1, 1, torch.zeros(1))
        channel.receive(2, 1, Header("float32", (1,)))

    def die(channel: Channel) -> None:
        channel.receive(1, 0, Header("float32", (1,)))
        os.kill(os.getpid(), signal.SIGKILL)

    with on_stage(kind, meeting, wait, die) as ((report, _), _pids):
        error = heard(report)
    assert isinstance(error, RankLost)
    assert "rank 1 is gone" in str(error) and "transfer 2" in str(error)


def test_a_send_to_a_rank_that_is_gone_raises(meeting: Path):
    def send(channel: Channel) -> None:
        channel.receive(1, 1, Header("float32", (1,)))
        for sequence in range(2, 10_000):
            channel.send(sequence, 1, torch.zeros(1))

    def leave(channel: Channel) -> None:
        channel.send(1, 0, torch.zeros(1))
        channel.close()

    error, _ = perform("shared-memory", meeting, send, leave)
    assert isinstance(error, RankLost)
    assert "rank 1 is gone" in str(error)


@pytest.mark.parametrize(
    ("sequence", "header"), [(2, Header("float32", (3,))), (1, Header("float32", (4,))), (1, Header("int32", (3,)))]
)
def test_a_transfer_that_is_not_the_one_due_is_refused(sequence: int, header: Header, meeting: Path):
    error, _ = perform(
        "shared-memory",
        meeting,
        lambda channel: channel.receive(sequence, 1, header),
        lambda channel: channel.send(1, 0, torch.zeros(3)),
    )
    assert isinstance(error, TransferError)
    assert str(error).startswith("rank 1 sent Frame(sequence=1")


def test_many_transfers_leave_nothing_open(meeting: Path):
    """Descriptors and mapped memory are given back with the tensor."""

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:asyncflow")

    def send(channel: Channel) -> bool:
        before = held()
        for sequence in range(1, 500):
            channel.send(sequence, 1, torch.ones(3000))
        return held() == before

    def receive(channel: Channel) -> bool:
        before = held()
        for sequence in range(1, 500):
            last = channel.receive(sequence, 0, Header("float32", (3000,)))
        (_, mapped), part = held(), last[0]
        del last
        assert mapped == held()[1] == 1, "a part of a tensor keeps its memory"
        del part
        return held() == before

    assert perform("shared-memory", meeting, send, receive) == [True, True]


def test_a_rank_that_never_connects_is_named(meeting: Path):
    with pytest.raises(RankLost, match=r"ranks \[1\] did not connect to rank 0 within 0.05 seconds"):
        SharedMemoryChannel(0, 2, dist.FileStore(str(meeting), 2), timeout=0.05)


def test_a_rank_whose_predecessor_never_connects_names_it(meeting: Path):
    with pytest.raises(RankLost, match=r"ranks \[0\] did not connect to rank 1 within 0.05 seconds"):
        SharedMemoryChannel(1, 2, dist.FileStore(str(meeting), 2), timeout=0.05)


def test_shared_memory_needs_no_file_and_no_name(meeting: Path):
    store = dist.FileStore(str(meeting), 1)
    channel = SharedMemoryChannel(0, 1, store)
    assert store.get("channel/0").startswith(b"\0")
    channel.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late, pytest.raises(ConnectionRefusedError):
        late.connect(store.get("channel/0"))
