"""Print how far the toy's judge agrees with the pixel measure: `python -m engines.toy.assess_judge [--judge FILE]`.

On videos of held-out prompts: the toy's own, and painted ones with faults. The pixel measure is the mean of its colour
and motion scores. Deterministic for one machine and thread count.
"""

import asyncio
import re
from itertools import combinations
from pathlib import Path

import click
import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from asyncflow.config import resolve
from asyncflow.engine import Invalid
from engines.rewards.chat.base import Ask
from engines.rewards.chat.in_process import InProcess
from engines.rewards.protocols.base import Case, read_template
from engines.rewards.protocols.custom import CustomScore
from engines.rewards.settings import JudgeSettings
from engines.toy import JUDGE, MODEL
from engines.toy.judge_videos import generate_videos, paint_faulty
from engines.toy.judge_words import look, named
from engines.toy.videos import split_prompts

MARGIN = 0.05
"""Pairs whose pixel scores differ by less are not counted: either may be called the better one."""


async def ask(judge: Path, videos: Tensor, prompts: list[str]) -> list[tuple[str, float | Invalid]]:
    """The judge's reply to each video, and the score that its protocol reads there, at the first attempt."""
    settings = resolve(JudgeSettings, {}, str(judge))
    protocol = CustomScore(
        read_template(judge.parent / settings.template), settings.frames or 8, settings.max_tokens or 4096,
        answer=re.compile(settings.answer), scale=settings.scale,
    )  # fmt: skip
    engine = InProcess(judge.parent / settings.model)
    await engine.start(torch.device("cpu"), cache_bytes=0)

    async def one(case: Case) -> tuple[str, float | Invalid]:
        asked = protocol.proceed(case, [])
        assert isinstance(asked, Ask)
        reply = await engine.complete(asked)
        outcome = protocol.proceed(case, [reply])
        assert not isinstance(outcome, Ask)
        return reply.text, outcome

    try:
        cases = [Case((video,), prompt) for video, prompt in zip(videos, prompts, strict=True)]
        return await asyncio.gather(*(one(case) for case in cases))
    finally:
        await engine.close()


def stated(reply: str, what: str) -> list[str]:
    """The words that a reply lists after `what`, one a frame or step."""
    listed = re.search(rf"{what}:((?: \d \w+)*)", reply)
    return re.findall(r"\d (\w+)", listed[1]) if listed else []


def share_true(told: list[list[str]], truth: list[list[str]]) -> float:
    """Share of the words in `truth` that stand in the same place in what was told."""
    right = [said[i : i + 1] == [word] for said, words in zip(told, truth, strict=True) for i, word in enumerate(words)]
    return sum(right) / len(right)


def correlation(first: Tensor, second: Tensor) -> float:
    """Pearson's."""
    return torch.corrcoef(torch.stack([first, second]))[0, 1].item()


def ranks(values: Tensor) -> Tensor:
    """Ranks, their mean where values are equal, so that the correlation of ranks is Spearman's."""
    return ((values[:, None] > values).sum(1) + 0.5 * (values[:, None] == values).sum(1)).double()


def compare(replies: list[tuple[str, float | Invalid]], videos: Tensor, prompts: list[str]) -> str:
    """Agreement of the replies with the pixel measure, as one line."""
    seen = [look(video) for video in videos]
    measured = []
    for there, prompt in zip(seen, prompts, strict=True):
        colour, way = named(prompt)
        measured.append((there.colour_scores[colour] + there.motion_scores[way]) / 2)
    valid = [i for i, (_, score) in enumerate(replies) if not isinstance(score, Invalid)]
    score = {i: float(replies[i][1]) for i in valid}  # type: ignore[arg-type]
    pairs = [
        (score[i] - score[j]) * (measured[i] - measured[j])
        for i, j in combinations(valid, 2)
        if prompts[i] == prompts[j] and abs(measured[i] - measured[j]) > MARGIN
    ]
    given, truth = torch.tensor([score[i] for i in valid]), torch.tensor([measured[i] for i in valid])
    return (
        f"pairs ordered alike {sum(pair > 0 for pair in pairs) / len(pairs):6.1%} of {len(pairs)}, "
        f"tied {sum(pair == 0 for pair in pairs) / len(pairs):5.1%}, "
        f"Pearson {correlation(given, truth):.3f}, Spearman {correlation(ranks(given), ranks(truth)):.3f}, "
        f"mean {given.mean():.3f} (pixels {truth.mean():.3f}), "
        f"true of colours {share_true([stated(r, 'Colours') for r, _ in replies], [s.colours for s in seen]):6.1%}, "
        f"of steps {share_true([stated(r, 'Steps') for r, _ in replies], [s.steps for s in seen]):6.1%}, "
        f"unreadable {1 - len(valid) / len(replies):.1%}"
    )


@click.command()
@click.option(
    "--judge", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=JUDGE,
    help="Settings of the judge; by default the one that ships.",
)
@click.option("--videos", default=216, show_default=True, help="Videos of each kind.")
@click.option("--seed", default=0, show_default=True, help="Seed of all noise.")
def main(judge: Path, videos: int, seed: int) -> None:
    """Print how far the judge agrees with the pixel measure, and whether what it states is true."""
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    generator = torch.Generator().manual_seed(seed)
    _, held_out = split_prompts()
    prompts = (held_out * videos)[:videos]
    kinds = {"the toy's": generate_videos(MODEL, prompts, generator), "painted": paint_faulty(prompts, generator)}
    for kind, made in kinds.items():
        replies = asyncio.run(ask(judge, made, prompts))
        click.echo(f"{kind:10}{compare(replies, made, prompts)}")
    click.echo(f'"{prompts[0]}": {replies[0][0]}')


if __name__ == "__main__":
    main()
