"""A judge's model in this process: a tiny Qwen2.5-VL with random weights, in its real on-disk form."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from asyncflow.engine import Invalid
from asyncflow.errors import ConfigError, RewardError
from engines.rewards.chat.base import Ask, Message, Reply
from engines.rewards.chat.in_process import BATCH, InProcess, check_folder
from engines.rewards.registry import parse_rewards
from engines.rewards.testing import save_tiny_judge

T = TypeVar("T")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("judge")
    save_tiny_judge(made)
    return made


def frame(value: int, size: tuple[int, int] = (32, 32)) -> torch.Tensor:
    return torch.full((*size, 3), value, dtype=torch.uint8)


def asking(text: str, *frames: torch.Tensor, **more: object) -> Ask:
    return Ask((Message("user", (*frames, text)),), **({"max_tokens": 12} | more))  # type: ignore[arg-type]


def complete(folder: Path, asks: Sequence[Ask]) -> list[Reply]:
    async def main() -> list[Reply]:
        engine = InProcess(folder)
        await engine.start(CPU, 0)
        replies = await asyncio.gather(*(engine.complete(ask) for ask in asks))
        await engine.close()
        return replies

    return asyncio.run(main())


def test_a_reply_depends_on_text_and_frames(folder):
    """And on nothing else: the same again gives the same."""
    first, again, other_text, other_frame, no_frame = complete(
        folder,
        [asking("a", frame(0)), asking("a", frame(0)), asking("b", frame(0)), asking("a", frame(255)), asking("a")],
    )
    assert first == again and first.text
    assert len({first.text, other_text.text, other_frame.text, no_frame.text}) == 4
    assert first.finish == "length" and first.tokens == 12


def test_a_batch_of_unlike_conversations_answers_each_as_alone(folder):
    """Texts and frames of different sizes and numbers, several turns; more of them than one batch holds."""
    asks = [asking("?" * n, *[frame(20 * n, (32 + 16 * (n % 2), 48))] * (n % 3)) for n in range(1, BATCH + 3)]
    turns = (Message("system", ("s",)), *asks[1].messages, Message("assistant", ("x",)), *asks[0].messages)
    asks.append(Ask(turns, 12))
    together = complete(folder, asks)
    assert [reply.text for reply in together] == [complete(folder, [ask])[0].text for ask in asks]


def test_sampling_is_keyed_by_its_seed(folder):
    """Whoever else is asked, and the process's own random numbers stay as they were."""
    before = torch.random.get_rng_state()
    warm = [asking("a", temperature=3.0, seed=seed) for seed in (1, 2, 1)]
    first, second, third = complete(folder, warm)
    (alone,) = complete(folder, warm[1:2])
    assert first == third and first != second and alone == second
    assert torch.equal(torch.random.get_rng_state(), before)


def test_it_stops_at_a_text(folder):
    """As soon as it stands in the reply."""
    (whole,) = complete(folder, [asking("a", frame(0))])
    stop = whole.text[3]
    (cut,) = complete(folder, [asking("a", frame(0), stop=(stop,))])
    assert cut.finish == "stop" and cut.text == whole.text[: whole.text.index(stop) + 1]
    assert cut.tokens < whole.tokens


def test_log_probabilities_of_alternatives(folder):
    """For each token; the one that was chosen greedily is the likeliest, and the text is made of them."""
    (reply,) = complete(folder, [asking("a", frame(0), top_logprobs=5)])
    assert len(reply.logprobs) == reply.tokens
    for token, alternatives in reply.logprobs:
        assert max(alternatives, key=alternatives.__getitem__) == token
        assert all(value < 0 for value in alternatives.values())


def test_a_deadline_ends_the_writing(folder):
    """The thread is free for the next conversation although the model would have written on for hours."""

    async def main() -> Reply:
        engine = InProcess(folder)
        await engine.start(CPU, 0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await engine.complete(asking("a", max_tokens=10**6))
        reply = await engine.complete(asking("a"))
        await engine.close()
        return reply

    assert asyncio.run(main()).tokens == 12


def test_a_model_that_fails_tells_everyone_who_waits(folder):
    """Instead of leaving them to their deadlines."""

    async def main() -> list[object]:
        engine = InProcess(folder)
        await engine.start(CPU, 0)
        wrong = asking("a", torch.zeros(0, 0, 3, dtype=torch.uint8))
        results = await asyncio.gather(engine.complete(wrong), engine.complete(wrong), return_exceptions=True)
        await engine.close()
        return results

    results = asyncio.run(main())
    assert all(isinstance(result, Exception) for result in results) and len(results) == 2


def test_from_its_specification_to_an_outcome(folder):
    """Nonsense is never a verdict; the judge's thread ends with it."""
    (made,) = parse_rewards([f"unified-reward-2@{folder}"])
    video = torch.zeros(5, 32, 32, 3, dtype=torch.uint8)
    made.reward.load(CPU)
    first, second = made.reward.score([video, video + 255], ["a dog", "a cat"])
    made.reward.close()
    assert isinstance(first, Invalid) and isinstance(second, Invalid)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "has no readable config.json; give the folder of a Qwen-VL model"),
        ("{", "has no readable config.json"),
        ("{}", "has no readable config.json"),
        ('{"model_type": "llava"}', "is a llava, and only Qwen-VL models load here; serve it, and give its url"),
    ],
)
def test_a_folder_that_is_no_judge(content, sentence, tmp_path):
    if content:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"^model: {tmp_path} {sentence}"):
        check_folder(tmp_path)


def test_a_damaged_folder(folder, tmp_path):
    """One sentence when it loads, and nothing left behind."""
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (made,) = parse_rewards([f"unified-reward-2@{tmp_path}"])
    with pytest.raises(RewardError, match=f"^{tmp_path} holds no judge that can be loaded: "):
        made.reward.load(CPU)
