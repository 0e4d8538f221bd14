"""A rank's engine: each kind of task on the tiny model, from orders to results, without a runtime."""

import msgspec
import pytest
import torch

from algorithms.kernels import ConsistencyKernel
from asyncflow import checkpoint
from asyncflow.core.graph import Kind, Task
from asyncflow.engine import Cancelled, Result, Work
from asyncflow.errors import ModelError
from engines.adapter import Adapter, AdapterSettings
from engines.gradients import from_fixed
from engines.kernel import LogProbUnits
from engines.optimizer import OptimizerSettings
from engines.orders import CheckpointOrder, ExportOrder, ForwardOrder, ReplayOrder, RolloutOrder, UpdateOrder
from engines.rank import PolicyEngine, PolicyJob, RankEngine
from engines.testing import tiny_transformer

PROMPTS = ("a red square moving left", "a blue circle moving up")
SEEDS = ((1, 11), (1, 12))


@pytest.fixture
def job(tiny_model) -> PolicyJob:
    kernel = ConsistencyKernel()
    return PolicyJob(
        model=tiny_model,
        device="cpu",
        kernel=kernel,
        units=LogProbUnits(kernel, "mean"),
        weights=every_unit,
        replay_order="by-chunk",
        adapter=AdapterSettings(rank=2, alpha=4.0),
        optimizer=OptimizerSettings(lr=0.05),
        prompts=PROMPTS,
        seed=3,
        exact=False,
    )


def every_unit(units: torch.Tensor, old_units: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
    """Weights that keep every unit's gradient by itself."""
    return torch.eye(units.shape[1], dtype=units.dtype)[:, :, None].expand(len(units), -1, -1, -1)


def changed(job: PolicyJob, **changes: object) -> PolicyEngine:
    fields = {name: getattr(job, name) for name in job.__dataclass_fields__}
    return PolicyEngine(PolicyJob(**(fields | changes)))


def run(engine: PolicyEngine, kind: Kind, order: object = None, tensors=None, gang=None) -> Result:
    """Run one task as a worker does; the order goes through msgpack."""
    payload = msgspec.msgpack.decode(msgspec.msgpack.encode(order))
    inputs = {name: tensor.clone() for name, tensor in (tensors or {}).items()}
    return RankEngine(engine, None).run(Work((Task(f"{kind}/0/0", kind),), inputs, payload, gang))


def sampled(engine: PolicyEngine, prompts=PROMPTS, seeds=SEEDS) -> Result:
    return run(engine, Kind.ROLLOUT, RolloutOrder(prompts, seeds))


def replayed(engine: PolicyEngine, rollout: Result, kind: Kind = Kind.REPLAY, steps=(0, 1)) -> Result:
    """What was replayed, with the algorithm's weights for units that are all trained."""
    old = [[row[step] for step in steps] for row in rollout.values["rollout/0/0"]]
    order = ReplayOrder(PROMPTS, steps, old, [[True] * len(steps)] * len(old))
    return run(engine, kind, order if kind is Kind.REPLAY else ForwardOrder(PROMPTS, steps), rollout.tensors)


def units_of(replay: Result) -> list[list[float]]:
    """The first unit of each candidate and step that a replay found."""
    return [[step[0] for step in row] for row in replay.values["replay/0/0"].units]


def updated(engine: PolicyEngine, gradients: torch.Tensor, coefficients: list[list[float]]) -> dict[str, object]:
    """The value of an update of one rank."""
    order = UpdateOrder({"replay/0/0": coefficients} if coefficients else {})
    tensors = {"replay/0/0.gradients": gradients} if coefficients else {}
    return run(engine, Kind.UPDATE, order, tensors, gang=lambda tensor: tensor).values["update/0/0"]


def test_a_replay_reproduces_the_rollout(job):
    """Under the same weights forward-only and training replay give the recorded units to the bit."""
    engine = PolicyEngine(job)
    rollout = sampled(engine)
    units = rollout.values["rollout/0/0"]
    assert units_of(replayed(engine, rollout)) == units
    for kind in (Kind.FORWARD, Kind.OLD_LOG_PROB):
        assert replayed(engine, rollout, kind).values[f"{kind}/0/0"] == [[[unit] for unit in row] for row in units]
    second = replayed(engine, rollout, steps=(1,))
    assert units_of(second) == [[row[1]] for row in units]
    assert second.tensors["replay/0/0.gradients"].shape[:2] == (2, 1)


@pytest.mark.parametrize("kind", [Kind.ROLLOUT, Kind.DECODE, Kind.REPLAY])
def test_what_goes_chunk_by_chunk_stops_between_two_chunks(job, kind: Kind):
    """It asks before each, which are signs of progress, and what comes after is as if it had never begun."""
    engine, asked = PolicyEngine(job), []
    made = sampled(engine)
    orders = {
        Kind.ROLLOUT: (RolloutOrder(PROMPTS, SEEDS), {}),
        Kind.DECODE: (None, {"rollout/0/0.clean": made.tensors["rollout/0/0.clean"]}),
        Kind.REPLAY: (ReplayOrder(PROMPTS, (0, 1), None, [[True] * 2] * 2), made.tensors),
    }
    order, tensors = orders[kind]
    payload = msgspec.msgpack.decode(msgspec.msgpack.encode(order))

    def is_unneeded() -> bool:
        asked.append(kind)
        return len(asked) == 2

    def work(is_unneeded) -> Work:
        return Work((Task(f"{kind}/0/0", kind),), tensors, payload, is_unneeded=is_unneeded)

    whole = RankEngine(engine, None).run(work(lambda: False))
    with pytest.raises(Cancelled):
        RankEngine(engine, None).run(work(is_unneeded))
    assert len(asked) == 2
    again = RankEngine(engine, None).run(work(lambda: False))
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in whole.tensors.items())


