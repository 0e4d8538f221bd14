"""Properties of prompt files, each error naming its line, and of the sampler: pure, fair, seeded."""

from collections import Counter

import pytest

from algorithms.prompts import PromptSampler, read_prompts
from asyncflow.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    """Write a prompt file and return its path."""

    def write(name: str, content: str | bytes):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("p.txt", "# colours\n red ball \r\n\n  # more\nblue\u2028ball", ["red ball", "blue\u2028ball"]),
        ("p.txt", b"\xef\xbb\xbfa cat", ["a cat"]),
        ("P.TXT", "a cat", ["a cat"]),
        ("p.csv", 'id,prompt\r\n1,"a, b"\r\n\r\n2,"c\r\nd"\r\n3,e "quoted"', ["a, b", "c\r\nd", 'e "quoted"']),
        ("p.csv", "caption,id\na,1\n#b,2", ["a", "#b"]),
        ("p.jsonl", '{"prompt": "a\\u00e9", "id": 1}\n\n{"prompt": "# b"}\n', ["aé", "# b"]),
    ],
)
def test_prompts_are_read_in_order(name, content, prompts, write):
    assert read_prompts(write(name, content)) == prompts


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("p.txt", "", "p.txt: holds no prompt; write at least one"),
        ("p.txt", "# only this\n", "p.txt: holds no prompt; write at least one"),
        ("p.csv", "", "p.csv: holds no prompt; write at least one"),
        ("p.csv", "prompt\n", "p.csv: holds no prompt; write at least one"),
        ("p.txt", b"a\nb\nc\xff", "p.txt, line 3: not UTF-8; save the file as UTF-8"),
        ("p.csv", "prompt,id\na,1\n ,2", "p.csv, line 3: the prompt is empty; write one or remove the line"),
        ("p.csv", "id,prompt\n1,a\n2", "p.csv, line 3: the prompt is empty; write one or remove the line"),
        ("p.csv", 'prompt\n"a\nb"\n""', "p.csv, line 4: the prompt is empty; write one or remove the line"),
        ("p.csv", 'prompt\na\n"b', "p.csv, line 3: not CSV: unexpected end of data; quote prompts that hold quotes"),
        ("p.jsonl", '\n{"prompt": ""}', "p.jsonl, line 2: the prompt is empty; write one or remove the line"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt"}', "p.jsonl, line 2: not JSON: Expecting ':' delimiter at column 10"),
        ("p.jsonl", '{"text": "a"}', 'p.jsonl, line 1: expected an object with a text under "prompt"'),
        ("p.jsonl", '["a"]', 'p.jsonl, line 1: expected an object with a text under "prompt"'),
        ("p.jsonl", '{"prompt": 3}', 'p.jsonl, line 1: expected an object with a text under "prompt"'),
    ],
)
def test_wrong_file_names_the_line(name, content, sentence, write):
    path = write(name, content)
    with pytest.raises(ConfigError) as error:
        read_prompts(path)
    assert str(error.value) == f"{path.parent}/{sentence}"


def test_missing_file_and_unknown_kind_name_the_option(tmp_path):
    with pytest.raises(ConfigError, match=r"^--prompts: cannot read .*none\.txt: No such file or directory"):
        read_prompts(tmp_path / "none.txt")
    with pytest.raises(ConfigError, match=r"^--prompts: expected a file that ends in \.txt, \.csv or \.jsonl, got "):
        read_prompts(tmp_path / "p.yaml")


@pytest.mark.parametrize("prompts_per_step", [1, 3, 5, 7, 16])
def test_every_epoch_uses_each_prompt_once(prompts_per_step):
    sampler = PromptSampler([f"p{i}" for i in range(5)], seed=0)
    drawn = [prompt for step in range(10) for prompt in sampler.at(step, prompts_per_step)]
    epochs = [drawn[start : start + 5] for start in range(0, len(drawn), 5)]
    for epoch in (epoch for epoch in epochs if len(epoch) == 5):
        assert Counter(prompt.index for prompt in epoch) == Counter(range(5))
    assert all(prompt.text == f"p{prompt.index}" for prompt in drawn)
    assert [prompt.position for prompt in sampler.at(3, prompts_per_step)] == list(range(prompts_per_step))


def test_a_step_does_not_depend_on_the_steps_before_it():
    prompts = [f"p{i}" for i in range(7)]
    used = PromptSampler(prompts, seed=3)
    history = [used.at(step, 4) for step in range(6)]
    assert [PromptSampler(prompts, seed=3).at(step, 4) for step in reversed(range(6))] == history[::-1]


def test_epochs_and_seeds_shuffle_differently():
    prompts = [f"p{i}" for i in range(20)]
    orders = {tuple(PromptSampler(prompts, seed).at(epoch, 20)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
