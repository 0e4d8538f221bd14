"""`asyncflow doctor`: what this machine has of all that asyncflow needs, and what to do about the rest, a line each.

Invariant: it imports nothing heavy itself, so that it can tell of a package that is missing or broken. It exits 1 if
the demo could not run.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from pathlib import Path

import click
from packaging.specifiers import SpecifierSet

from asyncflow import __version__
from asyncflow.errors import AsyncflowError, ConfigError

PACKAGES = {
    "accelerate": "",
    "av": "",
    "click": ">=8.2",
    "diffusers": ">=0.42,<0.43",
    "ftfy": "",
    "msgspec": "",
    "numpy": "",
    "packaging": "",
    "peft": "",
    "pillow": "",
    "safetensors": "",
    "tomli_w": "",
    "torch": ">=2.9,<2.14",
    "transformers": "",
    "uvloop": "",
}
"""What setup.cfg requires, and which versions."""

EXTRAS = {
    "matplotlib": "bench",
    "ray": "bench",
    "vllm": "judges",
    "onnxruntime": "ocr",
    "rapidocr": "ocr",
    "openai": "openai",
}
"""What setup.cfg offers besides, and in which extra."""

MODULES = {"pillow": "PIL"}
"""The module of a package, where it has another name."""

MEMORY_GB, DISK_GB = 2.0, 0.1
"""What the demo takes, rounded up: two ranks of the toy, and a run directory."""

PATIENCE_S = 120.0
"""How long two ranks may take to start and to talk."""

NVIDIA = Path("/proc/driver/nvidia/gpus")
"""Where the driver lists the GPUs, whether torch can use them or not."""

FAILURES = (AsyncflowError, ImportError, OSError, RuntimeError, ValueError, AttributeError, TypeError)
"""What looking may raise; a package that does not fit the others raises nearly anything when it is imported."""


@dataclass(frozen=True)
class Check:
    """A thing to look for: `look` says what it found, or raises; `advice` is what to do then."""

    name: str
    look: Callable[[], str]
    advice: str
    needed: bool = True

    def run(self) -> tuple[str, str]:
        """`ok`, `missing` or `FAIL`, and a line for a person."""
        try:
            return "ok", f"{self.name} {self.look()}"
        except FAILURES as error:
            why = " ".join(str(error).split()) or type(error).__name__
            return "FAIL" if self.needed else "missing", f"{self.name}: {why}; {self.advice}"


def checks() -> Iterable[Check]:
    """Everything the doctor looks for, quick things first."""
    for name, versions in PACKAGES.items():
        yield Check(name, partial(package, name, versions), f"pip install '{name}{versions}'")
    yield Check("torch build", torch_build, "install a torch that fits: https://pytorch.org/get-started", needed=False)
    yield Check("devices", devices, "see that torch finds them")
    yield Check("memory", memory, "end other programs")
    yield Check("disk", disk, "make room, or go to another folder")
    yield Check("toy model", toy_model, "install asyncflow again")
    for channel in ("shared-memory", "gloo"):
        yield Check(f"channel {channel}", partial(talk, channel), "see that processes may connect on 127.0.0.1")
    yield Check("channel nccl", talk_by_nccl, "do without --channel nccl", needed=False)
    for name, extra in EXTRAS.items():
        yield Check(name, partial(package, name, ""), f"pip install 'asyncflow[{extra}]'", needed=False)


def package(name: str, versions: str) -> str:
    """The version of a package that can be imported. Raises ConfigError if there is none, or not one of `versions`."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        raise ConfigError("not installed") from None
    import_module(MODULES.get(name, name))
    if version not in SpecifierSet(versions):
        raise ConfigError(f"expected {versions}, found {version}")
    return version


def torch_build() -> str:
    """What torch was built for. Raises ConfigError where it cannot use the GPUs of this machine."""
    import torch

    if NVIDIA.is_dir() and not torch.cuda.is_available():
        raise ConfigError(f"this machine has GPUs, and torch {torch.__version__} cannot use them")
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    return f"{built}; a rank computes in {os.environ.get('OMP_NUM_THREADS', '1')} threads (OMP_NUM_THREADS)"


def devices() -> str:
    """The GPUs by name and memory, or the cores."""
    import torch

    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    cores = len(os.sched_getaffinity(0))
    return ", ".join([*(f"{gpu.name} with {gpu.total_memory / 1e9:.0f} GB" for gpu in gpus), f"{cores} CPU cores"])


def memory() -> str:
    """The memory that is free. Raises ConfigError where that is too little for the demo."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    (free_kib,) = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return _enough(free_kib * 1024 / 1e9, MEMORY_GB, "free")


def disk() -> str:
    """The room for run directories. Raises ConfigError where the demo's does not fit or could not be made."""
    runs = Path("runs")
    folder = runs if runs.is_dir() else Path()
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{folder.resolve()} cannot be written")
    return _enough(shutil.disk_usage(folder).free / 1e9, DISK_GB, f"free in {folder.resolve()}")


def _enough(found: float, needed: float, what: str) -> str:
    if found < needed:
        raise ConfigError(f"{found:.2f} GB {what}, the demo takes {needed:g}")
    return f"{found:.1f} GB {what}"


def toy_model() -> str:
    """The size of the built-in model, loaded. Raises ModelError if it is incomplete."""
    from algorithms.prepare import check_model
    from engines.policy import load_policy
    from engines.toy import EVAL_PROMPTS, MODEL, PROMPTS

    check_model(MODEL)
    parameters = sum(parameter.numel() for parameter in load_policy(MODEL).model.parameters())
    prompts = len(PROMPTS.read_text().splitlines() + EVAL_PROMPTS.read_text().splitlines())
    return f"{parameters / 1e6:.1f} million parameters, {prompts} prompts"


def talk(channel: str) -> str:
    """Two ranks send each other a tensor. Raises ConfigError, with their last words, if it does not come back."""
    command = [sys.executable, "-m", "asyncflow.echo", channel]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ranks:
        try:
            output, _ = ranks.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            ranks.terminate()  # the launcher ends its ranks
            raise ConfigError(f"two ranks had not exchanged a tensor after {PATIENCE_S:.0f} seconds") from None
    if ranks.returncode:
        last = (output.strip().splitlines() or ["two ranks ended without a word"])[-1]
        raise ConfigError(last.removeprefix("error: "))
    return "carries a tensor between two ranks and back"


def talk_by_nccl() -> str:
    """See `talk`, but on two GPUs. Raises ConfigError where there are fewer."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus < 2:
        raise ConfigError(f"it joins GPUs, and torch finds {gpus}")
    return talk("nccl")


@click.command("doctor")
def main() -> int:
    """Look for all that asyncflow needs on this machine."""
    click.echo(f"asyncflow {__version__}, Python {platform.python_version()}, {platform.platform()}")
    failed = 0
    for check in checks():
        state, line = check.run()
        failed += state == "FAIL"
        click.echo(f"{state:8} {line}")
    click.echo(f"the demo cannot run: see FAIL, {failed} of these lines" if failed else "the demo can run")
    return int(bool(failed))
