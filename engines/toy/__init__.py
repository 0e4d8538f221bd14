"""The built-in toy: a small model that we pretrained on procedural videos, in the form of a real diffusers folder."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
PROMPTS = Path(__file__).parent / "prompts.txt"
EVAL_PROMPTS = Path(__file__).parent / "eval_prompts.txt"
JUDGE = Path(__file__).parent / "judge.toml"
