"""Protocols of judges that write: what is asked, and that nothing but a plain verdict becomes a number."""

import json
import math
import re

import pytest
import torch

from asyncflow.engine import Invalid
from asyncflow.errors import ConfigError
from engines.rewards.chat.base import Ask, Reply
from engines.rewards.protocols import custom, unified_flex, unified_score, unified_think, vr_thinker
from engines.rewards.protocols.base import TEMPLATES, Case, ChatProtocol, evenly, fill, read_template, winner
from engines.rewards.protocols.custom import CustomCompare, CustomScore
from engines.rewards.protocols.unified_flex import UnifiedRewardFlex
from engines.rewards.protocols.unified_score import UnifiedRewardScore
from engines.rewards.protocols.unified_think import UnifiedRewardThink
from engines.rewards.protocols.vr_thinker import CARD_2026, PAPER, Variant, VRThinker


def video(frames: int, first: int = 0, size: tuple[int, int] = (4, 6)) -> torch.Tensor:
    """A video whose every frame is plainly its own number."""
    numbers = torch.arange(first, first + frames, dtype=torch.uint8)
    return numbers[:, None, None, None].expand(-1, *size, 3).clone()


def numbers(ask: Ask, message: int = 0) -> list[int]:
    """The numbers of the frames that a message shows."""
    return [int(part[0, 0, 0]) for part in ask.messages[message].parts if isinstance(part, torch.Tensor)]


def reason(outcome: object) -> str:
    assert isinstance(outcome, Invalid), outcome
    return outcome.reason


# ---------------------------------------------------------------------------------------------- what all have in common


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("Video 1", 1.0), ("video 2 is better.", 0.0), ("IMAGE 1", 1.0), ("Video1", 1.0), ("a tie", 0.5),
        ("both are equal", 0.5), ("neither", 0.5), ("Video 1 and Video 2", None), ("Video 3", None), ("", None),
        ("Video 12", None), ("Video 1 is not better", None), ("Video 2 is worse", None), ("not equal", None),
        ("Video 1 isn't", None),
    ],
)  # fmt: skip
def test_a_winner_is_named_plainly(text, points):
    assert winner(text) == points


def test_frames_are_evenly_spaced():
    """As numpy's linspace, rounded down; a short video shows every frame once."""
    assert [int(frame[0, 0, 0]) for frame in evenly(video(33), 8)] == [0, 4, 9, 13, 18, 22, 27, 32]
    assert [int(frame[0, 0, 0]) for frame in evenly(video(3), 8)] == [0, 1, 2]
    assert len(evenly(video(5), 1)) == 1


def test_templates_keep_other_braces_and_never_fill_in_twice():
    assert fill('{"a": {prompt}, {x}}', prompt="{most}", most=3) == '{"a": {most}, {x}}'


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "cannot read"), (b"\xff\xff", "cannot read"), (b"judge!", "does not say where the prompt stands")],
)
def test_a_template_that_is_none(content, sentence, tmp_path):
    file = tmp_path / "mine.txt"
    if content:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"template: .*{sentence}"):
        read_template(file)


@pytest.mark.parametrize("finish", ["length", "repetition"])
@pytest.mark.parametrize(
    "protocol",
    [
        UnifiedRewardFlex("{prompt}", 8, 10),
        UnifiedRewardThink("{prompt}", 8, 10),
        UnifiedRewardScore("{prompt}", 8, 10),
        VRThinker("{prompt}", PAPER, 10),
        CustomScore("{prompt}", 8, 10, answer=re.compile("(4)"), scale=(1, 5)),
    ],
    ids=lambda protocol: type(protocol).__name__,
)
def test_a_reply_that_did_not_end_by_itself_is_no_verdict(protocol, finish):
    """Not even if a verdict stands in it."""
    text = GOOD + "<answer>Video 1</answer><answer>TA=1, MQ=1, VQ=1, OA=1</answer>" + SCORES
    case = Case((video(4),) * protocol.videos, "p")
    assert reason(protocol.proceed(case, [Reply(text, finish, 10)])).startswith(f"{finish}: the answer")


# ------------------------------------------------------------------------------------------------- UnifiedReward-Flex


def flex(overall: str = "Video 1", categories: tuple[str, ...] = ("Video 1", "Video 2", "Video 2")) -> str:
    dims = [{"name": "d", "reason_1": "{", "reason_2": "}", "score_1": 6, "score_2": 4}]
    made = [{"name": f"c {w}", "dims": dims, "cat_reason": "r", "cat_winner": w} for w in categories]
    return json.dumps({"prompt": "p", "categories": made, "reason": "r", "winner": overall})


