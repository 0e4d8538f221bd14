"""How judges that write are named: PROTOCOL@PLACE, or a file whose keys are checked before anything starts."""

import re
from pathlib import Path

import pytest
import torch

from algorithms.dancegrpo import DanceGRPO, DanceGRPOConfig
from algorithms.prepare import prepare
from algorithms.step import step_graph
from asyncflow.core.graph import JUDGE_KINDS
from asyncflow.engine import Invalid
from asyncflow.errors import ConfigError, RewardError
from engines.rewards import build
from engines.rewards.base import PairwiseReward, PointwiseReward
from engines.rewards.chat.base import Ask, Reply
from engines.rewards.protocols.base import Case
from engines.rewards.registry import parse_rewards
from engines.rewards.settings import APPLIES, PROTOCOLS, JudgeSettings
from engines.rewards.testing import Blind

URL = "http://localhost:8000/v1"
VIDEOALIGN = Path(__file__).parent / "golden" / "videoalign_tiny"
VIDEO = torch.zeros(40, 4, 4, 3, dtype=torch.uint8)


def protocol_of(settings: JudgeSettings, folder: Path = Path()) -> Ask:
    """What the judge of these settings asks first."""
    protocol = build._protocol(settings, folder)
    ask = protocol.proceed(Case((VIDEO,) * protocol.videos, "a dog"), [])
    assert isinstance(ask, Ask)
    return ask


def frames(ask: Ask) -> int:
    return sum(isinstance(part, torch.Tensor) for part in ask.messages[-1].parts)


@pytest.mark.parametrize(
    ("protocol", "kind", "shown", "tokens"),
    [
        ("unified-reward-flex", PairwiseReward, 16, 4096),
        ("unified-reward-think", PairwiseReward, 16, 4096),
        ("unified-reward-2", PointwiseReward, 16, 512),
        ("vr-thinker", PairwiseReward, 8, 4096),
        ("vr-thinker-2026", PairwiseReward, 8, 4096),
    ],
)
def test_a_published_judge_needs_only_its_place(protocol, kind, shown, tokens):
    """Its name, its weight, and its authors' number of frames; a reply may be as long as theirs."""
    (made,) = parse_rewards([f"{protocol}@{URL}=0.7"])
    assert (made.name, made.weight) == (protocol, 0.7) and isinstance(made.reward, kind)
    ask = protocol_of(JudgeSettings(protocol=protocol, url=URL))
    assert frames(ask) == shown and ask.max_tokens == tokens
    assert "a dog" in ask.messages[-1].parts[-1] and "{" not in ask.messages[-1].parts[-1].replace("{\n", "")[:200]


def test_every_protocol_has_a_place_in_the_tables():
    assert set(PROTOCOLS) >= {name for names in APPLIES.values() for name in names}
    for name in PROTOCOLS:
        if not name.startswith("custom"):
            build.make_judge(f"{name}@{URL}")


def test_a_file_says_everything(tmp_path):
    """Two judges of one protocol by their names; templates lie beside the file."""
    (tmp_path / "words.txt").write_text("Which is better? {prompt}")
    file = tmp_path / "judge.toml"
    file.write_text(
        f'protocol = "custom-compare"\nname = "taste"\nurl = "{URL}"\nmodel = "judge-7b"\ntemplate = "words.txt"\n'
        'answer = "Better: (\\\\w)"\nframes = 3\nmax-tokens = 99\npairs = 2\nboth-orders = true\n'
        'on-invalid = "drop-group"\nconcurrency = 4\ndeadline = 60\n'
    )
    made, other = parse_rewards([f"{file}=2", f"unified-reward-flex@{URL}"])
    assert (made.name, made.weight, made.reward.on_invalid) == ("taste", 2.0, "drop-group")
    assert isinstance(made.reward, PairwiseReward) and len(made.reward.pairs(5)) == 10
    assert other.reward.on_invalid == "drop-candidate"


def test_a_file_asks_for_the_base_models_video(tmp_path):
    file = tmp_path / "judge.toml"
    file.write_text(f'protocol = "vr-thinker"\nurl = "{URL}"\npairs = "reference"\nboth-orders = true\n')
    (made,) = parse_rewards([str(file)])
    assert isinstance(made.reward, PairwiseReward)
    assert made.reward.pairs(2) == [(0, 2), (1, 2), (2, 0), (2, 1)]


