"""One replay against two: time and peak memory of the orders of replay, at several sizes.

"two replays" is what other systems do: a forward-only replay for the log-probabilities, then a training replay, chunk
by chunk. All keep DanceGRPO's sums, of ratios that start at 1. Seconds are of one core, whatever else the machine does.
"""

import gc
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import click
import torch
from diffusers import WanTransformer3DModel

from algorithms.dancegrpo import DanceGRPO, DanceGRPOConfig
from bench.table import report, spread
from engines.adapter import Adapter, AdapterSettings
from engines.policy import CausalSettings, Policy
from engines.replay import Order, Replayer
from engines.rollout import Trajectory

VARIANTS: dict[str, tuple[bool, Order, bool]] = {
    "two replays": (True, "by-chunk", False),
    "by-chunk": (False, "by-chunk", False),
    "batched": (False, "batched", False),
    "packed": (False, "packed", False),
    "two replays, checkpointed": (True, "by-chunk", True),
    "by-chunk, checkpointed": (False, "by-chunk", True),
    "packed, checkpointed": (False, "packed", True),
}
"""Whether a forward-only replay comes first, the order, and gradient checkpointing."""
BASE = "two replays"
SIZES = {
    "8 clips of 3 chunks of 48 tokens, 3 layers of 96": (8, 3, 8, 3, 96),
    "1 clip of 7 chunks of 48 tokens, 4 layers of 128": (1, 7, 8, 4, 128),
    "1 clip of 7 chunks of 192 tokens, 6 layers of 256": (1, 7, 16, 6, 256),
    "1 clip of 3 chunks of 768 tokens, 4 layers of 512": (1, 3, 32, 4, 512),
}
"""Batch, chunks, latent height and width, layers, hidden size; three latent frames a chunk, patches of 2 x 2."""
ALGORITHM = DanceGRPO(DanceGRPOConfig(model="random", prompts="none"), (1.0,))


@click.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="File to write the table to.")
@click.option("--rounds", default=3, show_default=True, help="Times each variant is timed, in turn.")
def replay(json_file: Path | None, rounds: int) -> None:
    """Replay random models in every order; each peak is that of a process of its own."""
    torch.set_num_threads(1)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    rows = []
    for size in SIZES:
        runs = {name: _prepared(size, name) for name in VARIANTS}
        seconds: dict[str, list[float]] = defaultdict(list)
        for place in range(rounds + 1):
            for name, run in runs.items():
                began = time.process_time()
                run()
                if place:  # the first round warms up
                    seconds[name].append(time.process_time() - began)
        for name in VARIANTS:
            with processes.Pool(1) as pool:
                megabytes = pool.apply(_peak, (size, name))
            rows.append(
                {
                    "size": size,
                    "replay": name,
                    **{f"s {key}" if key != "n" else key: value for key, value in spread(seconds[name]).items()},
                    "speedup": spread([a / b for a, b in zip(seconds[BASE], seconds[name], strict=True)])["median"],
                    "peak MB": megabytes,
                }
            )
    report("replay: one candidate task in each order", rows, json_file)


def _prepared(size: str, variant: str) -> Callable[[], None]:
    """A replay of random latents by a random model of that size, ready to be run again and again."""
    batch, chunks, side, layers, hidden = SIZES[size]
    forward_first, order, checkpointing = VARIANTS[variant]
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=hidden // 32, attention_head_dim=32, in_channels=16, out_channels=16, text_dim=64,
        freq_dim=64, ffn_dim=4 * hidden, num_layers=layers, rope_max_seq_len=64,
    )  # fmt: skip
    model.requires_grad_(False)
    if checkpointing:
        model.enable_gradient_checkpointing()
    policy = Policy(model, CausalSettings(latent_frames=3 * chunks))
    adapter = Adapter(model, AdapterSettings(), seed=0)
    clip = (batch, 16, 3 * chunks, side, side)
    replayer = Replayer(
        policy=policy,
        trajectory=Trajectory(torch.randn(4, *clip), torch.randn(clip), torch.empty(0)),
        text=torch.randn(batch, 32, 64),
        units=ALGORITHM.units,
        steps=(0, 1, 2),
        order=order,
    )

    def weigh(units: torch.Tensor, steps: slice) -> torch.Tensor:
        now = units.double()
        return ALGORITHM.weights(now, now[:, :, 0], torch.ones(now.shape[:2], dtype=torch.bool))

    def run() -> None:
        if forward_first:
            replayer.forward_only()
        replayer.replay(adapter, weigh)

    return run


def _peak(size: str, variant: str) -> float:
    """The most memory in MB that a replay adds to what its model and its inputs take."""
    torch.set_num_threads(1)
    run = _prepared(size, variant)
    gc.collect()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    run()
    return (_resident("VmHWM") - before) / 1000


def _resident(field: str) -> float:
    """A field of this process's memory in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))
