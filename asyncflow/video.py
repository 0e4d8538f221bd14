"""Videos and pictures for a person: an mp4 that every browser plays, and contact sheets of frames.

The same frames give the same bytes: encoding is single-threaded and writes no date. Videos are uint8 [T, H, W, 3], RGB,
as numpy arrays or CPU tensors. Called by the commands for `samples/`, and by bench/ for its figures.
"""

from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

Frames = npt.NDArray[np.uint8]


def write_mp4(path: Path, video: npt.ArrayLike, fps: int = 8, min_side: int = 256) -> None:
    """Write H.264 (yuv420p) at `fps` frames a second.

    A video whose shorter side is below `min_side` pixels is scaled up by the integer factor that reaches it, each pixel
    becoming a square. yuv420p needs even sides: the last row or column is repeated where one is odd.
    """
    frames = _enlarged(_checked(video), min_side)
    frames = np.pad(frames, [(0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)], mode="edge")
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart", "fflags": "+bitexact"}) as container:
        options = {"crf": "12", "preset": "veryfast", "threads": "1", "flags": "+bitexact"}
        stream = container.add_stream("libx264", rate=fps, options=options)
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode(None))


def contact_sheet(
    path: Path, videos: Sequence[npt.ArrayLike], labels: Sequence[str] = (), columns: int = 6, min_side: int = 96
) -> None:
    """Write a PNG with a row for each video: `columns` frames, spread evenly from first to last, under its label.

    Frames are enlarged as in `write_mp4`.
    """
    assert videos
    assert not labels or len(labels) == len(videos)
    rows = [_enlarged(_checked(video), min_side) for video in videos]
    height, width = (max(row.shape[axis] for row in rows) for axis in (1, 2))
    gap, band = 4, 16 if labels else 0
    size = (gap + columns * (width + gap), gap + len(rows) * (band + height + gap))
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for place, frames in enumerate(rows):
        top = gap + place * (band + height + gap)
        if labels:
            draw.text((gap, top), labels[place], fill="black")
        for column, index in enumerate(np.linspace(0, len(frames) - 1, columns).round().astype(int)):
            sheet.paste(Image.fromarray(frames[index]), (gap + column * (width + gap), top + band))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def _checked(video: npt.ArrayLike) -> Frames:
    frames = np.asarray(video)
    assert frames.dtype == np.uint8, frames.dtype
    assert frames.ndim == 4, frames.shape
    assert frames.shape[-1] == 3, frames.shape
    assert frames.size, frames.shape
    return frames


def _enlarged(frames: Frames, min_side: int) -> Frames:
    factor = max(1, -(-min_side // min(frames.shape[1:3])))
    return frames.repeat(factor, axis=1).repeat(factor, axis=2)
