"""The `asyncflow` entry point: one command for each algorithm, and the tools around them."""

import os
import sys

import click

from algorithms.dancegrpo import main as dancegrpo
from algorithms.generate import main as generate
from algorithms.plan import main as plan
from asyncflow import __version__
from asyncflow.options import run


@click.group(context_settings={"max_content_width": 120})
@click.version_option(__version__)
def asyncflow() -> None:
    """Post-train video diffusion models with reinforcement learning."""


asyncflow.add_command(dancegrpo)
asyncflow.add_command(generate)
asyncflow.add_command(plan)


def main() -> None:
    """Run the command line and exit: 0 done, 2 wrong use, 1 failed, 130 interrupted."""
    sys.path.insert(0, os.getcwd())  # where --reward module:Class may lie, as for python -m
    sys.exit(run(asyncflow))


if __name__ == "__main__":
    main()
