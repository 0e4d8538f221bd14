"""Videos of a run before and after training, side by side as a picture: same prompts, same noise."""

from pathlib import Path

import av
import click
import numpy as np

from asyncflow.video import Frames, contact_sheet

SIDE = 64


@click.command()
@click.argument("run", type=click.Path(exists=True, path_type=Path))
@click.argument("picture", type=click.Path(path_type=Path))
@click.option("--prompts", default=8, show_default=True, help="Prompts to show.")
def samples(run: Path, picture: Path, prompts: int) -> None:
    """Draw the first and the last evaluation's videos of the run directory RUN as the PNG file PICTURE."""
    first, *_, last = sorted((run / "samples").iterdir())
    videos, labels = [], []
    for before in sorted(first.glob("*.mp4"))[:prompts]:
        words = before.stem.partition("-")[2].replace("-", " ")
        for folder, when in ((first, "before"), (last, "after")):
            videos.append(_read(folder / before.name))
            labels.append(f"{words}, {when}")
    contact_sheet(picture, videos, labels, columns=9, min_side=SIDE)
    click.echo(f"wrote {picture}")


def _read(path: Path) -> Frames:
    """The frames of a video, every n-th pixel so that the shorter side has about SIDE of them."""
    with av.open(str(path)) as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    every = max(1, min(frames.shape[1:3]) // SIDE)
    return frames[:, every // 2 :: every, every // 2 :: every]
