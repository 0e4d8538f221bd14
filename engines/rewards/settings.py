"""The settings of a judge with a model: the keys of its TOML file, checked before anything starts."""

import re
from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct

from asyncflow.errors import ConfigError
from engines.rewards.base import OnInvalid

Protocol = Literal[
    "unified-reward-flex",
    "unified-reward-think",
    "unified-reward-2",
    "vr-thinker",
    "vr-thinker-2026",
    "custom-score",
    "custom-compare",
]
PROTOCOLS: tuple[str, ...] = get_args(Protocol)
"""Of judges that write."""
Scorer = Literal["hpsv2", "pickscore", "videoalign", "videoalign-vq", "videoalign-mq", "videoalign-ta"]
"""Judges that do not, but score."""
SCORING = ("unified-reward-2", "custom-score")
COMPARING = tuple(name for name in PROTOCOLS if name not in SCORING)

APPLIES = {
    **dict.fromkeys(("url", "engine", "template", "frames", "max_tokens", "concurrency", "deadline"), PROTOCOLS),
    "answer": ("custom-score", "custom-compare"),
    "scale": ("custom-score",),
    "expectation": ("unified-reward-2",),
    "turns": ("vr-thinker", "vr-thinker-2026"),
    "pairs": COMPARING,
    "both_orders": COMPARING,
}
"""The keys that some protocols have no use for, and those that do."""


class JudgeSettings(Struct, frozen=True, kw_only=True):
    """A judge, where it runs, and how it is asked."""

    protocol: Annotated[
        Protocol | Scorer | None, Meta(description="How the judge is asked and its answers are read, or its kind.")
    ] = None
    name: Annotated[str, Meta(description="The reward's name; empty for the protocol's.")] = ""
    url: Annotated[str, Meta(description="Address of an OpenAI-compatible endpoint, with its /v1.")] = ""
    model: Annotated[
        str, Meta(description="With a url the model's name there, empty for the only one; else a model's folder.")
    ] = ""
    engine: Annotated[
        Literal["vllm", "transformers"] | None,
        Meta(description="What runs the folder's model; by default vllm where it is installed."),
    ] = None
    template: Annotated[str, Meta(description="File with your own words, {prompt} standing for the prompt.")] = ""
    answer: Annotated[str, Meta(description="Regular expression whose one group is the answer.")] = ""
    scale: Annotated[tuple[float, float], Meta(description="The worst and the best score of an answer.")] = (1.0, 10.0)
    expectation: Annotated[
        bool, Meta(description="Scores that the log-probabilities expect, not those that are written.")
    ] = False
    frames: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Frames shown of each video; by default the protocol's.")
    ] = None
    turns: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="The most turns; by default the protocol's.")
    ] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Tokens of a reply; by default the protocol's.")
    ] = None
    pairs: Annotated[
        Literal["all", "anchor", "reference"] | Annotated[int, Meta(ge=1)],
        Meta(
            description="Whom a candidate meets: all others, the first candidate, a video of the base model, or so "
            "many others."
        ),
    ] = "all"
    both_orders: Annotated[bool, Meta(description="Compare each pair a second time, the other way round.")] = False
    on_invalid: Annotated[
        OnInvalid, Meta(description="Whether a candidate without a reward is dropped, or its group, or the run ends.")
    ] = "drop-candidate"
    max_invalid: Annotated[
        float, Meta(ge=0, le=1, description="Share of some steps' judgements that may be invalid; more ends the run.")
    ] = 0.3
    concurrency: Annotated[int, Meta(ge=1, description="Conversations at once.")] = 16
    deadline: Annotated[float, Meta(gt=0, description="Seconds for a judgement, all turns together.")] = 300.0

    def __post_init__(self) -> None:
        if self.protocol is None:
            raise ConfigError(f"protocol: expected one of {', '.join((*PROTOCOLS, *get_args(Scorer)))}")
        defaults = {key: default for key, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True)}
        for key, protocols in APPLIES.items():
            if getattr(self, key) != defaults[key] and self.protocol not in protocols:
                raise ConfigError(f"{key.replace('_', '-')}: {self.protocol} has no use for it; leave it out")
        if self.protocol.startswith("custom") and not (self.template and self.answer):
            raise ConfigError(f"template, answer: {self.protocol} needs both")
        if not re.fullmatch(r"[\w.-]*", self.name):
            raise ConfigError(f"name: expected letters, digits, '.', '-' and '_', got {self.name}")
        if not self.url and not self.model:
            raise ConfigError("url, model: give the url of an endpoint, or as model a folder to load")
        if self.url and self.engine:
            raise ConfigError(f"engine: the url's server runs the model; leave {self.engine} out, or the url")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url: expected http://HOST:PORT/v1 or the like, got {self.url}")
        if not self.scale[0] < self.scale[1]:
            raise ConfigError(f"scale: expected the worst score before the best, got {list(self.scale)}")
