"""The doctor: a line for each thing, what to do about what is not there, and exit code 1 if the demo could not run."""

import configparser
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from algorithms import doctor
from algorithms.cli import asyncflow
from algorithms.doctor import Check
from asyncflow import echo
from asyncflow.engine import Work
from asyncflow.errors import ConfigError, TransferError
from asyncflow.options import run

ROOT = Path(__file__).parent.parent


def found() -> str:
    return "4.2"


def absent() -> str:
    raise ConfigError("not installed")


def broken() -> str:
    raise ImportError("libfoo.so:\n  cannot open shared object file")


@pytest.mark.parametrize(
    ("made", "code", "lines"),
    [
        ([Check("foo", found, "get it")], 0, ["ok       foo 4.2", "the demo can run"]),
        (
            [Check("foo", absent, "pip install foo", needed=False), Check("bar", found, "get it")], 0,
            ["missing  foo: not installed; pip install foo", "ok       bar 4.2", "the demo can run"],
        ),
        (
            [Check("foo", broken, "pip install foo"), Check("bar", found, "get it")], 1,
            [
                "FAIL     foo: libfoo.so: cannot open shared object file; pip install foo", "ok       bar 4.2",
                "the demo cannot run: see FAIL, 1 of these lines",
            ],
        ),
    ],
)  # fmt: skip
def test_a_line_for_each_check(made, code, lines, monkeypatch, capsys):
    """What is optional may be missing; what is needed decides the exit code, and ends no other check."""
    monkeypatch.setattr(doctor, "checks", lambda: made)
    assert run(asyncflow, ["doctor"]) == code
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1:] == lines
    assert captured.err == ""


def test_it_knows_what_setup_cfg_asks_for():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    required = setup["options"]["install_requires"].split()
    assert required == [name + versions for name, versions in doctor.PACKAGES.items()]
    extras = dict(setup["options.extras_require"])
    del extras["dev"]
    assert doctor.EXTRAS == {name: extra for extra, names in extras.items() for name in names.split()}


def test_it_needs_none_of_what_it_looks_for():
    """A package that is broken does not keep it from saying so."""
    code = "import sys, algorithms.cli, algorithms.doctor; print(*sys.modules)"
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert {"torch", "numpy", "diffusers", "transformers", "peft", "uvloop"}.isdisjoint(made.stdout.split())


def test_a_package_of_another_version():
    assert doctor.package("packaging", ">=1")
    with pytest.raises(ConfigError, match=r"^expected >=1000, found \d"):
        doctor.package("packaging", ">=1000")
    with pytest.raises(ConfigError, match="^not installed$"):
        doctor.package("asyncflow-of-another-name", "")


def test_what_this_machine_has(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert doctor.memory().endswith(" GB free")
    assert doctor.disk().endswith(f" GB free in {tmp_path}")
    assert doctor.devices().endswith(" CPU cores")
    assert doctor.toy_model() == "1.2 million parameters, 72 prompts"


def test_too_little_of_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "MEMORY_GB", 1e6)
    monkeypatch.setattr(doctor, "DISK_GB", 1e9)
    with pytest.raises(ConfigError, match=r"^\d+\.\d\d GB free, the demo takes 1e\+06$"):
        doctor.memory()
    with pytest.raises(ConfigError, match=rf"^\d+\.\d\d GB free in {tmp_path}, the demo takes 1e\+09$"):
        doctor.disk()


def test_gpus_that_torch_cannot_use(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="^this machine has GPUs, and torch .* cannot use them$"):
        doctor.torch_build()


def test_two_ranks_talk():
    """Real ones, as a run starts them."""
    assert doctor.talk("gloo") == "carries a tensor between two ranks and back"


def test_nccl_needs_two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="^it joins GPUs, and torch finds 1$"):
        doctor.talk_by_nccl()


def test_a_tensor_that_was_altered_on_the_way():
    compare = echo.GRAPH["export/compare"]
    altered = echo.TENSOR.clone()
    altered[-1] = 0
    with pytest.raises(TransferError, match="the tensor that came is not the one that was sent"):
        echo.EchoEngine().run(Work((compare,), {"decode/back.tensor": altered}, None))


@pytest.mark.parametrize(
    ("script", "patience", "sentence"),
    [
        ("echo; echo 'error: rank 1 cannot connect'; exit 1", 30.0, "rank 1 cannot connect"),
        ("exit 3", 30.0, "two ranks ended without a word"),
        ("exec sleep 1000", 0.1, "two ranks had not exchanged a tensor after 0 seconds"),
    ],
)
def test_two_ranks_that_do_not_talk(script, patience, sentence, monkeypatch, tmp_path):
    """They fail, or hang until the doctor ends them."""
    executable = tmp_path / "python"
    executable.write_text(f"#!/bin/sh\n{script}\n")
    executable.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(executable))
    monkeypatch.setattr(doctor, "PATIENCE_S", patience)
    with pytest.raises(ConfigError) as error:
        doctor.talk("shared-memory")
    assert str(error.value) == sentence
