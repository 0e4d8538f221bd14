"""Rewards: how they are named and weighted, what a judge may answer, and win rates."""

import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from asyncflow.core.graph import Kind, Task
from asyncflow.engine import Invalid, Work
from asyncflow.errors import ConfigError, RewardError
from engines.judge import JudgeEngine
from engines.orders import JudgeOrder
from engines.rewards.base import Reward, checked
from engines.rewards.registry import parse_rewards
from engines.rewards.testing import Blind, Brightness, BrightnessDuel, NotANumber
from engines.rewards.toy import Colour, ColourDuel, Motion
from engines.toy.videos import render

RED, BLUE = "a red square moving left", "a blue circle moving up"


def brightness(video: torch.Tensor, prompt: str) -> float | Invalid:
    return video.double().mean().item() if prompt else Invalid("there is no prompt")


@pytest.mark.parametrize("name", [f"{__name__}:brightness", f"python:{__name__}:brightness"])
def test_a_function_of_a_video_and_its_prompt_is_a_reward(name, monkeypatch):
    """Of its own name and settings; what it says of a video is the outcome, invalid ones included."""
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(brightness=brightness))
    (made,) = parse_rewards([f"{name}=0.5"])
    video = torch.full((1, 2, 2, 3), 7, dtype=torch.uint8)
    assert (made.name, made.weight) == ("brightness", 0.5)
    assert made.reward.score([video, video], ["a", ""]) == [7.0, Invalid("there is no prompt")]
    assert (made.reward.apart, made.reward.on_invalid, made.reward.max_invalid) == (False, "drop-candidate", 1.0)
    for setting, value in {"apart": True, "on_invalid": "abort", "max_invalid": 0.2}.items():
        monkeypatch.setattr(brightness, setting, value, raising=False)
    (made,) = parse_rewards([name])
    assert (made.reward.apart, made.reward.on_invalid, made.reward.max_invalid) == (True, "abort", 0.2)


@pytest.mark.parametrize("own", [brightness, Blind])
def test_a_policy_that_is_none_is_refused(own, monkeypatch):
    """Of a function as of a class: it would otherwise count as the default one."""
    monkeypatch.setattr(own, "on_invalid", "drop_group", raising=False)
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(own=own))
    expected = "on_invalid: expected one of drop-candidate, drop-group, abort, got 'drop_group'"
    with pytest.raises(ConfigError, match=f"^--reward: {__name__}:own: {expected}$"):
        parse_rewards([f"{__name__}:own"])


def test_built_in_rewards_by_name_with_weights():
    """NAME or NAME=WEIGHT, kept in order; a weight of 0 judges without training."""
    made = parse_rewards(["motion=0.5", "colour", "colour-duel=0"])
    assert [type(reward.reward) for reward in made] == [Motion, Colour, ColourDuel]
    assert [reward.weight for reward in made] == [0.5, 1.0, 0.0]


def test_a_class_of_ones_own():
    (made,) = parse_rewards(["engines.rewards.testing:Brightness=2"])
    assert isinstance(made.reward, Brightness)
    assert (made.name, made.weight) == ("brightness", 2.0)


class Nameless(Brightness):
    """A class attribute is missing."""

    name = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["color"], 'unknown reward "color"; did you mean "colour"?'),
        (["qqq"], 'unknown reward "qqq"; known are colour, colour-duel, hpsv2@PLACE, motion, ocr, pickscore@PLACE, '),
        (["motion", "motion=2"], "motion is given twice"),
        (["colour=x"], "expected colour=WEIGHT with a number of at least 0, got colour=x"),
        (["colour=-1"], "got colour=-1"),
        (["colour=nan"], "got colour=nan"),
        (["colour=0", "motion=0"], "all weights are 0"),
        ([], "expected at least one reward; built in are colour"),
        (["no_such_module:X"], "cannot import no_such_module:X: No module named 'no_such_module'"),
        (["engines.rewards.testing:Dim"], "cannot import engines.rewards.testing:Dim"),
        ([":Brightness"], "cannot import :Brightness"),
        (["math:pi"], "math:pi must be a function of a video and its prompt, or a subclass of"),
        (["engines.rewards.base:PointwiseReward"], "or a subclass of PointwiseReward or PairwiseReward, with its"),
    ],
)
def test_a_wrong_reward_is_one_sentence(given, sentence):
    with pytest.raises(ConfigError, match=f"^--reward: .*{re.escape(sentence)}"):
        parse_rewards(given)


def test_a_reward_needs_a_name(monkeypatch):
    monkeypatch.setattr("engines.rewards.testing.Nameless", Nameless, raising=False)
    with pytest.raises(ConfigError, match="has no name; give the class an attribute `name`"):
        parse_rewards(["engines.rewards.testing:Nameless"])


