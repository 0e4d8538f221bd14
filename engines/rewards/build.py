"""From `NAME@PLACE`, or a TOML file, to a judge with a model; everything that can be wrong is found here.

Of a judge that writes the name is its protocol, and the place is the address of an OpenAI-compatible endpoint, or a
folder with a model to load into the reward rank. The file says the same by its keys `protocol`, `url` and `model`; what
it names by a relative path lies beside it. CLIP rewards and VideoAlign have a folder.
"""

import importlib.util
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from asyncflow.config import resolve, suggestion
from asyncflow.errors import ConfigError
from engines.rewards.base import Needs, Reward
from engines.rewards.chat.base import ChatEngine
from engines.rewards.chat.in_process import BATCH, InProcess, check_folder
from engines.rewards.chat.vllm import BATCHED_TOKENS, Vllm
from engines.rewards.clip import ClipReward, HPSv2, PickScore
from engines.rewards.footprint import in_process_needs, vllm_needs
from engines.rewards.judges import ChatJudge, ComparingJudge, ScoringJudge, no_needs
from engines.rewards.protocols.base import TEMPLATES, ChatProtocol, read_template
from engines.rewards.protocols.custom import CustomCompare, CustomScore
from engines.rewards.protocols.unified_flex import UnifiedRewardFlex
from engines.rewards.protocols.unified_score import UnifiedRewardScore
from engines.rewards.protocols.unified_think import UnifiedRewardThink
from engines.rewards.protocols.vr_thinker import CARD_2026, PAPER, VRThinker
from engines.rewards.settings import PROTOCOLS, JudgeSettings
from engines.rewards.videoalign import VARIANTS, VideoAlign
from engines.toy import JUDGE

CLIP: dict[str, type[ClipReward]] = {reward.name: reward for reward in (HPSv2, PickScore)}
KNOWN = (*PROTOCOLS, *CLIP, *VARIANTS)
SHIPPED = {"toy-judge": str(JUDGE)}
"""Files of judges that come with their models, by the names under which they are built in."""


def is_judge(specification: str) -> bool:
    """Whether a reward's specification, without its weight, is that of a judge with a model."""
    return "@" in specification or specification.endswith(".toml") or specification in SHIPPED


def make_judge(specification: str) -> Reward:
    """The judge of `NAME@PLACE`, `FILE.toml` or a name in `SHIPPED`, not loaded yet. Raises ConfigError."""
    specification = SHIPPED.get(specification, specification)
    try:
        if specification.endswith(".toml"):
            if not Path(specification).is_file():
                raise ConfigError("there is no such file")
            return _judge(resolve(JudgeSettings, {}, specification), Path(specification).parent)
        name, _, place = specification.partition("@")
        return _judge(_short(name, place), Path())
    except ConfigError as error:
        raise ConfigError(f"--reward {specification}: {str(error).removeprefix(f'{specification}: ')}") from None


def _short(protocol: str, place: str) -> JudgeSettings:
    if protocol not in KNOWN:
        raise ConfigError(f'unknown judge "{protocol}"{suggestion(protocol, KNOWN)}')
    if not place or "?" in place:
        raise ConfigError("expected an address or a folder after the @; other settings go into a file, --reward X.toml")
    if place.startswith(("http://", "https://")):
        return JudgeSettings(protocol=protocol, url=place)  # type: ignore[arg-type]
    return JudgeSettings(protocol=protocol, model=place)  # type: ignore[arg-type]


def _judge(settings: JudgeSettings, folder: Path) -> Reward:
    judge = _writing(settings, folder) if settings.protocol in PROTOCOLS else _scorer(settings, folder)
    judge.max_invalid = settings.max_invalid
    return judge


def _scorer(settings: JudgeSettings, folder: Path) -> Reward:
    kind, place = str(settings.protocol), folder / settings.model
    judge: Reward = CLIP[kind](place) if kind in CLIP else VideoAlign(place, kind)
    judge.name = settings.name or kind
    judge.on_invalid = settings.on_invalid
    return judge


def _writing(settings: JudgeSettings, folder: Path) -> Reward:
    protocol = _protocol(settings, folder)
    engine, needs, apart = _engine(settings, folder, protocol)
    chat = ChatJudge(
        engine, protocol, concurrency=settings.concurrency, deadline=settings.deadline, needs=needs, apart=apart
    )
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


def _engine(
    settings: JudgeSettings, folder: Path, protocol: ChatProtocol
) -> tuple[Callable[[], ChatEngine], Callable[[int, int, torch.device], Needs], bool]:
    """How the engine is made, what it will take, and whether it computes elsewhere."""
    if not settings.url:
        model = folder / settings.model
        has_vllm = importlib.util.find_spec("vllm") is not None
        if settings.engine == "transformers" or (settings.engine is None and not has_vllm):
            check_folder(model)
            rows = min(BATCH, settings.concurrency)
            return partial(InProcess, model), partial(in_process_needs, model, protocol, rows), InProcess.apart
        if not has_vllm:
            raise ConfigError("engine: vllm is not installed: pip install 'asyncflow[judges]'")
        if not (model / "config.json").is_file():
            raise ConfigError(f"model: {model} has no config.json; give the folder of a vision-language model")
        engine = partial(Vllm, model, images=protocol.images, concurrency=settings.concurrency)
        return engine, partial(vllm_needs, model, protocol, settings.concurrency, BATCHED_TOKENS), Vllm.apart
    if importlib.util.find_spec("openai") is None:
        raise ConfigError("an endpoint needs the package openai: pip install 'asyncflow[openai]'")
    from engines.rewards.chat.endpoint import Endpoint

    return partial(Endpoint, settings.url, settings.model), no_needs, Endpoint.apart