GOOD = flex()
SCORES = "Alignment Score (1-5): 4\nPhysics Score (1-5): 3\nStyle Score (1-5): 5\n"


@pytest.mark.parametrize(
    ("text", "points"),
    [
        (GOOD, 0.3 + 0.7 / 3),
        (f"```json\n{GOOD}\n```", 0.3 + 0.7 / 3),
        (f"I think {{so}}.\n{GOOD} Done.", 0.3 + 0.7 / 3),
        (flex("video 2 is better", ("Video 2",) * 3), 0.0),
        (flex("Video 1", ("Video 1",) * 4), 1.0),
        (flex("Video 1", ("Video 1", "Video 1", "Video 1", "nonsense")), 1.0),  # a fourth category does not count
        (flex("tie", ("tie",) * 3), 0.5),
    ],
)
def test_flex_reads_the_winners(text, points):
    """Points are 0.3 of the overall winner's and 0.7 of the mean over the first three categories."""
    assert unified_flex.parse(text) == pytest.approx(points, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "found 0"),
        ("Video 1 is better", "found 0"),
        (GOOD[:-1], "found 0"),
        (GOOD[: len(GOOD) // 2], "found 0"),
        ("[" * 100_000 + "{" + "[" * 100_000, "found 0"),
        ('{"a":' * 5_000, "found 0"),
        (GOOD + flex("Video 2"), "found 2"),
        ('{"winner": "Video 1"}', "expected at least 3 categories"),
        ('{"winner": "Video 1", "categories": "Video 1"}', "expected at least 3 categories"),
        ('{"winner": 1, "categories": []}', 'the winner is "1", neither of the videos'),
        (flex("Video 1 and Video 2"), "neither of the videos"),
        (flex("Video 1", ("Video 1", "Video 1")), "expected at least 3 categories"),
        (flex("Video 1", ("Video 1", "", "Video 1")), "category 2 has no winner"),
        ('{"winner": "Video 1", "categories": [1, 2, 3]}', "category 1 has no winner"),
    ],
)
def test_flex_invalid(text, why):
    assert reason(unified_flex.parse(text)).startswith("parse: ") and why in reason(unified_flex.parse(text))


def test_flex_asks_with_eight_frames_of_each_before_the_text():
    """One user message: Video 1's frames, Video 2's, the text with the caption, its braces untouched."""
    protocol = UnifiedRewardFlex(read_template(TEMPLATES / "unified-reward-flex.txt"), 8, 4096)
    ask = protocol.proceed(Case((video(9), video(9, first=100)), "a {red} dog"), [])
    assert isinstance(ask, Ask)
    (message,) = ask.messages
    assert message.role == "user" and [type(part) for part in message.parts] == [torch.Tensor] * 16 + [str]
    assert numbers(ask) == [0, 1, 2, 3, 4, 5, 6, 8, 100, 101, 102, 103, 104, 105, 106, 108]
    text = message.parts[-1]
    assert "Caption: [a {red} dog]" in text and '"winner": "Video 1 or Video 2"\n}' in text
    assert (ask.temperature, ask.max_tokens, ask.stop) == (0.0, 4096, ())


# ------------------------------------------------------------------------------------------------ UnifiedReward-Think


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("<think>Video 2 is sharp.</think><answer>Video 1 is better</answer>", 1.0),
        ("<think></think>< Answer >\nVideo 2 is better\n</ answer>", 0.0),
        ("<answer>Video 2 is better</answer> <answer>video 2</answer>", 0.0),
        ("<answer>They are equal</answer>", 0.5),
    ],
)
def test_think_reads_the_answer(text, points):
    assert unified_think.parse(text) == points


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no <answer>"),
        ("Video 1 is better", "no <answer>"),
        ("<answer>Video 1 is better", "no <answer>"),
        ("<answer></answer>", "names neither"),
        ("<answer>Video 1 is better than Video 2</answer>", "names neither video, or both"),
        ("<answer>Video 1</answer><answer>Video 2</answer>", "contradict"),
        ("<answer>Video 1</answer><answer>?</answer>", "contradict"),
    ],
)
def test_think_invalid(text, why):
    assert reason(unified_think.parse(text)).startswith("parse: ") and why in reason(unified_think.parse(text))


