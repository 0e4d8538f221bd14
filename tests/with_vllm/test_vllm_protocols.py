"""Protocols over vLLM itself: whatever a model of random weights writes, an outcome is a number or has its reason."""

from collections.abc import Sequence
from typing import Any, get_args

import pytest
import torch

from asyncflow.engine import Invalid
from engines.rewards.base import Outcome
from engines.rewards.judging import Judging
from engines.rewards.metrics import reason_class
from engines.rewards.protocols.base import TEMPLATES, Case, ChatProtocol, ReasonClass, read_template
from engines.rewards.protocols.unified_flex import UnifiedRewardFlex
from engines.rewards.protocols.unified_score import UnifiedRewardScore
from engines.rewards.protocols.unified_think import UnifiedRewardThink
from engines.rewards.protocols.vr_thinker import CARD_2026, PAPER, VRThinker
from tests.with_vllm.judge_script import Judge, asking, unfinished

CASES = 8


def template(name: str) -> str:
    return read_template(TEMPLATES / f"{name}.txt")


def outcomes(judge: Judge, protocol: ChatProtocol, deadline: float = 60) -> Sequence[Outcome]:
    videos = torch.randint(256, (CASES, 2, 4, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    cases = [Case(tuple(pair)[: protocol.videos], f"prompt {place}") for place, pair in enumerate(videos)]
    judged = judge.runner.run(Judging(judge.engine, protocol, CASES, deadline).judge(cases, lambda: None))
    return [outcome for outcome, _ in judged]


def terse(schema: Any) -> Any:
    """The same, but for texts of at most five letters: a model of random weights would not stop."""
    if isinstance(schema, dict):
        short = {"maxLength": 5} if schema.get("type") == "string" and "enum" not in schema else {}
        return {**{name: terse(value) for name, value in schema.items()}, **short}
    return schema


def test_a_schema_makes_verdicts_of_nonsense(judge):
    """The first answer cannot be read; the second holds the protocol's schema, whoever wins."""
    protocol = UnifiedRewardFlex(template("unified-reward-flex"), 1, 2000)
    protocol.schema = terse(protocol.schema)  # type: ignore[misc]
    made = outcomes(judge, protocol)
    assert all(isinstance(outcome, float) and 0 <= outcome <= 1 for outcome in made), made
    assert len(set(made)) > 1


@pytest.mark.parametrize(
    "protocol",
    [
        UnifiedRewardThink(template("unified-reward-think"), 2, 64),
        UnifiedRewardScore(template("unified-reward-2"), 4, 64, expectation=True),
        VRThinker(template("vr-thinker"), PAPER.changed(first=1, turns=2), 64),
        VRThinker(template("vr-thinker"), CARD_2026.changed(first=1, turns=2), 64),
    ],
    ids=["think", "score", "vr-thinker", "vr-thinker-2026"],
)
def test_nonsense_is_never_a_number(judge, protocol):
    made = outcomes(judge, protocol)
    assert all(isinstance(outcome, Invalid) for outcome in made), made
    assert {reason_class(outcome.reason) for outcome in made} <= set(get_args(ReasonClass))


def test_a_deadline_aborts_what_is_under_way(judge):
    """All are told, vLLM has forgotten them, and answers the next."""
    protocol = UnifiedRewardFlex(template("unified-reward-flex"), 1, 4000)
    protocol.proceed = lambda case, replies: asking(case.prompt, max_tokens=4000, temperature=2.0)  # type: ignore
    made = outcomes(judge, protocol, deadline=0.5)
    assert [outcome.reason for outcome in made] == ["timeout: no verdict within 0.5 seconds"] * CASES
    assert unfinished(judge) == 0 and judge.complete(asking("a"))[0].tokens == 12
