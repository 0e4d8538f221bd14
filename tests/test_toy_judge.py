"""The toy's own judge, as it ships and as it is made: it looks, says what it sees, and scores by that."""

import asyncio
import re

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from asyncflow.engine import Invalid
from engines.rewards.base import PointwiseReward
from engines.rewards.chat.base import Ask, Message
from engines.rewards.chat.in_process import _Model
from engines.rewards.pixels import LAG, displacements
from engines.rewards.protocols.base import evenly, fill, read_template
from engines.rewards.registry import parse_rewards
from engines.toy import JUDGE
from engines.toy.assess_judge import ask, correlation, ranks, share_true, stated
from engines.toy.judge_videos import draw_prompt, paint_faulty, vary
from engines.toy.judge_words import PLACES, look, named, new_tokenizer
from engines.toy.make_judge import TEMPLATE, Lessons, new_model, save, to_tell, train_judge
from engines.toy.videos import all_prompts, render, split_prompts

PROMPTS = [f"a {words}" for words in ("red square moving left", "blue circle moving right", "green circle moving up",
                                         "cyan square moving down")]  # fmt: skip


def draw(prompts: list[str], seed: int = 0) -> Tensor:
    return render(prompts, torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    """No progress bars, which start a thread that stays."""
    transformers_logging.disable_progress_bar()


@pytest.fixture(scope="module")
def replies() -> list[tuple[str, float | Invalid]]:
    """To the videos of PROMPTS: as asked, and with another colour, direction, and words in the prompt."""
    across = {"left": "down", "right": "up", "up": "left", "down": "right"}
    asked = list(PROMPTS)
    asked += [prompt.replace(named(prompt)[0], "yellow") for prompt in PROMPTS]
    asked += [prompt.replace(named(prompt)[1], across[named(prompt)[1]]) for prompt in PROMPTS]
    asked += [f"Ünheard of, 漢字: {prompt} (4k, no text)" for prompt in PROMPTS]
    return asyncio.run(ask(JUDGE, draw(PROMPTS).repeat(4, 1, 1, 1, 1), asked))


def test_the_folder_is_small():
    """It fits into a repository."""
    assert sum(file.stat().st_size for file in (JUDGE.parent / "judge").iterdir()) < 8_000_000


def test_it_names_what_is_to_be_seen(replies):
    """The colour of each frame and the way of each step, whatever the prompt asks for."""
    for place, (reply, _) in enumerate(replies):
        colour, way = named(PROMPTS[place % 4])
        assert stated(reply, "Colours") == [colour] * 9
        assert stated(reply, "Steps") == [way] * 8


def test_right_videos_score_far_above_wrong_ones(replies):
    """A direction that was not asked for costs half of the score, a colour less if it is near; other words nothing."""
    right, other_colour, other_way, wordy = torch.tensor([score for _, score in replies]).view(4, 4)
    assert right.min() > 0.95 and wordy.min() > 0.95
    assert other_colour.max() < 0.75 and other_way.max() < 0.55


def test_it_judges_in_a_batch_as_alone():
    """A fault among faultless ones changes nobody's score."""
    (weighted,) = parse_rewards(["toy-judge"])
    assert isinstance(weighted.reward, PointwiseReward) and weighted.name == "toy-judge"
    videos = torch.cat([draw(PROMPTS), paint_faulty(PROMPTS, torch.Generator().manual_seed(0))])
    prompts = PROMPTS * 2
    weighted.reward.load(torch.device("cpu"))
    try:
        together = weighted.reward.score(list(videos), prompts)
        assert weighted.reward.score([videos[0], videos[5]], [prompts[0], prompts[5]]) == [together[0], together[5]]
        assert weighted.reward.score([videos[7]], [prompts[7]]) == [together[7]]
    finally:
        weighted.reward.close()


def test_an_answer_is_what_pixels_say():
    """A video that turns red to blue half-way, and left to up: its frames, its steps, and scores that follow."""
    first, second = draw(["a red square moving left", "a blue square moving up"])
    seen = look(torch.cat([first[:17], second[17:]]))
    assert seen.colours == ["red"] * 5 + ["blue"] * 4
    assert seen.steps[:4] == ["left"] * 4 and seen.steps[5:] == ["up"] * 3
    answer = seen.answer("a blue square moving left")
    assert stated(answer, "Colours") == seen.colours and stated(answer, "Steps") == seen.steps
    assert "so blue in 4 of 9." in answer and f"so left in {seen.steps.count('left')} of 8." in answer
    colour, motion, score = map(float, re.findall(r"\d+\.\d", answer))
    assert colour == pytest.approx(10 * seen.colour_scores["blue"], abs=0.05) and 0 < colour < 7
    assert motion == pytest.approx(10 * seen.motion_scores["left"], abs=0.05) and 3 < motion < 7
    assert score == pytest.approx((colour + motion) / 2, abs=0.11)


def test_nothing_is_stated_of_what_cannot_be_seen():
    """An empty video has no colours, and no steps; one that stands has no steps."""
    empty = torch.full((33, 32, 32, 3), 24, dtype=torch.uint8)
    assert set(look(empty).colours) == set(look(empty).steps) == {"none"}
    assert set(look(draw(PROMPTS)[0][:1].repeat(33, 1, 1, 1)).steps) == {"none"}


def test_held_out_prompts_are_never_drawn():
    """Whatever is seen; and words around a prompt name no other colour or direction."""
    training, _ = split_prompts()
    generator = torch.Generator().manual_seed(0)
    drawn = [draw_prompt(["red", "red", "none"], ["left", "none"], generator) for _ in range(500)]
    found = [re.search("|".join(training), prompt) for prompt in drawn]
    assert all(found) and any(prompt not in training for prompt in drawn)
    assert 0.4 < sum(named(prompt)[0] == "red" for prompt in drawn) / 500 < 0.75  # named() finds exactly one


def test_painted_videos_have_faults():
    """Some are faultless; in others the colour changes, the object vanishes, turns or stands."""
    prompts = all_prompts()
    seen = [look(video) for video in paint_faulty(prompts, torch.Generator().manual_seed(0))]
    words = [(*named(prompt), set(s.colours), set(s.steps)) for prompt, s in zip(prompts, seen, strict=True)]
    assert sum(colours == {colour} and steps == {way} for colour, way, colours, steps in words) > 10
    assert sum(bool(colours - {colour, "none"}) for colour, _, colours, _ in words) > 10
    assert sum(bool(steps - {way, "none"}) for _, way, _, steps in words) > 5
    assert sum("none" in colours for *_, colours, _ in words) > 2 and sum("none" in steps for *_, steps in words) > 5


def test_a_varied_video_is_one_of_the_same_kind():
    """One object in one colour that moves one way, but not always the same colour and way as before."""
    prompts = all_prompts()[::5]
    varied = [look(video) for video in vary(draw(prompts), torch.Generator().manual_seed(0))]
    assert all(len(set(seen.colours)) == len(set(seen.steps)) == 1 for seen in varied)
    kept = [(seen.colours[0], seen.steps[0]) == named(prompt) for seen, prompt in zip(varied, prompts, strict=True)]
    assert 0 < sum(kept) < len(kept)


def test_training_is_keyed_by_its_seed_and_learns_to_answer(tmp_path):
    """Two steps give the same weights again, nearer to the answers; what is written loads as stock, in 16 bits."""
    videos = paint_faulty(PROMPTS, torch.Generator().manual_seed(0))
    frames, seen = videos[:, PLACES], [look(video) for video in videos]
    tokenizer = new_tokenizer(TEMPLATE.read_text())
    answers = [there.answer(prompt) for there, prompt in zip(seen, PROMPTS, strict=True)]
    batch = Lessons(tokenizer).batch(frames, PROMPTS, answers)
    first, second = new_model(tokenizer), new_model(tokenizer)
    before = first(**batch).loss
    for model in (first, second):
        train_judge(model, tokenizer, frames, seen, steps=2)
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))
    assert first(**batch).loss < before
    save(first, tokenizer, tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float16
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, first.state_dict()[name].half())


