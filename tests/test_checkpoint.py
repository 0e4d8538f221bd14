"""Properties of checkpoints: complete or absent whenever the process dies, and every altered bit is found."""

import contextlib
import io
import os
import resource
import shutil
import signal
import sys
from functools import partial

import pytest

from asyncflow.checkpoint import latest, load, prune, save, steps
from asyncflow.errors import CheckpointError

FILES = {"adapter.safetensors": bytes(range(256)), "adam.safetensors": b"moments" * 9, "empty": b""}
META = {"prompt": "a cat", "best": 0.1, "history": [1, 2, {"x": None}]}


def interrupted(act, at, strike):
    """Call `act`, and `strike` before its at-th operation on files; return whether it ended before that."""
    operations = 0

    def count(frame, event, function):
        nonlocal operations
        on_file = isinstance(getattr(function, "__self__", None), io.BufferedWriter)
        on_disk = function is io.open or getattr(function, "__module__", None) == "posix"
        if event == "c_call" and (on_file or on_disk) and function.__name__ not in ("fspath", "close", "__exit__"):
            operations += 1
            if operations == at:
                strike()

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return operations < at


def save_second(root):
    save(root, 2, {"adapter": b"new", "adam": b"moments"}, {})


def no_space():
    raise OSError(28, "No space left on device")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def killed(act, at):
    """Call `act` in a process that is killed before its at-th operation on files; return whether it was."""
    return died(lambda: interrupted(act, at, kill)) == signal.SIGKILL


def died(act):
    """Call `act` in a process of its own; return the signal that ended it, or 0."""
    if not (pid := os.fork()):
        with contextlib.suppress(BaseException):
            act()
        os._exit(0)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def test_saved_bytes_and_meta_come_back(tmp_path):
    path = save(tmp_path / "checkpoints", 3, FILES, META)
    assert path.name == "step-000003"
    loaded = load(path)
    assert (loaded.path, loaded.step, loaded.files, loaded.meta) == (path, 3, FILES, META)


def test_a_kill_before_any_operation_leaves_the_old_or_the_new_checkpoint(tmp_path):
    outcomes = []
    while (False, 2) not in outcomes:
        root = tmp_path / str(len(outcomes))
        save(root, 1, FILES, META)
        was_killed = killed(partial(save_second, root), len(outcomes) + 1)
        found, damage = latest(root)
        assert not damage
        outcomes.append((was_killed, found.step))
        # The next save succeeds and sweeps what the killed one left.
        save(root, 3, FILES, META)
        assert {path.name for path in root.iterdir()} == {f"step-{step:06d}" for step in (1, found.step, 3)}
    assert outcomes[:-1] == sorted(outcomes[:-1])
    assert outcomes.count((True, 1)) > 15
    assert (True, 2) in outcomes


def test_a_kill_while_a_damaged_one_is_replaced_leaves_the_old_or_the_new_checkpoint(tmp_path):
    found, was_killed = [], True
    while was_killed:
        root = tmp_path / str(len(found))
        save(root, 1, FILES, META)
        (save(root, 2, FILES, META) / "empty").unlink()
        was_killed = killed(partial(save_second, root), len(found) + 1)
        found.append(latest(root)[0].step)
        if found[-1] == 1:
            save_second(root)
            assert latest(root)[0].step == 2
    assert found == sorted(found)
    assert found.count(1) > 20


def test_a_kill_while_old_ones_are_removed_leaves_no_damaged_one(tmp_path):
    counts, was_killed = [], True
    while was_killed:
        root = tmp_path / str(len(counts))
        for step in (1, 2, 3):
            save(root, step, FILES, META)
        was_killed = killed(lambda root=root: prune(root, 1, set()), len(counts) + 1)
        assert all(load(path) for path in root.glob("step-*"))
        counts.append(len(steps(root)))
    assert counts == sorted(counts, reverse=True)
    assert set(counts) == {3, 2, 1}


@pytest.mark.parametrize("limit", [1, 4096, 99_999])
def test_a_kill_in_the_middle_of_a_file_leaves_the_old_checkpoint(limit, tmp_path):
    """The system itself kills the process at that byte of a file."""
    save(tmp_path, 1, FILES, META)

    def act():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        save(tmp_path, 2, {"large": b"x" * 100_000}, {})

    assert died(act) == signal.SIGXFSZ
    assert (tmp_path / ".step-000002.tmp" / "large").stat().st_size == limit
    found, damage = latest(tmp_path)
    assert (found.step, damage) == (1, [])
    assert load(save(tmp_path, 2, FILES, META)).step == 2