def test_settings_reach_the_protocol(tmp_path):
    """Frames, turns, tokens, the scale, the expectation, and words of one's own."""
    words = tmp_path / "w.txt"
    words.write_text("{prompt}!")
    ask = protocol_of(JudgeSettings(protocol="unified-reward-2", url=URL, expectation=True, frames=3, template="w.txt"),
                      tmp_path)  # fmt: skip
    assert frames(ask) == 3 and ask.top_logprobs == 20 and ask.messages[0].parts[-1] == "a dog!"
    short = build._protocol(JudgeSettings(protocol="vr-thinker", url=URL, turns=1, frames=2), Path())
    call = Reply('<tool_call>{"arguments": {"target_frames": [1]}}</tool_call>')
    assert short.proceed(Case((VIDEO, VIDEO), "p"), [call]) == Invalid("parse: no answer after 1 turns")
    rating = JudgeSettings(protocol="custom-score", url=URL, template="w.txt", answer="(\\d+)", scale=(0, 50))
    assert build._protocol(rating, tmp_path).proceed(Case((VIDEO,), "p"), [Reply("25")]) == 0.5


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (f"unified-flex@{URL}", 'unknown judge "unified-flex"; did you mean "unified-reward-flex"?'),
        (f"@{URL}", 'unknown judge ""; known are custom-compare'),
        ("unified-reward-flex@", "expected an address or a folder after the @"),
        (f"unified-reward-flex@{URL}?model=x", "other settings go into a file, --reward X.toml"),
        ("unified-reward-flex@nowhere", "model: nowhere has no readable config.json"),
        (f"custom-score@{URL}", "template, answer: custom-score needs both"),
        ("missing.toml", "there is no such file"),
    ],
)
def test_a_wrong_judge_is_one_sentence(given, sentence):
    with pytest.raises(ConfigError, match=f"^--reward {re.escape(given)}: .*{re.escape(sentence)}"):
        parse_rewards([given])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "protocol: expected one of unified-reward-flex, "),
        ("protocol = 1", "protocol: expected one of custom-compare, custom-score, "),
        ("protocl = 1", 'unknown key "protocl"; did you mean "protocol"?'),
        ('protocol = "unified-reward-2"', "url, model: give the url of an endpoint, or as model a folder to load"),
        ('protocol = "unified-reward-2"\nurl = "localhost:1"', "url: expected http://HOST:PORT/v1 or the like, got"),
        ('protocol = "unified-reward-2"\nurl = "http://x"\npairs = 4', "pairs: unified-reward-2 has no use for it"),
        ('protocol = "vr-thinker"\nurl = "http://x"\nexpectation = true', "expectation: vr-thinker has no use for it"),
        ('protocol = "vr-thinker"\nurl = "http://x"\nturns = 0', "turns: expected an integer of at least 1, got 0"),
        ('protocol = "vr-thinker"\nurl = "http://x"\npairs = "most"', "pairs: expected one of all, anchor, refe"),
        ('protocol = "vr-thinker"\nurl = "http://x"\ntemplate = "no.txt"', "template: cannot read "),
        ('protocol = "custom-score"\nurl = "http://x"\nscale = [5, 1]', "template, answer: custom-score needs both"),
        ('protocol = "vr-thinker"\nurl = "http://x"\nname = "a/b"', "name: expected letters, digits, "),
        ("= 1", "not a TOML file"),
    ],
)
def test_a_wrong_key_is_one_sentence(text, sentence, tmp_path):
    """It names the file once."""
    file = tmp_path / "j.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"^--reward {file}: {re.escape(sentence)}") as raised:
        parse_rewards([str(file)])
    assert str(raised.value).count("j.toml") == 1


