"""Channels between real processes: every tensor arrives as it left, in order, and a peer that is gone is noticed."""

import asyncio
import contextlib
import multiprocessing
import os
import resource
import signal
import socket
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist

from asyncflow.channels.base import Channel, header_of, sum_over_ranks
from asyncflow.channels.gloo import GlooChannel
from asyncflow.channels.nccl import NcclChannel
from asyncflow.channels.shared_memory import SharedMemoryChannel
from asyncflow.communicator import Communicator
from asyncflow.errors import RankLost, TransferError
from asyncflow.wire import Header, Receive, Send

CHANNELS: dict[str, Callable[[int, int, dist.Store], Channel]] = {
    "shared-memory": SharedMemoryChannel,
    "narrow": partial(SharedMemoryChannel, budget=1000),
    "gloo": GlooChannel,
    "impatient": partial(GlooChannel, timeout=2.0),
}
NAMES = ("shared-memory", "narrow", "gloo")
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


@pytest.mark.parametrize("kind", NAMES)
def test_ranks_that_keep_one_sequence_do_not_deadlock(kind: str, meeting: Path):
    """300 transfers between four ranks by lot, some larger than a narrow channel's budget."""
    random = Random(0)
    moves = [(*random.sample(range(4), 2), random.choice((0, 1, 100, 1000))) for _ in range(300)]

    def play(channel: Channel) -> bool:
        for sequence, (source, target, size) in enumerate(moves, 1):
            tensor = torch.full((size,), float(sequence))
            if channel.rank == source:
                channel.send(sequence, target, tensor)
            if channel.rank == target:
                assert torch.equal(channel.receive(sequence, source, header_of(tensor)), tensor)
        return True

    assert perform(kind, meeting, *[play] * 4) == [True] * 4


@pytest.mark.parametrize("ranks", [1, 3, 4])
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


@pytest.mark.parametrize("kind", NAMES)
def test_a_send_to_a_rank_that_dies_raises(kind: str, meeting: Path):
    """Each sort of send blocks in its own place: for a full socket, for room in the budget, for its receiver."""

    def send(channel: Channel) -> None:
        channel.receive(1, 1, Header("float32", (1,)))
        for sequence in range(2, 10_000):
            channel.send(sequence, 1, torch.zeros(200))

    def die(channel: Channel) -> None:
        channel.send(1, 0, torch.zeros(1))
        os.kill(os.getpid(), signal.SIGKILL)

    with on_stage(kind, meeting, send, die) as ((report, _), _pids):
        error = heard(report)
    assert isinstance(error, RankLost)
    assert "rank 1 is gone" in str(error)


@pytest.mark.parametrize("kind", NAMES)
def test_a_sum_with_a_rank_that_dies_raises_on_all_others(kind: str, meeting: Path):
    def add(channel: Channel) -> None:
        if channel.rank:
            channel.send(1, 2, torch.zeros(1))
        sum_over_ranks(channel, 2, (0, 1, 2), torch.ones(30_000))

    def die(channel: Channel) -> None:
        channel.receive(1, 1, Header("float32", (1,)))
        os.kill(os.getpid(), signal.SIGKILL)

    with on_stage(kind, meeting, add, add, die) as (reports, _):
        errors = [heard(report) for report in reports[:2]]
    assert all(isinstance(error, RankLost) for error in errors)


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize(
    ("sequence", "header"),
    [
        (2, Header("float32", (3,))),
        (1, Header("float32", (2,))),
        (1, Header("float32", (4,))),
        (1, Header("int32", (3,))),
    ],
)
def test_a_transfer_that_is_not_the_one_due_is_refused(kind: str, sequence: int, header: Header, meeting: Path):
    """Before it moves: a buffer that is too small would abort the process in gloo, one too large be filled in part."""

    def receive(channel: Channel) -> None:
        channel.receive(sequence, 1, header)

    with on_stage(kind, meeting, receive, lambda channel: channel.send(1, 0, torch.zeros(3))) as ((report, _), _pids):
        error = heard(report)
    assert isinstance(error, TransferError)
    assert str(error).startswith("rank 1 sent Frame(sequence=1")


