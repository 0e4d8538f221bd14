"""Tests that need vLLM: `make test-vllm` runs them, in an environment of its own."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.rewards.testing import save_tiny_judge

with warnings.catch_warnings():  # what they import warns of, here once and for all, is not ours to mend
    warnings.simplefilter("ignore")
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.input_processor  # noqa: F401

from tests.with_vllm.judge_script import Judge


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "ignore:Unclosed context <zmq:ResourceWarning")  # vLLM leaves it to gc


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny judge of random weights."""
    made = tmp_path_factory.mktemp("judge")
    save_tiny_judge(made)
    return made


@pytest.fixture(scope="session")
def judge(folder: Path) -> Iterator[Judge]:
    """An engine that serves it, and its loop."""
    made = Judge(folder)
    yield made
    made.close()
