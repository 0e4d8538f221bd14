"""`python -m bench NAME --json FILE`: run one bench, print its table, write what the table shows."""

import click

from bench.dispatch import dispatch
from bench.emulate import emulate
from bench.fidelity import fidelity
from bench.figures import figures
from bench.judge import judge
from bench.learning import learning
from bench.replay import replay
from bench.rewards import rewards
from bench.samples import samples
from bench.schedules import schedules
from bench.timeline import timeline
from bench.transport import transport


@click.group()
def bench() -> None:
    """Measure asyncflow; every number in its documents is printed by one of these."""


COMMANDS = (
    dispatch, emulate, fidelity, figures, judge, learning, replay, rewards, samples, schedules, timeline, transport,
)  # fmt: skip
for command in COMMANDS:
    bench.add_command(command)

if __name__ == "__main__":
    bench()
