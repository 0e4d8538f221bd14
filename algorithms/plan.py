"""`asyncflow plan`: what a step would take under each schedule, by the simulator alone, and what no plan can beat.

No rank starts and no model loads, so it tells of machines that are not there. Costs are those of a run, or stated.
Not modelled: what colocated ranks pay to swap judges and policy in and out of memory, and replays that best-of-n skips.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from algorithms.command import DEFAULT_RANKS
from algorithms.config import RunConfig
from algorithms.dancegrpo import DanceGRPO, DanceGRPOConfig
from algorithms.train import Progress, dataflow
from asyncflow import checkpoint, gantt
from asyncflow.config import suggestion
from asyncflow.core import schedules
from asyncflow.core.bounds import Bound, best_bound
from asyncflow.core.cost import BatchSeconds, Durations, Seconds, StatedCosts
from asyncflow.core.graph import JUDGE_KINDS, LOCAL_KINDS, Graph, Kind
from asyncflow.core.plan import Cluster, Plan
from asyncflow.core.search import search
from asyncflow.core.simulate import simulate
from asyncflow.core.trace import Trace, busy_share
from asyncflow.errors import CheckpointError, ConfigError
from asyncflow.options import options
from engines.rewards.registry import parse_rewards

TRANSFER = "transfer"


@dataclass(frozen=True)
class Prediction:
    """A step under a schedule: its plan, the trace it would leave, and the least that any plan of its graph takes."""

    name: schedules.Name
    graph: Graph
    cluster: Cluster
    plan: Plan
    trace: Trace
    bound: Bound


@click.command("plan")
@options(DanceGRPOConfig)
@click.option("--costs", metavar="PATH", type=click.Path(path_type=Path), help=(
    "A run directory, whose newest checkpoint has the measured costs, or a JSON file of seconds by kind of task: "
    '{"rollout": 29, "decode": 12.5, "forward": 15, "replay": 73.3, "score": {"batch": 100, "each": 9}, "update": 0}.'
))  # fmt: skip
@click.option("--ranks", type=int, default=DEFAULT_RANKS, show_default=True, help="Ranks to plan for.")
@click.option("--picture", type=click.Path(path_type=Path), help="PNG file to draw the best schedule's step to.")
def main(config: DanceGRPOConfig, costs: Path | None, ranks: int, picture: Path | None) -> None:
    """Predict a step of `asyncflow dancegrpo` with these options under each schedule, whatever --schedule says."""
    if costs is None:
        raise ConfigError(
            "--costs: give a run directory or a JSON file of seconds by kind; a few steps measure them: "
            "asyncflow dancegrpo --steps 3 --eval-every 0 --forward-replays --out runs/costs"
        )
    if ranks < 2:
        raise ConfigError(f"--ranks: expected at least 2, one to act and one to judge, got {ranks}")
    durations = read_costs(costs)
    rewards = parse_rewards(config.reward)
    algorithm = DanceGRPO(config, tuple(reward.weight for reward in rewards))
    graph = dataflow(config, algorithm, rewards)
    reward_ranks = 1 if config.reward_ranks is None else config.reward_ranks
    click.echo(f"{ranks} ranks, of which {reward_ranks} judge, or all under colocated; a step is {len(graph)} tasks\n")
    click.echo(f"{'schedule':14}{'seconds':>10}{'bound':>10}{'step/bound':>12}  busy share of each rank; bound by")
    predictions: list[Prediction] = []
    unknown = ""
    for name in schedules.NAMES:
        try:
            cluster = schedules.cluster(name, ranks, 0 if name == "colocated" else reward_ranks)
            predictions.append(predict(name, graph, cluster, durations, config))
        except ValueError as error:
            raise ConfigError(f"--reward-ranks: {error}") from None
        except KeyError as error:
            unknown = str(error.args[0])
            click.echo(f"{name:14}{unknown}")
        else:
            click.echo(_line(predictions[-1]))
    if not predictions:
        raise ConfigError(f"--costs: {costs}: {unknown}, which every schedule needs; measure or state it")
    best = min(predictions, key=lambda prediction: prediction.trace.seconds)
    click.echo(f"\n{best.name}{_moved(best)}")
    click.echo(gantt.chart(best.trace, shutil.get_terminal_size().columns))
    if picture:
        gantt.draw(best.trace, picture)
        click.echo(f"wrote {picture}")


def predict(
    name: schedules.Name, graph: Graph, cluster: Cluster, durations: Durations, config: RunConfig
) -> Prediction:
    """The step `graph` under schedule `name`, with the plan that training would find. Raises what `durations` does."""
    graph, plan = schedules.schedule(
        name, graph, cluster, forward_replays=config.forward_replays, judge_batch=config.judge_batch
    )
    if name == "stagebreaker":
        plan, _ = search(graph, plan, cluster, durations)
    bound = best_bound(graph, cluster, durations, judge_batch=config.judge_batch)
    return Prediction(name, graph, cluster, plan, simulate(graph, plan, durations), bound)


def read_costs(path: Path) -> Durations:
    """The costs that `--costs` names. Raises ConfigError if there are none, or if they cannot be read."""
    if path.is_dir():
        try:
            found, _ = checkpoint.latest(path / "checkpoints")
        except CheckpointError as error:
            raise ConfigError(f"--costs: {error}") from None
        return msgspec.convert(found.meta["progress"], Progress).costs.estimates()
    try:
        stated = msgspec.json.decode(path.read_bytes(), type=dict[str, Seconds | BatchSeconds])
    except OSError as error:
        raise ConfigError(f"--costs: cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--costs: {path} is no JSON object of seconds by kind, as --help shows: {error}") from None
    known = {*(kind for kind in Kind if kind not in LOCAL_KINDS), TRANSFER}
    for key in stated:
        kind, slash, _ = key.partition("/")
        if kind not in known or (slash and kind not in JUDGE_KINDS):
            raise ConfigError(f'--costs: {path}: unknown kind "{key}"{suggestion(key, known)}')
    transfer = stated.pop(TRANSFER, 0.0)
    if isinstance(transfer, BatchSeconds):
        raise ConfigError(f"--costs: {path}: {TRANSFER} is one number of seconds; only judges take batches")
    return StatedCosts(stated, transfer)


def _line(prediction: Prediction) -> str:
    seconds, bound = prediction.trace.seconds, prediction.bound
    ratio = seconds / bound.seconds if bound.seconds else 1.0
    busy = " ".join(f"{busy_share(prediction.trace, rank):.0%}" for rank in prediction.cluster.ranks)
    return f"{prediction.name:14}{seconds:10.2f}{bound.seconds:10.2f}{ratio:12.2f}  {busy}; {bound.by}"


def _moved(prediction: Prediction) -> str:
    """How much of the policy's work lies on ranks that do not act."""
    graph, actors = prediction.graph, prediction.cluster.actors
    parts = []
    for kind in (Kind.DECODE, Kind.REPLAY):
        tasks = graph.of(kind)
        moved = sum(not set(prediction.plan.ranks[task.id]) & set(actors) for task in tasks)
        parts.append(f"{moved} of {len(tasks)} {kind}s")
    return f": reward ranks take {' and '.join(parts)}" if prediction.name == "stagebreaker" else ""