@pytest.mark.parametrize("kind", NAMES)
def test_ranks_that_sum_tensors_of_other_sizes_are_told(kind: str, meeting: Path):
    def add(channel: Channel) -> None:
        sum_over_ranks(channel, 1, (0, 1), torch.ones(2 + 4 * channel.rank))

    with on_stage(kind, meeting, add, add) as ((report, _), _pids):
        error = heard(report)
    assert isinstance(error, TransferError)
    assert "tensors that ranks sum must look alike" in str(error)


def test_a_wait_that_times_out_names_the_other_rank_and_ends_the_pair(meeting: Path):
    """gloo gives the pair up, for both ends: later transfers fail too, and none hangs."""

    def wait_twice(channel: Channel) -> list[str]:
        errors = []
        for sequence in (1, 2):
            with pytest.raises(RankLost) as caught:
                channel.receive(sequence, 1 - channel.rank, Header("float32", (1,)))
            errors.append(str(caught.value))
        return errors

    for rank, errors in enumerate(perform("impatient", meeting, wait_twice, wait_twice)):
        assert isinstance(errors, list)
        for sequence, error in enumerate(errors, 1):
            assert error.startswith(f"rank {1 - rank} is gone or stuck: transfer {sequence} failed")


@pytest.mark.parametrize("kind", NAMES)
def test_a_receive_that_is_given_up_takes_its_tensor_all_the_same(kind: str, meeting: Path):
    """An abandoned receive would swallow the next tensor of the pair, whether it was launched or still to be."""

    async def sending(channel: Channel) -> None:
        communicator = await Communicator.connect(lambda: channel)
        for sequence in (1, 3, 4):
            await communicator.send(Send(sequence, "a.x", 1), torch.tensor([sequence]))
        communicator.close()

    async def receiving(channel: Channel) -> int:
        communicator = await Communicator.connect(lambda: channel)
        orders = {number: Receive(number, "a.x", 0, Header("int64", (1,))) for number in (1, 3, 4)}
        asyncio.ensure_future(communicator.receive(orders[1])).cancel()
        place = communicator.collective(2, (1,))  # nothing behind it is launched yet
        asyncio.ensure_future(communicator.receive(orders[3])).cancel()
        last = communicator.receive(orders[4])
        await asyncio.to_thread(place, torch.zeros(1))
        tensor, *_ = await last
        communicator.close()
        return int(tensor)

    plays = (lambda channel: asyncio.run(sending(channel)), lambda channel: asyncio.run(receiving(channel)))
    assert perform(kind, meeting, *plays) == [None, 4]


