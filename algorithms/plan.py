"""`asyncflow plan`: what a step would take under each schedule, by the simulator alone, and what no plan can beat.

Costs are measured in a few steps, or those of a run, or stated; with the latter two no rank starts and no model loads,
so it tells of machines that are not there. Not modelled: what colocated ranks pay to swap judges and policy in and out
of memory, and replays that best-of-n skips.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from algorithms.command import DEFAULT_RANKS
from algorithms.config import RunConfig
from algorithms.dancegrpo import DanceGRPO, DanceGRPOConfig
from algorithms.profiling import costs_of, profile
from algorithms.train import dataflow
from asyncflow import gantt
from asyncflow.config import suggestion
from asyncflow.core import schedules
from asyncflow.core.bounds import Bound, best_bound
from asyncflow.core.cost import BatchSeconds, CostTable, Durations, Seconds, StatedCosts
from asyncflow.core.graph import DEVICE, JUDGE_KINDS, LOCAL_KINDS, Graph, Kind
from asyncflow.core.plan import Cluster, Plan
from asyncflow.core.search import search
from asyncflow.core.simulate import simulate
from asyncflow.core.trace import Trace, busy_share
from asyncflow.errors import ConfigError
from asyncflow.options import options
from engines.rewards.registry import parse_rewards

TRANSFER = "transfer"


@dataclass(frozen=True)
class Prediction:
    """A step under a schedule: its plan, the trace it would leave, and the least that any plan under it takes."""

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
    '{"rollout": 29, "decode": 12.5, "forward": 15, "replay": 73.3, "score": {"batch": 100, "each": 9}, "update": 0}. '
    "Without, a few steps are run to measure them."
))  # fmt: skip
@click.option("--profile-steps", type=click.IntRange(min=1), default=3, show_default=True, help=(
    "Steps to run without --costs; medians of three leave the first, which is slower, out."
))  # fmt: skip
@click.option("--ranks", type=int, default=DEFAULT_RANKS, show_default=True, help="Ranks to plan for.")
@click.option("--picture", type=click.Path(path_type=Path), help="PNG file to draw the best schedule's step to.")
def main(config: DanceGRPOConfig, costs: Path | None, profile_steps: int, ranks: int, picture: Path | None) -> None:
    """Predict a step of `asyncflow dancegrpo` with these options under each schedule, whatever --schedule says."""
    if ranks < 2:
        raise ConfigError(f"--ranks: expected at least 2, one to act and one to judge, got {ranks}")
    known = read_costs(costs) if costs else profile(config, ranks, profile_steps)
    if isinstance(known, CostTable):
        click.echo(_measured(known))
    durations = known.estimates() if isinstance(known, CostTable) else known
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
    click.echo(f"\nfastest: {best.name}{_moved(best)}")
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
    bound = best_bound(graph, cluster, durations, judge_batch=config.judge_batch)
    if name == "stagebreaker":
        graph, plan, _ = search(graph, plan, cluster, durations)
    return Prediction(name, graph, cluster, plan, simulate(graph, plan, durations), bound)


def read_costs(path: Path) -> CostTable | StatedCosts:
    """The costs that `--costs` names. Raises ConfigError if there are none, or if they cannot be read."""
    if path.is_dir():
        return costs_of(path)
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


def _measured(costs: CostTable) -> str:
    """The table of costs, and the lines through the judges' batches."""
    lines = [f"{'measured':24}{'shape':8}{'batch':>6}{'median s':>11}{'5th %':>11}{'95th %':>11}{'number':>8}"]
    for what, shape, batch, median, p5, p95, number in sorted(costs.spreads()):
        lines.append(f"{what:24}{shape:8}{batch:6}{median:11.4g}{p5:11.4g}{p95:11.4g}{number:8}")
    for judge, line in costs.estimates().judging.items():
        lines.append(f"{judge}: a batch takes {line.batch:.3g} s and {line.each:.3g} s for each video or pair in it")
    return "\n".join([*lines, ""])


def _line(prediction: Prediction) -> str:
    seconds, bound = prediction.trace.seconds, prediction.bound
    ratio = seconds / bound.seconds if bound.seconds else 1.0
    busy = " ".join(_busy(prediction.trace, rank) for rank in prediction.cluster.ranks)
    return f"{prediction.name:14}{seconds:10.2f}{bound.seconds:10.2f}{ratio:12.2f}  {busy}; {bound.by}"


def _busy(trace: Trace, rank: int) -> str:
    """The share of a rank's device, and of each judge that is apart there."""
    judges = [lane for on, lane in trace.lanes() if on == rank and lane != DEVICE]
    return "+".join(f"{busy_share(trace, rank, lane):.0%}" for lane in (DEVICE, *judges))


def _moved(prediction: Prediction) -> str:
    """What the search found: how much of the policy's work lies on ranks that do not act, and how these judge."""
    if prediction.name != "stagebreaker":
        return ""
    graph, plan, actors = prediction.graph, prediction.plan, set(prediction.cluster.actors)
    parts = []
    for kind in (Kind.DECODE, Kind.REPLAY, Kind.REFERENCE, Kind.OLD_LOG_PROB):
        if tasks := graph.of(kind):
            moved = sum(not set(plan.ranks[task.id]) & actors for task in tasks)
            parts.append(f"{moved} of {len(tasks)} {kind}s")
    batches = f"{'full batches of' if plan.judge_wait > 1 else 'batches of up to'} {plan.judge_batch}"
    later = ", catch up with updates" if graph.catches_up else ""
    return f": reward ranks take {', '.join(parts)}{later}, and judge {batches}"
