"""From `NAME@PLACE`, or a TOML file, to a judge with a model; everything that can be wrong is found here.

Of a judge that writes the name is its protocol, and the place is the address of an OpenAI-compatible endpoint, or a
folder with a model to load into the reward rank. The file says the same by its keys `protocol`, `url` and `model`; what
it names by a relative path lies beside it. A CLIP reward has a folder.
"""

import importlib.util
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from asyncflow.config import resolve, suggestion
from asyncflow.errors import ConfigError
from engines.rewards.base import Reward
from engines.rewards.chat.base import ChatEngine
from engines.rewards.chat.in_process import InProcess, check_folder
from engines.rewards.clip import ClipReward, HPSv2, PickScore
from engines.rewards.judges import ChatJudge, ComparingJudge, ScoringJudge
from engines.rewards.protocols.base import TEMPLATES, ChatProtocol, read_template
from engines.rewards.protocols.custom import CustomCompare, CustomScore
from engines.rewards.protocols.unified_flex import UnifiedRewardFlex
from engines.rewards.protocols.unified_score import UnifiedRewardScore
from engines.rewards.protocols.unified_think import UnifiedRewardThink
from engines.rewards.protocols.vr_thinker import CARD_2026, PAPER, VRThinker
from engines.rewards.settings import PROTOCOLS, JudgeSettings

CLIP: dict[str, type[ClipReward]] = {reward.name: reward for reward in (HPSv2, PickScore)}
KNOWN = (*PROTOCOLS, *CLIP)


def is_judge(specification: str) -> bool:
    """Whether a reward's specification, without its weight, is that of a judge with a model."""
    return "@" in specification or specification.endswith(".toml")


def make_judge(specification: str) -> Reward:
    """The judge of `NAME@PLACE` or `FILE.toml`, not loaded yet. Raises ConfigError."""
    try:
        if specification.endswith(".toml"):
            if not Path(specification).is_file():
                raise ConfigError("there is no such file")
            return _judge(resolve(JudgeSettings, {}, specification), Path(specification).parent)
        name, _, place = specification.partition("@")
        if name in CLIP:
            return CLIP[name](Path(place))
        return _judge(_short(name, place), Path())
    except ConfigError as error:
        raise ConfigError(f"--reward {specification}: {str(error).removeprefix(f'{specification}: ')}") from None


def _short(protocol: str, place: str) -> JudgeSettings:
    if protocol not in PROTOCOLS:
        raise ConfigError(f'unknown judge "{protocol}"{suggestion(protocol, KNOWN)}')
    if not place or "?" in place:
        raise ConfigError("expected an address or a folder after the @; other settings go into a file, --reward X.toml")
    if place.startswith(("http://", "https://")):
        return JudgeSettings(protocol=protocol, url=place)  # type: ignore[arg-type]
    return JudgeSettings(protocol=protocol, model=place)  # type: ignore[arg-type]


def _judge(settings: JudgeSettings, folder: Path) -> Reward:
    protocol = _protocol(settings, folder)
    engine = _engine(settings, folder)
    chat = ChatJudge(engine, protocol, concurrency=settings.concurrency, deadline=settings.deadline)
    name = settings.name or str(settings.protocol)
    if protocol.videos == 1:
        return ScoringJudge(name, chat, on_invalid=settings.on_invalid)
    return ComparingJudge(
        name, chat, on_invalid=settings.on_invalid, opponents=settings.pairs, both_orders=settings.both_orders
    )


def _protocol(settings: JudgeSettings, folder: Path) -> ChatProtocol:
    name = str(settings.protocol)
    file = folder / settings.template if settings.template else TEMPLATES / f"{name.removesuffix('-2026')}.txt"
    template, tokens = read_template(file), settings.max_tokens or 4096
    match name:
        case "unified-reward-flex":
            return UnifiedRewardFlex(template, settings.frames or 8, tokens)
        case "unified-reward-think":
            return UnifiedRewardThink(template, settings.frames or 8, tokens)
        case "unified-reward-2":
            return UnifiedRewardScore(
                template, settings.frames or 16, settings.max_tokens or 512, expectation=settings.expectation
            )
        case "vr-thinker" | "vr-thinker-2026":
            variant = PAPER if name == "vr-thinker" else CARD_2026
            return VRThinker(template, variant.changed(first=settings.frames, turns=settings.turns), tokens)
        case "custom-score":
            pattern = _pattern(settings.answer)
            return CustomScore(template, settings.frames or 8, tokens, answer=pattern, scale=settings.scale)
    return CustomCompare(template, settings.frames or 8, tokens, answer=_pattern(settings.answer))


def _pattern(answer: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(answer, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"answer: {answer} is no regular expression: {error}") from None
    if pattern.groups != 1:
        raise ConfigError(f"answer: {answer} needs exactly one group, (...), for the answer; (?:...) makes none")
    return pattern


def _engine(settings: JudgeSettings, folder: Path) -> Callable[[], ChatEngine]:
    if not settings.url:
        model = folder / settings.model
        check_folder(model)
        return partial(InProcess, model)
    if importlib.util.find_spec("openai") is None:
        raise ConfigError("an endpoint needs the package openai: pip install 'asyncflow[openai]'")
    from engines.rewards.chat.endpoint import Endpoint

    return partial(Endpoint, settings.url, settings.model)
