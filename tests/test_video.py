"""Properties of written videos: they decode to what went in, as browsers play it, the same bytes each time."""

import av
import numpy as np
import pytest
import torch
from PIL import Image

from asyncflow.video import contact_sheet, write_mp4


def moving_square(frames: int, height: int, width: int) -> np.ndarray:
    """A red square that moves right over a grey background: uint8 [T, H, W, 3]."""
    video = np.full((frames, height, width, 3), 60, np.uint8)
    for t in range(frames):
        video[t, 2 : height // 2, t + 1 : t + 1 + width // 2] = (200, 40, 40)
    return video


def read_mp4(path) -> np.ndarray:
    """The frames of a video file: uint8 [T, H, W, 3]."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@pytest.mark.parametrize("size", [(32, 32), (31, 17), (300, 257)])
def test_decodes_to_the_same_frames(size, tmp_path):
    video = moving_square(5, *size)
    write_mp4(tmp_path / "samples" / "a.mp4", video)
    decoded = read_mp4(tmp_path / "samples" / "a.mp4")
    factor = max(1, -(-256 // min(size)))
    assert decoded.shape[1:3] == tuple(side * factor + side * factor % 2 for side in size)
    centres = decoded[:, factor // 2 :: factor, factor // 2 :: factor][:, : size[0], : size[1]]
    assert centres.shape == video.shape
    assert np.abs(centres.astype(int) - video).mean() < 4


def test_browsers_play_the_format(tmp_path):
    write_mp4(tmp_path / "a.mp4", torch.from_numpy(moving_square(6, 32, 32)), fps=4)
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
        assert (stream.average_rate, stream.frames) == (4, 6)
    data = (tmp_path / "a.mp4").read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")  # plays before it is fully loaded


def test_same_frames_give_same_bytes(tmp_path):
    for name in ("a.mp4", "b.mp4"):
        write_mp4(tmp_path / name, moving_square(9, 64, 64))
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


def test_contact_sheet_shows_first_to_last_frame_of_each_video(tmp_path):
    ramp = np.repeat(np.arange(0, 250, 25, dtype=np.uint8), 4 * 4 * 3).reshape(10, 4, 4, 3)
    contact_sheet(tmp_path / "sheet.png", [ramp, ramp[::-1].copy()], ["step 0", "step 10"], columns=4, min_side=8)
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    assert sheet.shape == (4 + 2 * (16 + 8 + 4), 4 + 4 * (8 + 4), 3)
    for row, values in enumerate([[0, 75, 150, 225], [225, 150, 75, 0]]):
        top = 4 + row * 28 + 16
        assert [int(sheet[top + 3, 4 + 12 * column + 3, 0]) for column in range(4)] == values
    assert (sheet[4:20] < 128).any()  # the label


@pytest.mark.parametrize(("shape", "dtype"), [((2, 8, 8, 3), float), ((0, 8, 8, 3), np.uint8), ((8, 8, 3), np.uint8)])
def test_anything_but_uint8_frames_is_refused(shape, dtype, tmp_path):
    with pytest.raises(AssertionError):
        write_mp4(tmp_path / "a.mp4", np.zeros(shape, dtype))
