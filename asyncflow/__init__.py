"""asyncflow post-trains video diffusion models with reinforcement learning on a small, fixed number of GPUs.

Layers, each importing only those before it:

    asyncflow.core   what an RL step is and when each part of it runs: pure, no torch, no asyncio, no clock, no I/O
    asyncflow        the runtime around it: controller, workers, channels, object store, traces, checkpoints, launch
    engines          what a task computes: policy, rollout, decode, judges, replay, LoRA, optimizer
    algorithms       the reinforcement learning, and the commands
    bench            the comparisons
"""

__version__ = "0.1.0"
