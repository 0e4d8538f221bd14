"""Imports go one way, core <- asyncflow <- engines <- algorithms <- bench, and the pure parts load nothing heavy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("asyncflow", "engines", "algorithms", "bench")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))

# importer: what it must not import, and the exceptions to that; the longest importer that fits holds too.
FORBIDDEN = {
    "asyncflow.core": ({*PACKAGES, "torch", "asyncio"}, {"asyncflow.core"}),
    "asyncflow": ({"engines", "algorithms", "bench"}, set()),
    "engines": (
        {"algorithms", "bench", *(f"asyncflow.{part}" for part in ("controller", "worker", "channels", "launch"))},
        set(),
    ),
    "algorithms": ({"bench", "asyncflow.channels", "torch.distributed"}, set()),
}


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, module: str, is_package: bool) -> set[str]:
    """The dotted names that a module's import statements mention, wherever they stand in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def violations(module: str, imported: set[str]) -> set[str]:
    wrong = {name for name in imported if within(name, "tests")}
    for importer, (forbidden, allowed) in FORBIDDEN.items():
        if within(module, importer):
            wrong |= {
                name
                for name in imported
                if any(within(name, package) for package in forbidden)
                and not any(within(name, package) for package in allowed)
            }
    return wrong


def test_imports_go_one_way():
    wrong = {}
    for file in FILES:
        module = module_name(file)
        wrong[module] = violations(module, imports(file.read_text(), module, file.name == "__init__.py"))
    assert {module: names for module, names in wrong.items() if names} == {}


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("asyncflow.core.plan", "import torch"),
        ("asyncflow.core.plan", "import asyncio.tasks"),
        ("asyncflow.core.plan", "from asyncflow import errors"),
        ("asyncflow.core.plan", "from .. import errors"),
        ("asyncflow.store", "def f():\n    from engines.policy import load"),
        ("engines.toy.make", "import asyncflow.controller"),
        ("engines.toy.make", "from asyncflow import worker"),
        ("engines.toy.make", "from asyncflow.channels.gloo import Gloo"),
        ("algorithms.cli", "from torch import distributed"),
        ("algorithms.cli", "import torch.distributed as dist"),
        ("algorithms.cli", "import bench"),
        ("bench.compare", "from tests.conftest import leaks"),
    ],
)
def test_the_check_finds_a_wrong_import(module, statement):
    assert violations(module, imports(statement, module, False))


def loaded_by(modules: list[str]) -> set[str]:
    """The modules in a fresh interpreter after it imported these."""
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(run.stdout.split())


def test_core_loads_neither_torch_nor_asyncio():
    core = [module_name(file) for file in FILES if within(module_name(file), "asyncflow.core")]
    assert "asyncflow.core" in core
    assert not {"torch", "asyncio", "numpy"} & loaded_by(core)


def test_configuration_and_errors_load_without_torch():
    modules = ["asyncflow", "asyncflow.errors", "asyncflow.options", "asyncflow.randomness", "algorithms.prompts"]
    assert not {"torch", "asyncio"} & loaded_by(modules)