# --------------------------------------------------------------------------------------------------- UnifiedReward-2.0


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (SCORES, 0.75),
        ("**Alignment Score (1-5):** 5\n**Physics Score (1-5):** 5\n**Style Score (1-5):** 5", 1.0),
        ("alignment score: 1, physics score = 1, style score 1", 0.0),
        (SCORES.replace("3", "3.0/5") + "Physics Score (1-5): 3", 0.75),
    ],
)
def test_scores_from_0_to_1(text, score):
    assert unified_score.parse(text) == score


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no Alignment Score"),
        ("4 3 5", "no Alignment Score"),
        (SCORES.replace("Style", "Taste"), "no Style Score"),
        (SCORES[: SCORES.index("5\n")], "no Style Score"),
        (SCORES.replace(": 4", ": four"), "no Alignment Score"),
        (SCORES.replace(": 4", ":"), "no Alignment Score"),
        (SCORES.replace(": 4", ": 0"), "Alignment Score 0 is not from 1 to 5"),
        (SCORES.replace(": 4", ": 6"), "Alignment Score 6 is not from 1 to 5"),
        (SCORES.replace(": 4", ": 45"), "Alignment Score 45 is not from 1 to 5"),
        (SCORES.replace(": 4", ": -4"), "Alignment Score -4 is not from 1 to 5"),
        (SCORES.replace(": 4", ": 4th"), "no Alignment Score"),
        (SCORES + "Style Score (1-5): 2", "several Style Scores"),
    ],
)
def test_scores_invalid(text, why):
    assert reason(unified_score.parse(text)).startswith("parse: ") and why in reason(unified_score.parse(text))


def spelled(text: str, chances: dict[int, dict[str, float]]) -> Reply:
    """A reply of one token a character, but for the alternatives' probabilities at the n-th digit that is a score."""
    tokens = []
    for place, character in enumerate(text):
        alternatives = {character: 0.0}
        if character.isdigit() and text[place - 2 : place] == ": ":
            alternatives = {digit: math.log(p) for digit, p in chances[len(tokens)].items()}
        tokens.append((character, alternatives))
    return Reply(text, tokens=len(tokens), logprobs=tokens)


def test_expected_scores():
    """The digits' mean by probability, whatever else was likely, where each score stands and not in the label."""
    places = [place for place, c in enumerate(SCORES) if c.isdigit() and SCORES[place - 2 : place] == ": "]
    first, second, third = places
    chances = {first: {"4": 0.5, "3": 0.25, "\n": 0.25}, second: {"3": 1.0}, third: {"5": 0.2, " 4": 0.6, "9": 0.1}}
    expected = (4 * 0.5 + 3 * 0.25) / 0.75, 3.0, (5 * 0.2 + 4 * 0.6) / 0.8
    assert unified_score.expect(spelled(SCORES, chances)) == pytest.approx((sum(expected) / 3 - 1) / 4, abs=1e-12)


def test_expected_scores_need_log_probabilities_of_digits():
    """An engine that gives none, a token that is more than a digit, no digit among the alternatives, a bad text."""
    asked = UnifiedRewardScore("{prompt}", 4, 512, expectation=True)
    ask = asked.proceed(Case((video(4),), "p"), [])
    assert isinstance(ask, Ask) and ask.top_logprobs == 20
    case = Case((video(4),), "p")
    assert reason(asked.proceed(case, [Reply(SCORES)])).startswith("client: the engine gave no log-probabilities")
    halves = SCORES.partition("4\n")
    joined = [(part, {"4": 0.0}) for part in halves]
    assert "is no token of its own" in reason(unified_score.expect(Reply(SCORES, logprobs=joined)))
    nothing = [(c, {"x": 0.0}) for c in SCORES]
    assert reason(unified_score.expect(Reply(SCORES, logprobs=nothing))).startswith("parse: the score 4")
    assert "no Alignment Score" in reason(unified_score.expect(Reply("", logprobs=())))


# ----------------------------------------------------------------------------------------------------------- VR-Thinker

LABELS = "TA=1, MQ=0, VQ=2, OA=1"
LABELLED = 0.3 + 0.7 * (1 + 0.5 + 0) / 3
SMALL = Variant(6, 2, 3, 3, 10**6, 10**6, confidence=True)
PAIR = Case((video(6, first=1), video(6, first=7)), "a dog")  # a frame's number is its place in the pool


def call(*frames: object, before: str = "") -> Reply:
    body = json.dumps({"name": "select_frames", "arguments": {"target_frames": list(frames)}})
    return Reply(f"<Snapshot>s</Snapshot>{before}<tool_call>{body}</tool_call>")