def test_a_replay_says_whose_gradients_are_finite(job):
    """One candidate's trajectory is broken: the other one's gradient is what it is alone."""
    engine = PolicyEngine(job)
    made = sampled(engine)
    whole = replayed(engine, made)
    made.tensors["rollout/0/0.noisy"][1, 0] = torch.nan
    broken = replayed(engine, made)
    assert whole.values["replay/0/0"].finite == [True, True]
    assert broken.values["replay/0/0"].finite == [False, True]
    name = "replay/0/0.gradients"
    assert torch.equal(broken.tensors[name][1], whole.tensors[name][1])


def test_a_rollout_depends_on_prompt_and_seeds_alone(job):
    """Another engine gives the same bits; another seed or prompt gives others."""
    clean = sampled(PolicyEngine(job)).tensors["rollout/0/0.clean"]
    engine = PolicyEngine(job)
    replayed(engine, sampled(engine))
    assert torch.equal(sampled(engine).tensors["rollout/0/0.clean"], clean)
    other_seed = sampled(engine, seeds=((1, 11), (1, 13))).tensors["rollout/0/0.clean"]
    assert torch.equal(other_seed[0], clean[0])
    assert not torch.equal(other_seed[1], clean[1])
    other_prompt = sampled(engine, prompts=PROMPTS[::-1]).tensors["rollout/0/0.clean"]
    assert not torch.equal(other_prompt[0], clean[0])


def test_frames_come_from_the_clean_latents(job, tmp_path):
    """Decoded chunk by chunk to uint8 video, which export writes where it is told to."""
    engine = PolicyEngine(job)
    clean = {"rollout/0/0.clean": sampled(engine).tensors["rollout/0/0.clean"]}
    frames = run(engine, Kind.DECODE, None, clean).tensors["decode/0/0.frames"]
    assert (frames.shape, frames.dtype) == ((2, 21, 32, 32, 3), torch.uint8)
    assert frames.float().std() > 1
    run(engine, Kind.EXPORT, ExportOrder(("", str(tmp_path / "new" / "b.mp4"))), {"decode/0/0.frames": frames})
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["b.mp4"]


def test_an_update_descends_and_a_later_rollout_differs(job):
    """A coefficient below 0 raises a candidate's probability; the value carries the weights' new hash."""
    engine = PolicyEngine(job)
    rollout = sampled(engine)
    replay = replayed(engine, rollout)
    before = updated(engine, replay.tensors["replay/0/0.gradients"], [])["sha256"]
    value = updated(engine, replay.tensors["replay/0/0.gradients"], [[-1e-3, -1e-3], [0.0, 0.0]])
    assert value["grad_norm"] > 0
    assert value["sha256"] != before
    assert sum(units_of(replayed(engine, rollout))[0]) > sum(units_of(replay)[0])
    assert not torch.equal(sampled(engine).tensors["rollout/0/0.clean"], rollout.tensors["rollout/0/0.clean"])


def test_an_update_without_coefficients_takes_no_step(job):
    """No collective, no weight decay, no step counted: the same hash and the same learning rate."""
    engine = changed(job, optimizer=OptimizerSettings(lr=0.05, warmup=4))
    first = updated(engine, torch.empty(0), [])
    assert (first["grad_norm"], first["skipped"], first["lr"]) == (0.0, 0, 0.05 / 4)
    assert updated(engine, torch.empty(0), []) == first


@pytest.mark.parametrize("exact", [False, True])
def test_a_rank_that_catches_up_has_the_bits_of_the_gang(job, exact):
    """From the total alone, which travels as it is: the same value, also where there is no step to take."""
    engine, late = changed(job, exact=exact), changed(job, exact=exact)
    gradients = replayed(engine, sampled(engine)).tensors["replay/0/0.gradients"]
    hashes = []
    for rows in ([[-1.0, 0.5], [0.2, 0.1]], [], [[0.3, 0.1], [0.2, -0.4]]):
        order = UpdateOrder({"replay/0/0": rows} if rows else {})
        tensors = {"replay/0/0.gradients": gradients} if rows else {}
        made = run(engine, Kind.UPDATE, order, tensors, gang=lambda tensor: tensor)
        total = made.tensors["update/0/0.total"]
        assert (total.dtype, total.numel() > 0) == (torch.int64 if exact else torch.float32, bool(rows))
        caught_up = run(late, Kind.CATCH_UP, None, made.tensors)
        assert caught_up.values["catch-up/0/0"] == made.values["update/0/0"]
        hashes.append(made.values["update/0/0"]["sha256"])
    assert hashes[0] == hashes[1] != hashes[2]


