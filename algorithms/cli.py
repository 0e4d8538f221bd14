"""The `asyncflow` entry point: one command for each algorithm, and the tools around them."""

import os
import sys
from importlib import import_module

import click

from asyncflow import __version__
from asyncflow.options import run

COMMANDS = ("convert", "dancegrpo", "doctor", "generate", "plan")


class Commands(click.Group):
    """Imports a command's module, `algorithms.NAME`, when it is needed: the doctor runs where the others cannot."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """See `click.Group`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """See `click.Group`."""
        return import_module(f"algorithms.{cmd_name}").main if cmd_name in COMMANDS else None


@click.group(cls=Commands, context_settings={"max_content_width": 120})
@click.version_option(__version__)
def asyncflow() -> None:
    """Post-train video diffusion models with reinforcement learning."""


def main() -> None:
    """Run the command line and exit: 0 done, 2 wrong use, 1 failed, 130 interrupted."""
    sys.path.insert(0, os.getcwd())  # where --reward module:Class may lie, as for python -m
    sys.exit(run(asyncflow))


if __name__ == "__main__":
    main()
