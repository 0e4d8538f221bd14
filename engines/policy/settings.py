"""How a causal video model is sampled: chunks, denoising steps, attention window, size of the clip.

Read from `causal.json` beside a diffusers model's parts; without that file the values are Self-Forcing's.
"""

from pathlib import Path

import msgspec

from asyncflow.errors import ModelError

FILE_NAME = "causal.json"
TRAIN_TIMESTEPS = 1000.0


class CausalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sampler of a causal model.

    Frames are latent frames; `height`, `width` and `fps` are those of the decoded video (pixels, frames a second).
    `denoising_steps` are timesteps of 0..1000, noisiest first, before the shift. `local_attn_size` counts the frames a
    chunk attends to, itself and the `sink_size` first frames of the clip included; -1 attends to everything before it.
    """

    frames_per_chunk: int = 3
    denoising_steps: tuple[float, ...] = (1000.0, 750.0, 500.0, 250.0)
    timestep_shift: float = 5.0
    local_attn_size: int = -1
    sink_size: int = 0
    latent_frames: int = 21
    height: int = 480
    width: int = 832
    fps: int = 16
    text_length: int = 512

    def __post_init__(self) -> None:
        steps = self.denoising_steps
        if not steps or list(steps) != sorted(set(steps), reverse=True) or not 0 < steps[-1] <= steps[0] <= 1000:
            raise ValueError("denoising_steps must fall from at most 1000 and stay above 0")
        if min(self.frames_per_chunk, self.timestep_shift, self.height, self.width, self.fps, self.text_length) <= 0:
            raise ValueError("frames_per_chunk, timestep_shift, height, width, fps and text_length must be positive")
        if self.latent_frames < 1 or self.latent_frames % self.frames_per_chunk:
            raise ValueError("latent_frames must be a positive multiple of frames_per_chunk")
        fits = self.local_attn_size == -1 or self.local_attn_size - self.sink_size >= self.frames_per_chunk
        if self.sink_size < 0 or not fits:
            raise ValueError("local_attn_size must be -1 or hold the sink_size frames and one chunk")

    @property
    def sigmas(self) -> tuple[float, ...]:
        """Noise level entering each denoising step, then a final 0.0.

        sigma = s t / (1 + (s - 1) t) with t = step / 1000 and s the shift: Self-Forcing's `warp_denoising_step`.
        """
        shift = self.timestep_shift
        times = (step / TRAIN_TIMESTEPS for step in self.denoising_steps)
        return (*(shift * t / (1.0 + (shift - 1.0) * t) for t in times), 0.0)

    @property
    def chunks(self) -> tuple[range, ...]:
        """The latent frames of each chunk of a clip, in order."""
        size = self.frames_per_chunk
        return tuple(range(first, first + size) for first in range(0, self.latent_frames, size))

    def visible(self, chunk: range) -> tuple[int, ...]:
        """Earlier frames that `chunk` attends to: the sink, and the window that ends with the chunk."""
        if self.local_attn_size == -1:
            return tuple(range(chunk.start))
        oldest = max(0, chunk.stop - (self.local_attn_size - self.sink_size))
        return tuple(frame for frame in range(chunk.start) if frame < self.sink_size or frame >= oldest)


def load_settings(folder: Path) -> CausalSettings:
    """Read `folder/causal.json`, or return the defaults where there is none. Raises `ModelError` when it is wrong."""
    path = folder / FILE_NAME
    if not path.exists():
        return CausalSettings()
    try:
        return msgspec.json.decode(path.read_bytes(), type=CausalSettings)
    except msgspec.DecodeError as error:
        raise ModelError(f"{path} does not describe a causal sampler: {error}. Correct or remove that file.") from error