def test_exact_sums_do_not_depend_on_the_order(job):
    """With `exact` a gang sends int64: two ranks' shares add up to the bits of one rank's sum."""
    sent: list[torch.Tensor] = []

    def gang(tensor: torch.Tensor) -> torch.Tensor:
        sent.append(tensor.clone())
        return tensor

    engine = changed(job, exact=True)
    gradients = replayed(engine, sampled(engine)).tensors["replay/0/0.gradients"]
    names = ("replay/0/0", "replay/0/1")
    order = UpdateOrder({name: [[0.3, -0.7]] for name in names})
    parts = {f"{name}.gradients": gradients[place : place + 1] for place, name in enumerate(names)}
    for held in (parts, *({name: part} for name, part in parts.items())):
        run(engine, Kind.UPDATE, order, held, gang)
    whole, first, second = sent
    assert whole.dtype == torch.int64
    assert torch.equal(whole, first + second)
    expected = (0.3 * gradients[:, 0] - 0.7 * gradients[:, 1]).sum(dim=0)
    torch.testing.assert_close(from_fixed(whole), expected, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_resumes_to_the_same_bits(job, tmp_path):
    """Weights, moments and the warm-up go on: the next update of a resumed engine is the next of the first."""
    engine = PolicyEngine(job)
    gradients = replayed(engine, sampled(engine)).tensors["replay/0/0.gradients"]
    rows = [[-1.0, 0.5], [0.2, 0.1]]
    updated(engine, gradients, rows)
    order = CheckpointOrder(str(tmp_path / "checkpoints"), 7, {"progress": {}}, str(tmp_path / "adapter"))
    path = run(engine, Kind.CHECKPOINT, order).values["checkpoint/0/0"]
    saved = checkpoint.load(tmp_path / "checkpoints" / "step-000007")
    assert str(saved.path) == path
    expected = updated(engine, gradients, rows)
    resumed = changed(job, resume=saved.files, init_adapter=tmp_path / "gone since")
    assert updated(resumed, gradients, rows) == expected
    started = changed(job, init_adapter=tmp_path / "adapter")
    assert updated(started, gradients, rows)["sha256"] != expected["sha256"]  # the weights, but not the moments


def test_an_initial_adapter_changes_the_rollout(job, tmp_path):
    adapter = Adapter(tiny_transformer(), job.adapter, seed=3)
    adapter.assign(0.1 * torch.randn(adapter.size, generator=torch.Generator().manual_seed(0)))
    adapter.save(tmp_path)
    started = sampled(changed(job, init_adapter=tmp_path)).tensors["rollout/0/0.clean"]
    assert not torch.equal(started, sampled(PolicyEngine(job)).tensors["rollout/0/0.clean"])


def test_the_base_model_samples_without_any_adapter(job, tmp_path):
    """Not even the one that a run started from, which is back in place afterwards."""
    adapter = Adapter(tiny_transformer(), job.adapter, seed=3)
    adapter.assign(0.1 * torch.randn(adapter.size, generator=torch.Generator().manual_seed(0)))
    adapter.save(tmp_path)
    engine, untouched = changed(job, init_adapter=tmp_path), sampled(PolicyEngine(job))
    trained = sampled(engine)
    base = run(engine, Kind.ROLLOUT, RolloutOrder(PROMPTS, SEEDS, base=True))
    name = "rollout/0/0.clean"
    assert torch.equal(base.tensors[name], untouched.tensors[name])
    assert torch.equal(sampled(engine).tensors[name], trained.tensors[name])
    assert units_of(replayed(engine, trained)) == trained.values["rollout/0/0"]


def test_an_adapter_of_another_shape_is_refused(job, tmp_path):
    """What only the loaded model can tell: the same rank and alpha, on other linears."""
    Adapter(tiny_transformer(), AdapterSettings(rank=2, alpha=4.0, targets=("to_q",)), seed=0).save(tmp_path)
    with pytest.raises(ModelError, match="has \\(rank, alpha, targets\\)"):
        changed(job, init_adapter=tmp_path)


class Parts:
    """A policy and judges that only write down what they are asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name):
        return lambda *_: self.asked.append(name)


def test_judges_rest_where_training_begins():
    """Before every replay, where they rest at all; they know whether they do so already."""
    kinds = [Kind.DECODE, Kind.SCORE, Kind.DECODE, Kind.COMPARE, Kind.REPLAY, Kind.REPLAY, Kind.UPDATE, Kind.SCORE]
    asked = []
    for rests in (True, False):
        parts = Parts()
        engine = RankEngine(parts, parts, judges_rest=rests)
        for kind in kinds:
            engine.run(Work((Task(f"{kind}/0/0", kind),), {}, None, None))
        asked.append(parts.asked)
    judged = ["decode", "judge", "decode", "judge"]
    assert asked[0] == [*judged, "rest", "replay", "rest", "replay", "update", "judge"]
    assert asked[1] == [*judged, "replay", "replay", "update", "judge"]