def test_an_oserror_from_any_operation_is_a_sentence_and_leaves_nothing_partial(tmp_path):
    messages, finished = set(), False
    while not finished:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        save(root, 1, FILES, META)
        try:
            finished = interrupted(partial(save_second, root), len(list(tmp_path.iterdir())), no_space)
        except CheckpointError as error:
            messages.add(str(error).removeprefix(f"{root}/"))
        assert all(load(path).files for path in root.iterdir())
    assert messages == {
        "step-000002: cannot write a checkpoint of 0.0 MB: No space left on device; make room or give another --out"
    }


def test_a_file_too_large_for_the_disk_leaves_no_partial_directory(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write a checkpoint of 0\.1 MB: File too large; "):
            save(tmp_path, 1, {"small": b"x", "large": b"x" * 100_000}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_room_is_checked_before_anything_is_written(tmp_path, monkeypatch):
    """For all files together, with what an earlier save left in the way already swept."""
    (tmp_path / ".step-000001.tmp").mkdir()
    disk = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    written = []
    monkeypatch.setattr("asyncflow.checkpoint._write", lambda path, data: written.append(path))
    with pytest.raises(CheckpointError) as error:
        save(tmp_path, 2, {"adapter": b"x" * 600_000, "adam": b"x" * 900_000}, {})
    assert str(error.value) == (
        f"{tmp_path / 'step-000002'}: cannot write a checkpoint of 1.5 MB: the disk has 1.0 MB free; "
        "make room or give another --out"
    )
    assert (written, list(tmp_path.iterdir())) == ([], [])


def test_a_flipped_bit_in_any_byte_is_found(tmp_path):
    path = save(tmp_path, 1, {"adapter": b"weights"}, {"best": 0.5})
    for file in path.iterdir():
        good = file.read_bytes()
        for place in range(len(good)):
            flipped = bytearray(good)
            flipped[place] ^= 1 << place % 8
            file.write_bytes(flipped)
            with pytest.raises(CheckpointError, match=r"step-000001: .*; the checkpoint is damaged, use an earlier"):
                load(path)
        file.write_bytes(good)
    assert load(path).files == {"adapter": b"weights"}


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda path: (path / "empty").unlink(), "empty cannot be read: No such file or directory"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json cannot be read: No such file or directory"),
        (lambda path: (path / "manifest.json").write_bytes(b""), "manifest.json was altered"),
        (lambda path: (path / "manifest.json").write_bytes(b"{}"), "manifest.json was altered"),
        (lambda path: (path / "adapter.safetensors").write_bytes(b"x" * 255), "has 255 bytes, expected 256"),
        (lambda path: (path / "adapter.safetensors").write_bytes(b"x" * 256), "adapter.safetensors was altered"),
    ],
)
def test_damage_is_named_and_the_one_before_is_used(damage, sentence, tmp_path):
    save(tmp_path, 9, FILES, META)
    newest = save(tmp_path, 10, FILES, META)
    damage(newest)
    with pytest.raises(CheckpointError) as error:
        load(newest)
    assert sentence in str(error.value)
    found, messages = latest(tmp_path)
    assert found.step == 9
    assert messages == [str(error.value)]
    # A run resumed from 9 comes to 10 again and replaces the damaged one.
    assert load(save(tmp_path, 10, FILES, META)).step == 10


def test_a_renamed_checkpoint_is_not_taken_for_another_step(tmp_path):
    save(tmp_path, 2, FILES, META)
    stale = shutil.copytree(tmp_path / "step-000002", tmp_path / "step-000007")
    found, (message,) = latest(tmp_path)
    assert found.step == 2
    assert message == f"{stale}: holds the checkpoint of step 2; rename it to step-000002"
    # A link that points to it is no other name.
    (tmp_path / "best").symlink_to("step-000002")
    assert load(tmp_path / "best").step == 2


def test_no_checkpoint_is_a_sentence(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint to resume from"):
        latest(tmp_path / "none")
    with pytest.raises(CheckpointError, match="no such checkpoint; give a directory step-NNNNNN"):
        load(tmp_path / "step-000004")


def test_a_good_checkpoint_is_never_overwritten(tmp_path):
    save(tmp_path, 1, FILES, META)
    with pytest.raises(CheckpointError, match="step-000001: exists already"):
        save(tmp_path, 1, {"adapter": b"other"}, {})
    assert load(tmp_path / "step-000001").files == FILES


def test_prune_keeps_the_last_and_the_best(tmp_path):
    for step in (1, 2, 3, 999_999, 1_000_000):
        save(tmp_path, step, {"adapter": b"x"}, {})
    assert prune(tmp_path, 2, {2}) == [1, 3]
    assert steps(tmp_path) == [2, 999_999, 1_000_000]
    assert prune(tmp_path, 5, set()) == []


def test_a_root_that_is_not_writable_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot write a checkpoint of 0\.0 MB: Not a directory"):
        save(tmp_path / "file", 1, FILES, META)
