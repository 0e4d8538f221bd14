"""Published recipes, by name: values for keys of a configuration, which `--preset NAME` puts before its defaults.

What a TOML file or the command line says goes before a preset. A key that a command does not have is passed over. Where
the values come from:

* `self-forcing-480p`. The sampler is Self-Forcing's (configs/self_forcing_dmd.yaml): chunks of 3 latent frames, four
  steps shifted by 5, attention to everything before, 81 frames of 480x832. Training is DanceGRPO's LoRA recipe
  (scripts/finetune, FLUX): rank 128, alpha 256 on the attention's linears, learning rate 3e-4, 12 candidates a prompt,
  two optimizer steps a rollout.
* `longlive-480p`. The sampler is LongLive 1.0's: the same steps, with a window of 12 latent frames of which the first 3
  are the clip's first, and the 129 frames on which KVPO trains it. The LoRA and its training are KVPO's: rank and alpha
  256 on all linears of a block, learning rate 1e-5 after 5 steps of warm-up, weight decay 0.01, 8 candidates a prompt
  and an optimizer step for each prompt.
"""

from typing import Any, Literal, TypeAlias

Name: TypeAlias = Literal["self-forcing-480p", "longlive-480p"]

_SAMPLER: dict[str, Any] = {
    "frames_per_chunk": 3,
    "denoising_steps": (1000.0, 750.0, 500.0, 250.0),
    "timestep_shift": 5.0,
    "height": 480,
    "width": 832,
}

PRESETS: dict[Name, dict[str, Any]] = {
    "self-forcing-480p": _SAMPLER
    | {
        "local_attn_size": -1,
        "sink_size": 0,
        "latent_frames": 21,
        "task_batch": 1,
        "prompts_per_step": 2,
        "group_size": 12,
        "mini_batches": 2,
        "lora_targets": ("to_q", "to_k", "to_v", "to_out.0"),
        "lora_rank": 128,
        "lora_alpha": 256.0,
        "lr": 3e-4,
        "weight_decay": 1e-4,
    },
    "longlive-480p": _SAMPLER
    | {
        "local_attn_size": 12,
        "sink_size": 3,
        "latent_frames": 33,
        "task_batch": 1,
        "prompts_per_step": 2,
        "group_size": 8,
        "mini_batches": 2,
        "lora_targets": ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"),
        "lora_rank": 256,
        "lora_alpha": 256.0,
        "lr": 1e-5,
        "warm_up": 5,
        "weight_decay": 0.01,
    },
}