def thinker(variant: Variant = SMALL) -> VRThinker:
    return VRThinker(read_template(TEMPLATES / "vr-thinker.txt"), variant, 2048)


def asked(protocol: ChatProtocol, *replies: Reply) -> Ask:
    ask = protocol.proceed(PAIR, replies)
    assert isinstance(ask, Ask), ask
    return ask


def test_thinker_begins_with_a_few_frames_of_each():
    """Evenly spaced from the pool, with their numbers; the system message names the tool, a call ends the turn."""
    ask = asked(thinker())
    assert [message.role for message in ask.messages] == ["system", "user"]
    assert "select_frames" in ask.messages[0].parts[0] and ask.stop == ("</tool_call>",)
    assert numbers(ask, 1) == [3, 6, 9, 12]
    text = ask.messages[1].parts[-1]
    for words in ("they have 12 frames", "frames 1 to 6", "frames 3, 6, 9, 12", "[a dog]", "at most 3 frame", "CF=2"):
        assert words in text


def test_the_released_variants():
    """Of a long video: 96 frames for both and 4 + 4 shown, or 128 each; the later one asks for no confidence."""
    long = Case((video(130), video(130)), "p")
    for variant, total, shown in ((PAPER, 96, "12, 24, 36, 48, 60, 72, 84, 96"), (CARD_2026, 256, "32, 64, 96, 128,")):
        ask = thinker(variant).proceed(long, [])
        assert isinstance(ask, Ask)
        text = ask.messages[1].parts[-1]
        assert f"{total} frames" in text and f"frames {shown}" in text
        assert ("CF" in text) == variant.confidence


def test_thinker_keeps_the_first_and_the_newest_frames_only():
    """A selection shows its frames, and those of the one before are gone; what was written stays."""
    protocol, first, second = thinker(), call(1, 8), call(2, 2, 12)
    ask = asked(protocol, first)
    assert [message.role for message in ask.messages] == ["system", "user", "assistant", "user"]
    assert ask.messages[2].parts == (first.text,) and numbers(ask, 3) == [1, 8]
    ask = asked(protocol, first, second)
    assert numbers(ask, 1) == [3, 6, 9, 12] and numbers(ask, 3) == [] and numbers(ask, 5) == [2, 2, 12]


def test_a_call_that_lost_its_end_to_the_stop_is_a_call():
    """Endpoints leave the text out at which they stopped; the conversation goes on as if it were there."""
    cut = Reply(call(5).text.removesuffix("</tool_call>"))
    ask = asked(thinker(), cut)
    assert numbers(ask, 3) == [5] and ask.messages[2].parts[0] == call(5).text


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (call(0), "numbered from 1 to 12"),
        (call(13), "numbered from 1 to 12"),
        (call(-1, 2), "numbered from 1 to 12"),
        (call(1, 2, 3, 4), "At most 3 frames"),
        (call(), "The call failed"),
        (call("1"), "The call failed"),
        (call(1.5), "The call failed"),
        (call(True), "The call failed"),
        (Reply("<tool_call>select_frames(1)</tool_call>"), "The call failed"),
        (Reply('<tool_call>{"arguments": [1]}</tool_call>'), "The call failed"),
        (Reply('<tool_call>{"arguments": {"target_frames": 1}}</tool_call>'), "The call failed"),
        (Reply("<tool_call>" + "[" * 100_000 + "</tool_call>"), "The call failed"),
    ],
)
def test_a_wrong_call_is_told_and_the_conversation_goes_on(reply, words):
    ask = asked(thinker(), reply)
    (said,) = ask.messages[3].parts
    assert words in said


@pytest.mark.parametrize("tags", [("answer", "answer"), ("final answer", "final answer"), ("Final Answer", "answer")])
def test_thinker_reads_labels(tags):
    """However the tags are spelled; 1 the first is better, 2 the second, 0 the same."""
    opening, closing = tags
    text = f"<think>t</think>< {opening}> {LABELS.replace('=', ' = ')}, CF=2 </{closing}>"
    assert thinker().proceed(PAIR, [Reply(text)]) == pytest.approx(LABELLED, abs=1e-12)
    assert thinker().proceed(PAIR, [Reply(f"<{opening}>{LABELS}")]) == pytest.approx(LABELLED, abs=1e-12)


def test_thinker_ends_with_an_answer_after_selections():
    points = thinker().proceed(PAIR, [call(1), call(2), Reply(f"<answer>{LABELS}</answer>")])
    assert points == pytest.approx(LABELLED, abs=1e-12)


