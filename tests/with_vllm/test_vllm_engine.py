"""vLLM itself as a judge's engine: a tiny Qwen2.5-VL with random weights, in vLLM's own processes."""

import asyncio
import json

import pytest

from asyncflow.errors import RewardError
from engines.rewards.chat.base import Ask, Message, Refused
from engines.rewards.chat.vllm import Vllm
from tests.with_vllm.judge_script import CACHE_BYTES, CPU, asking, begun, environment, frame, long, unfinished


def test_the_environment_is_as_before(judge):
    """Although vLLM sets variables of its own while it starts, and a rank's are hidden from it meanwhile."""
    assert environment() == judge.environment


def test_a_reply_depends_on_text_and_frames(judge):
    """And on nothing else: the same again gives the same."""
    first, again, other_text, other_frame, no_frame = judge.complete(
        asking("a", frame(0)), asking("a", frame(0)), asking("b", frame(0)), asking("a", frame(255)), asking("a")
    )
    assert first == again and first.text
    assert len({first.text, other_text.text, other_frame.text, no_frame.text}) == 4
    assert first.finish == "length" and first.tokens == 12


def test_several_turns(judge):
    """What an assistant said before, and frames of other sizes, are part of the conversation."""
    turns = (Message("system", ("s",)), Message("user", (frame(9, (48, 32)), "a")), Message("assistant", ("x",)))
    shorter, longer = judge.complete(
        Ask((*turns, Message("user", ("b",))), 12), Ask((*turns[1:], Message("user", ("b",))), 12)
    )
    assert shorter.text != longer.text


def test_sampling_is_keyed_by_its_seed(judge):
    """Whoever else is asked."""
    first, second, third = judge.complete(*[asking("a", temperature=2.0, seed=seed) for seed in (1, 2, 1)])
    assert first == third and first != second
    assert judge.complete(asking("a", temperature=2.0, seed=2)) == [second]


def test_it_stops_at_a_text(judge):
    """As soon as it stands in the reply, of which it is part."""
    (whole,) = judge.complete(asking("a", frame(0)))
    stop = whole.text[3]
    (cut,) = judge.complete(asking("a", frame(0), stop=(stop,)))
    assert cut.finish == "stop" and cut.text == whole.text[: whole.text.index(stop) + 1]


def test_log_probabilities_of_alternatives(judge):
    """For each token; the one that was chosen greedily is the likeliest, and the text is made of them."""
    (reply,) = judge.complete(asking("a", frame(0), top_logprobs=5))
    assert len(reply.logprobs) == reply.tokens
    assert "".join(token for token, _ in reply.logprobs) == reply.text
    for token, alternatives in reply.logprobs:
        assert len(alternatives) == 5 and max(alternatives, key=alternatives.__getitem__) == token
        assert all(value < 0 for value in alternatives.values())


def test_a_schema_holds_whatever_the_model_would_write(judge):
    schema = {"type": "object", "properties": {"winner": {"enum": ["Video 1", "Video 2"]}}, "required": ["winner"],
              "additionalProperties": False}  # fmt: skip
    (reply,) = judge.complete(asking("a", frame(0), schema=schema, max_tokens=200))
    assert reply.finish == "stop" and json.loads(reply.text)["winner"] in ("Video 1", "Video 2")


def test_endless_repetition_is_cut_short(judge):
    """And told as such; the schema makes the model repeat itself."""
    (reply,) = judge.complete(asking("a", schema={"const": "ab" * 200}, max_tokens=2000))
    assert reply.finish == "repetition" and reply.tokens < 100


def test_what_is_too_long_or_shows_too_much_is_refused(judge):
    for ask in (asking("a" * 100_000), asking("a", *[frame(0)] * 5)):
        with pytest.raises(Refused, match="^vLLM refuses it: "):
            judge.complete(ask)


def test_a_cancelled_ask_is_aborted(judge):
    """It would have written for long; vLLM forgets it, and goes on to answer others."""

    async def main() -> None:
        (asked,) = await begun(judge, long("a"))
        asked.cancel()
        await asyncio.wait([asked])

    judge.runner.run(main())
    assert unfinished(judge) == 0
    assert judge.complete(asking("a"))[0].tokens == 12


def test_it_wakes_from_rest_when_it_is_asked(judge):
    """All who ask at once are answered as before."""
    asks = [asking(str(n), frame(n)) for n in range(4)]
    before = judge.complete(*asks)
    judge.runner.run(judge.engine.rest())
    assert judge.complete(*asks) == before


def test_a_folder_that_cannot_be_served(folder, tmp_path):
    """One sentence, behind vLLM's own words; nothing is left behind."""
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())

    async def main() -> None:
        engine = Vllm(tmp_path, images=4, concurrency=8)
        with pytest.raises(RewardError, match=f"^vLLM cannot serve the judge in {tmp_path}: "):
            await engine.start(CPU, CACHE_BYTES)
        await engine.close()

    asyncio.run(main())