def test_a_sender_waits_while_its_budget_is_on_its_way(meeting: Path):
    told, tell = os.pipe()

    class Waited(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Waited

    def send(channel: Channel) -> bool:
        channel.send(1, 1, torch.zeros(150))
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            channel.send(2, 1, torch.ones(150))
        except Waited:
            os.write(tell, b"!")
            channel.send(2, 1, torch.ones(150))
            return True
        return False

    def receive(channel: Channel) -> list[float]:
        os.read(told, 1)
        return [channel.receive(sequence, 0, Header("float32", (150,)))[0].item() for sequence in (1, 2)]

    try:
        assert perform("narrow", meeting, send, receive) == [True, [0, 1]]
    finally:
        os.close(told)
        os.close(tell)


def test_a_sender_within_its_budget_does_not_wait(meeting: Path):
    told, tell = os.pipe()

    def send(channel: Channel) -> None:
        for sequence in (1, 2, 3):
            channel.send(sequence, 1, torch.full((150,), float(sequence)))
        os.write(tell, b"!")

    def receive(channel: Channel) -> list[float]:
        os.read(told, 1)
        return [channel.receive(sequence, 0, Header("float32", (150,)))[0].item() for sequence in (1, 2, 3)]

    try:
        assert perform("shared-memory", meeting, send, receive) == [None, [1, 2, 3]]
    finally:
        os.close(told)
        os.close(tell)


def test_a_host_without_memory_left_is_told_what_was_missing(meeting: Path):
    """An error of the sender, never a signal; here a limit on files stands for the host's memory."""

    def send(channel: Channel) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        channel.send(7, 1, torch.zeros(1000))

    def receive(channel: Channel) -> None:
        channel.receive(7, 0, Header("float32", (1000,)))

    error, _ = perform("shared-memory", meeting, send, receive)
    assert isinstance(error, TransferError)
    assert "transfer 7 to rank 1 needs 4000 bytes of shared memory, and the host does not give them" in str(error)


def test_tensors_are_not_bounded_by_descriptors(meeting: Path):
    """A rank may hold more received tensors than open files; without a free one to receive with, it says so."""

    def send(channel: Channel) -> None:
        for sequence in range(1, 52):
            channel.send(sequence, 1, torch.ones(10))

    def receive(channel: Channel) -> list[torch.Tensor]:
        opened, header = len(os.listdir("/proc/self/fd")), Header("float32", (10,))
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 8, opened + 8))
        held = [channel.receive(sequence, 0, header) for sequence in range(1, 51)]
        assert sum(tensor.sum() for tensor in held) == 500
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        return [channel.receive(51, 0, header)]

    _, error = perform("shared-memory", meeting, send, receive)
    assert isinstance(error, TransferError)
    assert str(error) == "rank 1 has no free file descriptor for a transfer: raise `ulimit -n`"


def test_the_size_of_dev_shm_does_not_matter(meeting: Path):
    """What a tensor lies in has no name and is not on that mount."""

    def receive(channel: Channel) -> tuple[list[str], int]:
        tensor = channel.receive(1, 0, Header("float32", (10,)))
        address = f"{tensor.data_ptr():x}-"
        lines = Path("/proc/self/maps").read_text().splitlines()
        (line,) = (line.split() for line in lines if line.startswith(address))
        major, minor = (int(part, 16) for part in line[3].split(":"))
        return line[5:], os.makedev(major, minor)

    _, lies_in = perform("shared-memory", meeting, lambda channel: channel.send(1, 1, torch.ones(10)), receive)
    assert isinstance(lies_in, tuple)
    assert lies_in[0] == ["/memfd:asyncflow", "(deleted)"]
    assert lies_in[1] != os.stat("/dev/shm").st_dev


def test_nccl_joins_one_group_on_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch):
    joined: dict[str, object] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: joined.update(options, backend=backend))
    store, patience = dist.HashStore(), timedelta(seconds=60)
    channel = NcclChannel(1, 4, store, timeout=60)
    assert channel.device == torch.device("cuda", 1)
    group = {"store": store, "rank": 1, "world_size": 4, "timeout": patience}
    assert joined == {"backend": "nccl", "device_id": channel.device, **group}


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


def test_a_rank_that_never_connects_is_named():
    with pytest.raises(RankLost, match=r"ranks \[1\] did not connect to rank 0 within 0.05 seconds"):
        SharedMemoryChannel(0, 2, dist.HashStore(), timeout=0.05)


def test_a_rank_that_never_joins_over_gloo_is_missed():
    with pytest.raises(RankLost, match="rank 0 could not join the other ranks over gloo"):
        GlooChannel(0, 2, dist.HashStore(), timeout=0.05)


def test_a_rank_whose_predecessor_never_connects_names_it():
    with pytest.raises(RankLost, match=r"ranks \[0\] did not connect to rank 1 within 0.05 seconds"):
        SharedMemoryChannel(1, 2, dist.HashStore(), timeout=0.05)


def test_shared_memory_needs_no_file_and_no_name(meeting: Path):
    store = dist.FileStore(str(meeting), 1)
    channel = SharedMemoryChannel(0, 1, store)
    assert store.get("channel/0").startswith(b"\0")
    channel.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late, pytest.raises(ConnectionRefusedError):
        late.connect(store.get("channel/0"))