def test_the_last_turn_counts_by_its_recommended_answer():
    """And is invalid without one; earlier turns ask on."""
    recommended = f"<Recommended answer>{LABELS}, CF=3</recommended answer>"
    early = call(1, before=recommended)
    assert isinstance(thinker().proceed(PAIR, [early, early]), Ask)
    assert thinker().proceed(PAIR, [early, early, early]) == pytest.approx(LABELLED, abs=1e-12)
    assert reason(thinker().proceed(PAIR, [early, early, call(1)])) == "parse: no answer after 3 turns"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "neither an answer nor a call"),
        ("Video 1 is better", "neither an answer nor a call"),
        (f"<recommend answer>{LABELS}</recommend answer>", "neither an answer nor a call"),
        ("<answer>Video 1</answer>", "no values of OA"),
        ("<answer>TA=1, MQ=0, VQ=2</answer>", "no values of OA"),
        ("<answer>OA=1, TA=1, MQ=, VQ=2</answer>", "no values of MQ"),
        (f"<answer>{LABELS}, OA=2</answer>", "2 values of OA"),
        (f"<answer>{LABELS}</answer><final answer>{LABELS.replace('TA=1', 'TA=2')}</answer>", "2 values of TA"),
        ("<answer>TA=3, MQ=0, VQ=2, OA=1</answer>", "TA=3 is none of 0, 1 and 2"),
        ("<answer>TA=-1, MQ=0, VQ=2, OA=1</answer>", "TA=-1 is none of 0, 1 and 2"),
        ("<answer>TA=11, MQ=0, VQ=2, OA=1</answer>", "TA=11 is none of 0, 1 and 2"),
    ],
)
def test_thinker_invalid(text, why):
    outcome = thinker().proceed(PAIR, [Reply(text)])
    assert reason(outcome).startswith("parse: ") and why in reason(outcome)


def test_frames_are_made_smaller_where_they_have_too_many_pixels():
    """At first and when selected, each by its own limit; a small frame is the same object."""
    big = Case((video(6, size=(60, 80)),) * 2, "p")
    protocol = thinker(Variant(6, 1, 3, 3, 1200, 300, confidence=False))
    ask = protocol.proceed(big, [call(1)])
    assert isinstance(ask, Ask)
    assert [tuple(ask.messages[turn].parts[place].shape) for turn, place in ((1, 0), (3, 1))] == [
        (30, 40, 3), (15, 20, 3),
    ]  # fmt: skip
    frame = video(1)[0]
    assert vr_thinker.fitted(frame, 10**6) is frame


# --------------------------------------------------------------------------------------------------------------- custom

RATING = re.compile(r"Rating: (\S+)")


@pytest.mark.parametrize(("text", "score"), [("Rating: 10", 1.0), ("Rating: 1", 0.0), ("Rating: 5.5 Rating: 5.5", 0.5)])
def test_custom_score(text, score):
    assert custom.parse_score(text, RATING, (1, 10)) == score


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("great!", "the pattern finds no answers"),
        ("Rating: 3 Rating: 4", "the pattern finds 2 answers"),
        ("Rating: three", '"three" is no number from 1 to 10'),
        ("Rating: 0.9", '"0.9" is no number from 1 to 10'),
        ("Rating: 11", '"11" is no number from 1 to 10'),
        ("Rating: nan", '"nan" is no number'),
        ("Rating: inf", '"inf" is no number'),
    ],
)
def test_custom_score_invalid(text, why):
    outcome = custom.parse_score(text, RATING, (1, 10))
    assert reason(outcome).startswith("parse: ") and why in reason(outcome)


@pytest.mark.parametrize(
    ("word", "points"), [("1", 1.0), ("VIDEO  A", 1.0), ("first", 1.0), ("B", 0.0), (" second ", 0.0), ("Tie", 0.5)]
)
def test_custom_compare(word, points):
    assert custom.parse_winner(f"Better: {word}.", re.compile(r"Better: (.*?)\.")) == points


def test_custom_compare_invalid():
    pattern = re.compile(r"Better: (\w)")
    assert reason(custom.parse_winner("Better: 3", pattern)) == 'parse: "3" names neither video'
    assert reason(custom.parse_winner("Better: 1 Better: 2", pattern)) == "parse: the pattern finds 2 answers"
    protocol = CustomCompare("{prompt}?", 2, 64, answer=pattern)
    assert protocol.proceed(PAIR, [Reply("Better: 1")]) == 1.0
    assert numbers(asked(protocol)) == [1, 6, 7, 12]
