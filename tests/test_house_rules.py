"""The house rules of CONTRIBUTING.md that a program can check."""

import ast
import re
import statistics
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("asyncflow", "engines", "algorithms", "bench")
PACKAGE_FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))
FILES = [*PACKAGE_FILES, *TEST_FILES]

# The task boundary, where code of a task or a rank may raise anything and whoever waits for it must learn of it.
CATCHES_ALL = {
    "asyncflow/communicator.py": "a failed transfer is raised where the task awaits it",
    "asyncflow/lane.py": "a failed call is raised where the task awaits it",
    "asyncflow/launch.py": "a rank that cannot start tells the controller, and a run that ends tells its ranks",
    "asyncflow/worker.py": "a failed task tells the controller",
}


def breaking(rule: Callable[[str], bool], files: list[Path] = FILES) -> list[str]:
    """The files whose text does not keep a rule."""
    assert files
    return [str(file.relative_to(ROOT)) for file in files if not rule(file.read_text())]


def length(text: str) -> int:
    return len(text.splitlines())


def test_no_file_is_longer_than_500_lines():
    assert breaking(lambda text: length(text) <= 500) == []


def test_half_of_the_files_are_shorter_than_200_lines():
    assert statistics.median(length(file.read_text()) for file in PACKAGE_FILES) < 200


def test_every_module_has_a_docstring():
    assert breaking(lambda text: bool(ast.get_docstring(ast.parse(text)))) == []


def catches_only_what_it_names(text: str) -> bool:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            names = [getattr(part, "id", "") for part in ast.walk(node.type)] if node.type else ["Exception"]
            if {"Exception", "BaseException"} & set(names):
                return False
    return True


def test_only_the_task_boundary_catches_everything():
    assert set(breaking(catches_only_what_it_names)) <= set(CATCHES_ALL)


def test_the_check_finds_a_broad_except():
    for clause in ("except:", "except Exception:", "except (OSError, BaseException) as error:"):
        assert not catches_only_what_it_names(f"try:\n    f()\n{clause}\n    pass")
    assert catches_only_what_it_names("try:\n    f()\nexcept OSError:\n    pass")


def test_tests_do_not_sleep():
    call = re.compile(r"\btime" + r"\.sleep\(|^from time import.*\bsleep\b", re.MULTILINE)
    assert breaking(lambda text: not call.search(text), TEST_FILES) == []


def test_nothing_is_left_to_do():
    words = re.compile(rf"\b({'|'.join(('TO' + 'DO', 'FIX' + 'ME', 'X' * 3))})\b")
    assert breaking(lambda text: not words.search(text)) == []


def test_no_file_is_larger_than_10_megabytes():
    files = [file for folder in (*PACKAGES, "tests") for file in (ROOT / folder).rglob("*") if file.is_file()]
    assert [file for file in files if file.stat().st_size > 10e6] == []