@pytest.mark.parametrize("wrong", [math.nan, math.inf, None, "1", torch.tensor(1.0)])
def test_an_outcome_is_a_finite_number_or_invalid(wrong):
    """Anything else ends the run with the reward's and the prompt's name; it is never taken for a score."""
    with pytest.raises(RewardError, match=f"reward r gave .* for the prompt '{BLUE}'; return a finite number"):
        checked([1, wrong], 2, "r", [RED, BLUE])


def test_as_many_outcomes_as_judgements():
    with pytest.raises(RewardError, match="reward r gave 1 outcomes for 2 judgements"):
        checked([1.0], 2, "r", [RED, BLUE])
    for wrong in (None, torch.zeros(2), iter([1.0, 2.0])):
        with pytest.raises(RewardError, match=f"reward r gave a {type(wrong).__name__}; return a list"):
            checked(wrong, 2, "r", [RED, BLUE])
    assert checked([1, Invalid("dark")], 2, "r", [RED, BLUE]) == [1.0, Invalid("dark")]


def test_win_rates():
    """Points over comparisons, a tie half a point; the rates of a group average one half."""
    outcomes = {(0, 1): 1.0, (0, 2): 0.5, (1, 2): 0.0}
    assert BrightnessDuel().rewards(outcomes, 3) == [0.75, 0.0, 0.75]


def test_win_rates_skip_invalid_comparisons():
    """A comparison that failed counts for neither; without any left a candidate is invalid, with the last reason."""
    outcomes = {(0, 1): 1.0, (0, 2): Invalid("a"), (1, 2): Invalid("b")}
    first, second, third = BrightnessDuel().rewards(outcomes, 3)
    assert (first, second) == (1.0, 0.0)
    assert third == Invalid("no comparison is valid, the last because b")


def test_a_pointwise_reward_is_its_score():
    dark = Invalid("dark")
    assert Brightness().rewards({(1,): dark, (0,): 2.0}, 2) == [2.0, dark]


def test_the_toys_rewards_prefer_what_the_prompt_says():
    generator = torch.Generator().manual_seed(0)
    red, blue = render([RED, BLUE], generator)
    for reward in (Colour(), Motion()):
        right, wrong = reward.score([red, blue], [RED, RED])
        assert right > 0.8 > 0.2 > wrong
    assert ColourDuel().compare([(red, blue), (blue, red), (red, red)], [RED] * 3) == [1.0, 0.0, 0.5]


def videos() -> dict[str, torch.Tensor]:
    """Two micro-batches of two plain videos, of brightness 10, 20, 30 and 40."""
    plain = torch.tensor([10, 20, 30, 40], dtype=torch.uint8)[:, None, None, None, None].expand(4, 2, 3, 3, 3)
    return {"decode/0/0.frames": plain[:2], "decode/0/2.frames": plain[2:]}


def judged(reward: Reward, tasks: list[Task], order: JudgeOrder):
    return JudgeEngine([reward], "cpu").judge(Work(tuple(tasks), videos(), order))


def score(candidate: int, judge: str) -> Task:
    frames = f"decode/0/{candidate // 2 * 2}.frames"
    return Task(f"score/{candidate}", Kind.SCORE, inputs=(frames,), candidates=(candidate,), judge=judge)


def test_a_judge_batch_looks_at_the_right_videos():
    """Each task at its own candidate's place of its own micro-batch, in one call."""
    tasks = [score(candidate, "brightness") for candidate in (3, 0, 1)]
    made = judged(Brightness(), tasks, JudgeOrder((RED,) * 3, ((1,), (0,), (1,))))
    assert made.values == {"score/3": 40 / 255, "score/0": 10 / 255, "score/1": 20 / 255}


@pytest.mark.parametrize("pair", [(0, 3), (0, 1), (1, 0), (3, 2)])
def test_a_comparison_sees_first_and_second(pair):
    """From two micro-batches or from one, in the order of the pair."""
    inputs = tuple(dict.fromkeys(f"decode/0/{candidate // 2 * 2}.frames" for candidate in pair))
    task = Task("compare/x", Kind.COMPARE, inputs=inputs, candidates=pair, judge="brightness-duel")
    made = judged(BrightnessDuel(), [task], JudgeOrder((RED,), (tuple(c % 2 for c in pair),)))
    assert made.values == {"compare/x": float(pair[0] > pair[1])}


def test_invalid_outcomes_come_with_their_reason():
    tasks = [score(0, "blind"), score(1, "blind")]
    made = judged(Blind(), tasks, JudgeOrder((RED, BLUE), ((0,), (1,))))
    assert made.invalid == {"score/0": "it moves left"}
    assert made.values == {"score/1": 20 / 255}


def test_a_score_that_is_not_finite_names_reward_and_prompt():
    with pytest.raises(RewardError, match=f"reward not-a-number gave nan for the prompt '{BLUE}'"):
        judged(NotANumber(), [score(0, "not-a-number")], JudgeOrder((BLUE,), ((0,),)))
