"""Kernels that give the same bits every time; a rank asks for them before any of its work."""

import os

import torch


def use_deterministic_kernels() -> None:
    """From here on torch takes deterministic kernels alone, and raises RuntimeError where it has none.

    If it only warned, attention would go on without: strictly, the flash and the memory-efficient backward become
    deterministic (ATen/native/transformers/cuda/attention_backward.cu), and cuDNN's, which cannot, is not chosen
    (sdp_utils.cpp there). So no backend needs to be turned off.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product on a GPU is made
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
