"""Prompts: read from a text, CSV or JSON-lines file, and the prompts of each step.

Which prompts a step trains on is a pure function of (seed, step), so resuming a run needs no state: every epoch is a
fresh shuffle in which each prompt comes once, and a step takes the next window of that endless sequence. Called by the
commands.
"""

import csv
import io
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncflow.errors import ConfigError
from asyncflow.randomness import derive_seed


@dataclass(frozen=True)
class Prompt:
    """A prompt of one step."""

    position: int  # its place in the step, which keys its randomness
    index: int  # its place in the file
    text: str


class PromptSampler:
    """The prompts of each step."""

    def __init__(self, prompts: list[str], seed: int) -> None:
        assert prompts
        self.prompts = prompts
        self.seed = seed

    def at(self, step: int, prompts_per_step: int) -> list[Prompt]:
        """Return the prompts of a step, counted from 0; the window may cross the end of an epoch."""
        chosen: list[Prompt] = []
        for position in range(prompts_per_step):
            epoch, place = divmod(step * prompts_per_step + position, len(self.prompts))
            if position == 0 or place == 0:
                order = list(range(len(self.prompts)))
                random.Random(derive_seed(self.seed, "epoch", epoch)).shuffle(order)
            chosen.append(Prompt(position, order[place], self.prompts[order[place]]))
        return chosen


def read_prompts(path: Path, option: str = "--prompts") -> list[str]:
    """Return the prompts of a file, which `option` named, stripped, in its order.

    .txt: one a line; blank lines and lines that start with # are skipped. .csv: the column that its first row calls
    `prompt`, else the first column. .jsonl: the key `prompt` of each line's object.
    Raises ConfigError naming the file and the line.
    """
    read = {".txt": _from_text, ".csv": _from_csv, ".jsonl": _from_jsonl}.get(path.suffix.lower())
    if read is None:
        raise ConfigError(f"{option}: expected a file that ends in .txt, .csv or .jsonl, got {path}")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8; save the file as UTF-8") from None
    prompts = []
    for line, prompt in read(path, text):
        if not prompt.strip():
            raise ConfigError(f"{path}, line {line}: the prompt is empty; write one or remove the line")
        prompts.append(prompt.strip())
    if not prompts:
        raise ConfigError(f"{path}: holds no prompt; write at least one")
    return prompts


def _from_text(path: Path, text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield number, line


def _from_csv(path: Path, text: str) -> Iterator[tuple[int, str]]:
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(rows, [])
        column = header.index("prompt") if "prompt" in header else 0
        while True:
            line = rows.line_num + 1
            row = next(rows, None)
            if row is None:
                return
            if row:  # a blank line is no row
                yield line, row[column] if column < len(row) else ""
    except csv.Error as error:
        raise ConfigError(f"{path}, line {rows.line_num}: not CSV: {error}; quote prompts that hold quotes") from None


def _from_jsonl(path: Path, text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {number}: not JSON: {error.msg} at column {error.colno}") from None
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise ConfigError(f'{path}, line {number}: expected an object with a text under "prompt"')
        yield number, entry["prompt"]
