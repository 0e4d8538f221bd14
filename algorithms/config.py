"""The options every algorithm shares. An algorithm's own configuration extends `RunConfig` with its few keys."""

from typing import Annotated, Literal

from msgspec import Meta

from algorithms.model import ModelConfig
from asyncflow.core import schedules
from asyncflow.errors import ConfigError
from engines.adapter import BLOCK_LINEARS, AdapterSettings


class RunConfig(ModelConfig, frozen=True, kw_only=True):
    """What to train, on what, and how often to look at it."""

    prompts: Annotated[
        str, Meta(description="Training prompts, a .txt, .csv or .jsonl file; empty for the toy's.")
    ] = ""
    reward: Annotated[
        tuple[str, ...],
        Meta(
            description="Reward: NAME, NAME@PLACE (an endpoint or a folder), FILE.toml (a judge's settings), "
            "module:Class or module:function, with =WEIGHT if not 1; give it again for several."
        ),
    ] = ("colour", "motion")
    reward_ranks: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="Ranks that only judge; by default 1, and 0 for colocated.")
    ] = None
    schedule: Annotated[schedules.Name, Meta(description="How a step's tasks are ordered and placed.")] = "colocated"
    forward_replays: Annotated[
        bool, Meta(description="Give colocated and async-reward the forward-only replays that other systems have.")
    ] = False
    steps: Annotated[int, Meta(ge=1, description="Training steps.")] = 100
    prompts_per_step: Annotated[int, Meta(ge=1, description="Prompts (groups) a step.")] = 4
    group_size: Annotated[int, Meta(ge=2, description="Candidates a prompt.")] = 8
    mini_batches: Annotated[int, Meta(ge=1, description="Optimizer steps a step; they divide the prompts.")] = 1
    task_batch: Annotated[
        int, Meta(ge=1, description="Candidates of one group that a task holds; 1 suits a real model.")
    ] = 8
    replay_order: Annotated[
        Literal["by-chunk", "batched", "packed"],
        Meta(
            description="What one forward of a replay holds: a chunk at a denoising step, a chunk at all steps, or all "
            "chunks at a step. The first needs the least memory."
        ),
    ] = "by-chunk"
    old_log_probs: Annotated[
        Literal["recorded", "recomputed"] | None,
        Meta(
            description="Old log-probabilities as the rollout recorded them, or recomputed before the first update; by "
            "default recorded, and recomputed where the replay's forwards hold more than the rollout's."
        ),
    ] = None
    judge_batch: Annotated[int, Meta(ge=1, description="The most videos (or pairs) that a judge takes at once.")] = 8
    lr: Annotated[float, Meta(gt=0, description="Learning rate of AdamW.")] = 3e-4
    warm_up: Annotated[int, Meta(ge=0, description="Optimizer steps in which the learning rate rises.")] = 0
    weight_decay: Annotated[float, Meta(ge=0, description="Weight decay of AdamW.")] = 1e-4
    max_grad_norm: Annotated[float, Meta(gt=0, description="Norm to which the combined gradient is clipped.")] = 1.0
    lora_rank: Annotated[int, Meta(ge=1, description="Rank of the LoRA.")] = 32
    lora_alpha: Annotated[float, Meta(gt=0, description="Scale of the LoRA, times its rank.")] = 32.0
    lora_targets: Annotated[
        tuple[str, ...],
        Meta(min_length=1, description="Ends of the names of the linears that get a LoRA; give it again for several."),
    ] = BLOCK_LINEARS
    gradient_checkpointing: Annotated[
        bool, Meta(description="Keep the inputs of blocks alone for a backward, and compute the rest again.")
    ] = False
    init_adapter: Annotated[str, Meta(description="Adapter folder to start from; empty for a fresh one.")] = ""
    seed: Annotated[int, Meta(ge=0, description="Seed of everything that is drawn.")] = 0
    exact: Annotated[
        bool, Meta(description="Sum gradients in fixed point, so that ranks and schedule cannot change a bit.")
    ] = False
    deterministic: Annotated[
        bool, Meta(description="Deterministic kernels on a GPU, which are slower; --exact turns them on, too.")
    ] = False
    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="Where models run.")] = "auto"
    channel: Annotated[
        Literal["shared-memory", "gloo", "nccl"],
        Meta(description="How tensors get from rank to rank; nccl needs a GPU for each."),
    ] = "shared-memory"
    out: Annotated[str, Meta(description="Run directory; by default runs/ALGORITHM-TIME.")] = ""
    resume: Annotated[str, Meta(description="Checkpoint, or run directory whose newest one it is, to go on from.")] = ""
    eval_prompts: Annotated[
        str, Meta(description="Held-out prompts; empty for the toy's with the toy, else for no evaluation.")
    ] = ""
    eval_every: Annotated[int, Meta(ge=0, description="Steps between evaluations; 0 for none.")] = 10
    eval_samples: Annotated[int, Meta(ge=1, description="Videos a held-out prompt.")] = 4
    save_every: Annotated[int, Meta(ge=0, description="Steps between checkpoints; 0 for the last step alone.")] = 10
    keep_checkpoints: Annotated[int, Meta(ge=1, description="Checkpoints to keep, besides the best.")] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts_per_step % self.mini_batches:
            raise ConfigError(
                f"--mini-batches: expected a divisor of --prompts-per-step {self.prompts_per_step}, "
                f"since a mini-batch holds whole groups, got {self.mini_batches}"
            )
        if self.replay_order != "by-chunk" and self.old_log_probs == "recorded":
            raise ConfigError(
                f"--old-log-probs: {self.replay_order} replays round otherwise than the rollout, so that its recorded "
                "log-probabilities would clip ratios; leave the option out, or give --replay-order by-chunk"
            )
        if self.model and not self.prompts:
            raise ConfigError("--prompts: a model of your own needs a file of training prompts")

    @property
    def adapter(self) -> AdapterSettings:
        """The LoRA that is trained."""
        return AdapterSettings(rank=self.lora_rank, alpha=self.lora_alpha, targets=self.lora_targets)

    @property
    def deterministic_kernels(self) -> bool:
        """Whether kernels must give the same bits every time."""
        return self.deterministic or self.exact

    @property
    def recomputes_old(self) -> bool:
        """Whether old log-probabilities are recomputed."""
        return self.old_log_probs == "recomputed" or self.replay_order != "by-chunk"

    def judges(self, ranks: int) -> int:
        """How many ranks only judge, in a run of `ranks`. Raises ConfigError if that leaves no actor."""
        wanted = self.reward_ranks if self.reward_ranks is not None else int(self.schedule != "colocated")
        try:
            schedules.cluster(self.schedule, ranks, wanted)
        except ValueError as error:
            raise ConfigError(f"--reward-ranks: {error}") from None
        return wanted