@pytest.mark.parametrize(
    ("answer", "scale", "sentence"),
    [
        ("(", "[1, 5]", "answer: ( is no regular expression: "),
        ("x", "[1, 5]", "answer: x needs exactly one group"),
        ("(x)(y)", "[1, 5]", "answer: (x)(y) needs exactly one group"),
        ("(x)", "[5, 1]", "scale: expected the worst score before the best, got [5.0, 1.0]"),
    ],
)
def test_a_wrong_pattern_or_scale(answer, scale, sentence, tmp_path):
    (tmp_path / "w.txt").write_text("{prompt}")
    file = tmp_path / "j.toml"
    file.write_text(
        f'protocol = "custom-score"\nurl = "{URL}"\ntemplate = "w.txt"\nanswer = "{answer}"\nscale = {scale}'
    )
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parse_rewards([str(file)])


def test_a_judge_that_only_scores_has_a_policy_of_its_own(tmp_path):
    """Its folder, name and policy may stand in a file; keys of judges that write are refused there."""
    file = tmp_path / "quality.toml"
    said = f'protocol = "videoalign-mq"\nmodel = "{VIDEOALIGN}"\nname = "quality"\n'
    file.write_text(f'{said}on-invalid = "drop-group"\nmax-invalid = 0.1')
    (made,) = parse_rewards([f"{file}=0.5"])
    assert (made.name, made.weight, made.reward.on_invalid, made.reward.max_invalid) == (
        "quality", 0.5, "drop-group", 0.1,
    )  # fmt: skip
    for key in ('url = "http://x"', "frames = 4", "concurrency = 2", 'engine = "transformers"'):
        file.write_text(f"{said}{key}")
        with pytest.raises(ConfigError, match=f"{key.split()[0]}: videoalign-mq has no use for it; leave it out"):
            parse_rewards([str(file)])
    with pytest.raises(ConfigError, match="url: hpsv2 has no use for it"):
        parse_rewards([f"hpsv2@{URL}"])


def test_what_others_compute_is_apart(monkeypatch, tmp_path):
    """An endpoint, vLLM's processes and the CPU's OCR; not what computes on the rank's own device."""
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: name)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    on_vllm = tmp_path / "judge.toml"
    on_vllm.write_text('protocol = "unified-reward-2"\nmodel = "model"')
    rewards = parse_rewards([f"vr-thinker@{URL}", str(on_vllm), "ocr", "toy-judge", "colour"])
    assert {reward.name: reward.reward.apart for reward in rewards} == {
        "vr-thinker": True, "unified-reward-2": True, "ocr": True, "toy-judge": False, "colour": False,
    }  # fmt: skip
    tasks = step_graph(1, 2, mini_batches=1, task_batch=1, rewards=rewards).of(*JUDGE_KINDS)
    assert {task.judge for task in tasks if task.apart} == {"vr-thinker", "unified-reward-2", "ocr"}


def test_a_missing_package_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"an endpoint needs the package openai: pip install 'asyncflow\[openai\]'"):
        parse_rewards([f"unified-reward-2@{URL}"])


def test_what_a_candidate_without_a_reward_means():
    """It alone is dropped, or its group with it, or the run ends; where all have one it means nothing."""
    reward, dark = Blind(), Invalid("dark")
    outcomes, good = {(0,): 1.0, (1,): dark, (2,): 0.0}, {(0,): 1.0, (1,): 0.5}
    assert reward.rewards(outcomes, 3) == [1.0, dark, 0.0]
    reward.on_invalid = "drop-group"
    with_it = Invalid("dropped with its group: dark")
    assert reward.rewards(outcomes, 3) == [with_it, dark, with_it]
    assert reward.rewards(good, 2) == [1.0, 0.5]
    reward.on_invalid = "abort"
    with pytest.raises(RewardError, match="^reward blind could not judge a candidate, which is to end the run: dark$"):
        reward.rewards(outcomes, 3)
    assert reward.rewards(good, 2) == [1.0, 0.5]


def test_pairs_that_cannot_be_are_found_before_anything_starts(tmp_path):
    """Since that depends on the size of a group, by the command rather than by the file."""
    file = tmp_path / "j.toml"
    file.write_text(f'protocol = "vr-thinker"\nurl = "{URL}"\npairs = 3')
    with pytest.raises(ConfigError, match=r"^--reward: pairs = 3: .* an even number below --group-size 5$"):
        prepare("run", DanceGRPOConfig(reward=(str(file),), group_size=5), DanceGRPO, 2)
