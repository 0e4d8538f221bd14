"""Atomic checkpoints: a directory `step-000001/` is complete and verified, or it is not there.

Once the disk has room for all of them, files are written to a hidden sibling, then a manifest of their sizes and
SHA-256, all are flushed to disk, and one rename commits them. Nothing is ever overwritten in place. A crash leaves at
most a hidden directory, which the next save sweeps; a bit that flips later is found by `load`. The engine of rank 0
saves, the commands load.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncflow.errors import CheckpointError

MANIFEST = "manifest.json"


class FileRecord(msgspec.Struct, frozen=True):
    """What the manifest knows of a file."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint holds."""

    step: int
    files: dict[str, FileRecord]
    meta: dict[str, Any]


class Sealed(msgspec.Struct, frozen=True):
    """The content of manifest.json: a manifest and the SHA-256 of its bytes."""

    manifest: msgspec.Raw
    sha256: str


class Checkpoint(msgspec.Struct, frozen=True):
    """A loaded checkpoint, every byte verified."""

    path: Path
    step: int
    files: dict[str, bytes]
    meta: dict[str, Any]


def save(root: Path, step: int, files: Mapping[str, bytes], meta: Mapping[str, Any]) -> Path:
    """Write `root/step-NNNNNN` and return its path; meta is whatever JSON can hold.

    A directory of that name which does not load is replaced. Raises CheckpointError, leaving no partial directory,
    where the disk has no room or is not writable, or where a good checkpoint of this step exists.
    """
    manifest = Manifest(step, {name: FileRecord(len(data), _sha256(data)) for name, data in files.items()}, dict(meta))
    raw = msgspec.json.encode(manifest)
    assert msgspec.json.decode(raw, type=Manifest) == manifest, "meta must survive JSON"
    sealed = msgspec.json.encode(Sealed(msgspec.Raw(raw), _sha256(raw)))
    final, temporary = _directory(root, step), _hidden(root, step)
    try:
        _sweep(root)
        if final.exists():
            if _is_intact(final):
                raise CheckpointError(f"{final}: exists already; give another --out, or --resume from it")
            _remove(root, step)
        temporary.mkdir(parents=True)
        contents = {**files, MANIFEST: sealed}
        _check_room(temporary, sum(map(len, contents.values())))
        for name, data in contents.items():
            _write(temporary / name, data)
        _flush(temporary)
        temporary.rename(final)
        _flush(root)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        megabytes = sum(map(len, files.values())) / 1e6
        what = f"cannot write a checkpoint of {megabytes:.1f} MB: {error.strerror}"
        raise CheckpointError(f"{final}: {what}; make room or give another --out") from error
    return final


def load(path: Path) -> Checkpoint:
    """Read one step directory. Raises CheckpointError if anything in it is missing, truncated, altered or renamed."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint; give a directory step-NNNNNN")
    try:
        sealed = msgspec.json.decode(_read(path, MANIFEST), type=Sealed)
        if _sha256(sealed.manifest) != sealed.sha256:
            raise msgspec.DecodeError
        manifest = msgspec.json.decode(sealed.manifest, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _damaged(path, f"{MANIFEST} was altered") from None
    files = {name: _read(path, name) for name in manifest.files}
    for name, record in manifest.files.items():
        if len(files[name]) != record.size:
            raise _damaged(path, f"{name} has {len(files[name])} bytes, expected {record.size}")
        if _sha256(files[name]) != record.sha256:
            raise _damaged(path, f"{name} was altered, its SHA-256 differs from the manifest's")
    right = _directory(root=path.parent, step=manifest.step).name
    if path.resolve().name != right:
        raise CheckpointError(f"{path}: holds the checkpoint of step {manifest.step}; rename it to {right}")
    return Checkpoint(path, manifest.step, files, manifest.meta)


def latest(root: Path) -> tuple[Checkpoint, list[str]]:
    """Return the newest checkpoint that verifies, and a sentence for each newer one that does not.

    Raises CheckpointError where there is none.
    """
    damage: list[str] = []
    for step in reversed(steps(root)):
        try:
            return load(_directory(root, step)), damage
        except CheckpointError as error:
            damage.append(str(error))
    raise CheckpointError("; ".join([f"{root}: holds no checkpoint to resume from", *damage]))


def prune(root: Path, keep_last: int, keep: set[int]) -> list[int]:
    """Remove all but the last `keep_last` checkpoints and the steps in `keep` (the best); return the steps removed."""
    assert keep_last >= 1
    removed = [step for step in steps(root)[:-keep_last] if step not in keep]
    try:
        for step in removed:
            _remove(root, step)
    except OSError as error:
        raise CheckpointError(f"{root}: cannot remove an old checkpoint: {error.strerror}") from error
    return removed


def steps(root: Path) -> list[int]:
    """The steps with a checkpoint directory, ascending; none of them verified yet."""
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-[0-9]*") if path.is_dir())


def _directory(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def _hidden(root: Path, step: int) -> Path:
    return root / f".step-{step:06d}.tmp"


def _sweep(root: Path) -> None:
    for leftover in root.glob(".step-*.tmp"):
        shutil.rmtree(leftover)


def _remove(root: Path, step: int) -> None:
    """Renamed first, so that a crash midway leaves a hidden directory and not a damaged checkpoint."""
    shutil.rmtree(_directory(root, step).rename(_hidden(root, step)))


def _is_intact(path: Path) -> bool:
    try:
        load(path)
    except CheckpointError:
        return False
    return True


def _check_room(directory: Path, needed: int) -> None:
    """Raises OSError if the disk of `directory` has fewer bytes free than `needed`."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"the disk has {free / 1e6:.1f} MB free")


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush(directory: Path) -> None:
    """Make the names in a directory durable, as fsync of its files does their bytes."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path, name: str) -> bytes:
    try:
        return (path / name).read_bytes()
    except OSError as error:
        raise _damaged(path, f"{name} cannot be read: {error.strerror}") from None


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}; the checkpoint is damaged, use an earlier one")


def _sha256(data: bytes | msgspec.Raw) -> str:
    return hashlib.sha256(data).hexdigest()