def test_lessons_are_what_the_engine_will_give():
    """The question's tokens and pixels are those of the engine that asks; only the answer has labels."""
    model = _Model(JUDGE.parent / "judge", torch.device("cpu"))
    video, prompt = draw(PROMPTS)[0], PROMPTS[0]
    message = Message("user", (*evenly(video, 9), fill(read_template(TEMPLATE), prompt=prompt)))
    given = model._inputs([Ask((message,), 1)])
    taught = Lessons(model._tokenizer).batch(video[None, PLACES], [prompt], ["Colours"])
    asked = given["input_ids"].shape[1]
    assert torch.equal(taught["input_ids"][:, :asked], given["input_ids"])
    assert torch.equal(taught["pixel_values"], given["pixel_values"])
    assert taught["labels"][0].tolist() == [-100] * asked + model._tokenizer("Colours<|im_end|>")["input_ids"]


def test_every_text_is_tokens_and_back():
    """Words that the judge was not made for, too; the answers to all prompts are equally long."""
    tokenizer = new_tokenizer("Wanted: {prompt}.")
    for text in ("Ünheard of, 漢字\n\t<b>", "<score>7.5</score>", "a red square moving left"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    seen = look(draw(PROMPTS)[0])
    assert len({len(tokenizer(seen.answer(prompt))["input_ids"]) for prompt in all_prompts()}) == 1


def test_what_frames_are_to_tell_is_what_pixels_say():
    """The way from frame to frame is the pixel measure's displacement, in pixels."""
    videos = paint_faulty(PROMPTS, torch.Generator().manual_seed(1))
    alone, moved = to_tell(videos[:, PLACES])
    assert alone.shape == (4, 9, 11)
    for video, told in zip(videos, moved, strict=True):
        turns, visible = displacements(video)
        torch.testing.assert_close(told, 32 * (turns * visible[:, None])[PLACES[:-1]])
    assert LAG == PLACES[1]


def test_agreement_is_counted():
    """Words in their places; ranks share their mean where values are equal."""
    assert share_true([["red", "red"], ["up"]], [["red", "blue"], ["up", "up"]]) == 0.5
    assert stated("Steps: 1 up 2 none, so up in 1 of 2.", "Steps") == ["up", "none"]
    assert stated("nonsense", "Steps") == []
    assert ranks(torch.tensor([3.0, 1.0, 3.0])).tolist() == [2.0, 0.5, 2.0]
    assert correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0])) == pytest.approx(1)
