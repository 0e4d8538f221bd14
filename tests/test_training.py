"""Whole runs on the tiny model: what they write, and that ranks and schedules cannot change a bit of the weights."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from operator import itemgetter
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from algorithms.dancegrpo import DanceGRPOConfig
from asyncflow import checkpoint
from asyncflow.config import resolve
from engines.adapter import Adapter, AdapterSettings
from engines.policy import load_policy
from engines.testing import TEXT_DIM, latents

WAYS = ("up", "left")


def metrics(run: Path) -> list[dict[str, object]]:
    """The lines of metrics.jsonl, which are strict JSON."""

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> list[object]:
    """The hash of the weights after each step."""
    return [line["weights/sha256"] for line in metrics(run) if line["step"]]


def test_the_weights_of_torchrun_are_those_of_one_rank(torchrun, uninterrupted):
    """Two colocated ranks through shared memory, exactly as one rank: after every step the same bits."""
    expected = weights(uninterrupted)
    assert len(set(expected)) == 4
    assert weights(torchrun) == expected[:2]


def test_the_command_starts_its_own_ranks(recipe, uninterrupted, tmp_path):
    """`asyncflow dancegrpo --ranks 2`, here an actor and a judge over gloo with forward-only replays: the same bits."""
    options = ["--schedule=async-reward", "--channel=gloo", "--forward-replays", "--steps=2", "--out=run", "--ranks=2"]
    done = subprocess.run(
        [sys.executable, "-m", "algorithms.cli", "dancegrpo", *recipe, *options],
        cwd=tmp_path, timeout=90, check=False, capture_output=True, text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("dancegrpo: 2 ranks, run directory run\n")
    assert weights(tmp_path / "run") == weights(uninterrupted)[:2]
    ranks = {name for line in metrics(tmp_path / "run") for name in line if name.endswith("/busy")}
    assert ranks == {"rank/0/busy", "rank/1/busy"}


@pytest.mark.parametrize(
    ("ranks", "options"), [(1, []), (2, ["--schedule=stagebreaker"]), (2, ["--schedule=merged-replay"])]
)
def test_rewards_that_are_apart_judge_at_once_and_change_no_bit(
    ranks, options, recipe, uninterrupted, run_ranks, tmp_path
):
    """Each waits until the other one is judging on its rank, too; both are in the trace, beside the device's work."""
    apart = [option.replace(":Brightness", ":ApartBrightness") for option in recipe]
    options = [*apart, "--steps=3", f"--out={tmp_path / 'run'}", *options]
    codes, output = run_ranks(ranks, options, tmp_path / "output")
    assert codes == [0] * ranks, output
    assert weights(tmp_path / "run") == weights(uninterrupted)[:3]
    events = json.loads((tmp_path / "run/trace/step-000001.json").read_text())["traceEvents"]
    kinds = {(event["cat"], event["name"]) for event in events if event["ph"] == "X"}
    assert {("judge brightness", "score"), ("judge brightness-duel", "compare"), ("device", "decode")} <= kinds
    judge = {f"rank/{ranks - 1}/busy/judge_{name}" for name in ("brightness", "brightness-duel")}
    assert judge <= set(metrics(tmp_path / "run")[-1])


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (3, ["--schedule=async-reward", "--channel=gloo"]),
        (3, ["--schedule=async-reward", "--reward-ranks=2", "--forward-replays", "--judge-batch=8"]),
        (2, ["--forward-replays", "--channel=gloo"]),
        (3, ["--channel=gloo"]),
        (2, ["--schedule=async-train"]),
        (3, ["--schedule=async-train", "--channel=gloo"]),
        (2, ["--schedule=merged-replay"]),
        (3, ["--schedule=merged-replay", "--reward-ranks=2"]),
        (2, ["--schedule=stagebreaker", "--channel=gloo"]),
        (3, ["--schedule=stagebreaker", "--reward-ranks=2"]),
    ],
)
def test_ranks_schedule_and_channel_cannot_change_a_bit(ranks, options, recipe, uninterrupted, run_ranks, tmp_path):
    """Three steps of two mini-batches, with what the search of the second step finds in the third."""
    codes, output = run_ranks(ranks, [*recipe, "--steps=3", f"--out={tmp_path / 'run'}", *options], tmp_path / "output")
    assert codes == [0] * ranks, output
    assert weights(tmp_path / "run") == weights(uninterrupted)[:3]


def test_what_departs_from_the_defaults_is_as_exact(recipe, run_ranks, tmp_path):
    """Best-of-n skips half of the replays, statistics are global, half of the steps are trained, the kernel is SDE."""
    options = [
        *recipe, "--steps=2", "--task-batch=1", "--best-of-n=2", "--statistics=global", "--step-fraction=0.5",
        "--kernel=dance-sde", "--chunk-reduce=sum", "--no-share-noise",
    ]  # fmt: skip
    one, three = tmp_path / "one", tmp_path / "three"
    codes, output = run_ranks(1, [*options, f"--out={one}"], tmp_path / "output")
    assert codes == [0], output
    codes, output = run_ranks(3, [*options, f"--out={three}", "--schedule=async-reward"], tmp_path / "output")
    assert codes == [0, 0, 0], output
    assert weights(three) == weights(one)
    for line in (*metrics(one), *metrics(three)):
        assert line["critic/kept"] == 8
        assert line["actor/ratio_start_deviation"] == 0
    for run in (one, three):
        trace = (run / "trace" / "step-000002.json").read_text()
        assert len(set(re.findall(r"rollout/\d/\d", trace))) == 16
        assert len(set(re.findall(r"replay/\d/\d", trace))) == 8


def test_rewards_that_only_compare_with_the_base_model(recipe, run_ranks, tmp_path):
    """In a group and in an evaluation: the same bits in every schedule, and a rate that shows what was learnt.

    With a fresh adapter each video meets its own copy, and wins once for each time that it loses.
    """
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("a red circle moving left\na blue square moving down\n")
    options = [
        *(option for option in recipe if not option.startswith("--reward=")), "--steps=2",
        "--reward=engines.rewards.testing:BaseDuel", "--reward=colour-duel=0.5", f"--eval-prompts={held_out}",
    ]  # fmt: skip
    two, three = tmp_path / "two", tmp_path / "three"
    codes, output = run_ranks(2, [*options, f"--out={two}"], tmp_path / "output")
    assert codes == [0, 0], output
    assert "step 0/2  win rate 0.500\n" in output
    schedule = ["--schedule=stagebreaker", "--reward-ranks=2"]
    codes, output = run_ranks(3, [*options, f"--out={three}", *schedule], tmp_path / "output")
    assert codes == [0, 0, 0], output
    assert weights(three) == weights(two)
    start, _, last = metrics(two)
    for name in ("base-duel", "colour-duel"):
        assert (start[f"val/win_rate/{name}"], start[f"val/judge/{name}/valid"]) == (0.5, 8)
    assert last["val/win_rate/base-duel"] > 0.5
    assert checkpoint.load(two / "checkpoints/step-000002").meta["progress"]["best"] == last["val/win_rates/mean"]
    for mine, other in zip(metrics(two), metrics(three), strict=True):
        compared = {name for name in mine if name.startswith(("val/win_rate", "critic/reward"))}
        assert {name: mine[name] for name in compared} == {name: other[name] for name in compared}


@pytest.mark.parametrize("order", ["by-chunk", "batched", "packed"])
def test_a_kl_and_recomputed_ratios_are_as_exact(order, recipe, run_ranks, tmp_path):
    """In every order of replay: a reference on any rank, old units of the second mini-batch before the first update."""
    options = [*recipe, "--steps=2", "--kl=0.1", "--old-log-probs=recomputed", f"--replay-order={order}"]
    one, three = tmp_path / "one", tmp_path / "three"
    codes, output = run_ranks(1, [*options, f"--out={one}"], tmp_path / "output")
    assert codes == [0], output
    schedule = ["--schedule=stagebreaker", "--reward-ranks=2"]
    codes, output = run_ranks(3, [*options, f"--out={three}", *schedule], tmp_path / "output")
    assert codes == [0, 0, 0], output
    assert weights(three) == weights(one)
    first, second = metrics(one)
    assert 0 < second["actor/kl_loss"] > first["actor/kl_loss"]
    assert second["actor/ratio_start_deviation"] == 0
    assert second["actor/ratio_std"] > 0


def test_recomputed_is_recorded_where_the_shape_is_the_same(recipe, uninterrupted, run_ranks, tmp_path):
    """Chunk by chunk the recomputed old units are the recorded bits, and so are the weights."""
    options = [*recipe, "--steps=2", "--old-log-probs=recomputed", f"--out={tmp_path / 'run'}"]
    codes, output = run_ranks(1, options, tmp_path / "output")
    assert codes == [0], output
    assert weights(tmp_path / "run") == weights(uninterrupted)[:2]


def test_fixed_point_is_the_sum_of_floats(recipe, uninterrupted, run_ranks, tmp_path):
    """Without --exact gradients are summed in float32: nearly the same update, with the same first rollouts."""
    options = [*recipe, "--no-exact", "--steps=1", f"--out={tmp_path / 'run'}"]
    codes, output = run_ranks(1, options, tmp_path / "output")
    assert codes == [0], output
    (made,), (exact, *_) = metrics(tmp_path / "run"), metrics(uninterrupted)
    assert made["critic/rewards/mean"] == exact["critic/rewards/mean"]
    assert made["actor/grad_norm"] == pytest.approx(exact["actor/grad_norm"], rel=1e-4)


def test_every_step_writes_its_metrics(torchrun, uninterrupted):
    """An object a step, under names that stay; an evaluation at step 0 and the end."""
    start, first, last = metrics(torchrun)
    assert (start["step"], first["step"], last["step"]) == (0, 1, 2)
    for line in (first, last):
        assert {
            "critic/rewards/mean", "critic/reward/brightness/mean", "critic/invalid", "critic/advantages/abs_mean",
            "actor/ratio_mean", "actor/pg_clipfrac", "actor/ppo_kl", "actor/grad_norm", "actor/lr", "training/epoch",
            "timing_s/step", "timing_s/rollout", "timing_s/replay", "rank/0/busy", "rank/1/busy", "weights/sha256",
        } <= set(line)  # fmt: skip
        assert line["critic/reward/brightness-duel/mean"] == pytest.approx(0.5)
    assert 0 < last["timing_s/bound"] <= last["timing_s/simulated"] * (1 + 1e-9)
    assert last["perf/bound_by"]
    assert start["val/judged"] == last["val/judged"] == 4
    assert start["val/rewards/mean"] != last["val/rewards/mean"]  # the same noise under other weights
    assert "val/rewards/mean" not in first
    assert [line["step"] for line in metrics(uninterrupted)] == [1, 2, 3, 4]


def test_the_ratio_starts_at_exactly_one(torchrun, uninterrupted):
    """Before a step's first update replay reproduces the rollout's bits; the second mini-batch has moved on."""
    for line in (*metrics(torchrun)[1:], *metrics(uninterrupted)):
        assert line["actor/ratio_start_deviation"] == 0
        assert line["actor/ratio_std"] > 0


def test_a_run_directory_is_complete(torchrun):
    """Configuration, metrics, traces, checkpoints, the adapter and the videos of the evaluations."""
    files = {str(path.relative_to(torchrun)) for path in torchrun.rglob("*") if path.is_file()}
    slugs = ("00-a-red-circle-moving-left.mp4", "01-a-blue-square-moving-down.mp4")
    assert files >= {
        "config.toml", "environment.json", "metrics.jsonl", "trace/step-000001.json", "trace/step-000002.json",
        "checkpoints/step-000002/manifest.json", "adapter/adapter_model.safetensors", "adapter/adapter_config.json",
        *(f"samples/step-{step:06d}/{slug}" for step in (0, 2) for slug in slugs),
    }  # fmt: skip
    assert not [name for name in files if ".tmp" in name]
    trace = json.loads((torchrun / "trace" / "step-000001.json").read_text())
    assert len(trace["traceEvents"]) > 50


def test_the_written_configuration_is_the_run_s(torchrun, monkeypatch):
    """config.toml resolves to the same configuration, so that a run can be repeated from it."""
    config = resolve(DanceGRPOConfig, {}, str(torchrun / "config.toml"))
    assert (config.exact, config.mini_batches, config.lora_rank, config.lr, config.steps) == (True, 2, 2, 0.02, 2)
    assert config.reward == ("engines.rewards.testing:Brightness", "engines.rewards.testing:BrightnessDuel=0.5")
    assert set(tomllib.loads((torchrun / "config.toml").read_text())) >= {"prompts-per-step", "best-of-n"}


def test_stock_diffusers_loads_the_adapter(torchrun, tiny_model):
    """The trained adapter on an untouched model gives the velocities that asyncflow trained."""
    stock = WanTransformer3DModel.from_pretrained(tiny_model, subfolder="transformer").eval()
    x, text = latents(1, frames=2), torch.randn(1, 8, TEXT_DIM, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        base = stock(x, torch.tensor([700.0]), text).sample
        stock.load_lora_adapter(
            torchrun / "adapter", prefix="base_model.model", weight_name="adapter_model.safetensors"
        )
        made = stock(x, torch.tensor([700.0]), text).sample
    policy = load_policy(tiny_model)
    Adapter(policy.model, AdapterSettings(rank=2, alpha=2.0), seed=1).load(torchrun / "adapter")
    with torch.no_grad():
        expected = policy.velocity(x, 0.7, text, policy.new_cache(4, 4), 0)
    assert (made - expected).abs().max() < 1e-5
    assert (made - base).abs().max() > 1e-3


def test_a_run_starts_from_an_adapter(torchrun, recipe, uninterrupted, run_ranks, tmp_path):
    """Its first step samples from the adapter's policy, not from the base model's."""
    options = [*recipe, "--steps=1", f"--out={tmp_path / 'run'}", f"--init-adapter={torchrun / 'adapter'}"]
    codes, output = run_ranks(1, options, tmp_path / "output")
    assert codes == [0], output
    (made,), (fresh, *_) = metrics(tmp_path / "run"), metrics(uninterrupted)
    assert made["critic/reward/brightness/mean"] != fresh["critic/reward/brightness/mean"]
    assert made["actor/ratio_start_deviation"] == 0


def test_invalid_judgements_are_counted_and_left_out(recipe, run_ranks, tmp_path):
    """Two of four prompts cannot be judged; the run says why, trains on the others and takes no step for these."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"a {colour} square moving {way}\n" for colour in ("red", "cyan") for way in WAYS))
    options = [
        *recipe, "--steps=2", "--reward=engines.rewards.testing:Blind", f"--prompts={prompts}",
        "--mini-batches=4", f"--out={tmp_path / 'run'}", f"--eval-prompts={prompts}",
    ]  # fmt: skip
    codes, output = run_ranks(2, options, tmp_path / "output")
    assert codes == [0, 0], output
    for made in filter(itemgetter("step"), metrics(tmp_path / "run")):
        assert (made["critic/invalid"], made["critic/kept"]) == (8, 8)
    assert torch.load(tmp_path / "run/checkpoints/step-000002/optimizer.pt", weights_only=True)["steps"] == 4
    assert "step 1: invalid: blind of candidate 0 of prompt 'a " in output
    assert "moving left': it moves left" in output
    assert "evaluation after step 0: invalid: blind of 'a red square moving left': it moves left\n" in output


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ("NotANumber", "reward not-a-number gave nan for the prompt 'a red square moving left'; return a finite"),
        ("Blind", "error: step 1: no group has enough candidates with valid rewards; the first: blind of candidate 0"),
    ],
)
def test_a_reward_that_fails_ends_the_run(reward, sentence, recipe, run_ranks, tmp_path):
    """On every rank with exit code 1, and one error."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red square moving left\n")
    options = [
        *recipe, "--schedule=async-reward", f"--reward=engines.rewards.testing:{reward}", f"--prompts={prompts}",
        f"--out={tmp_path / 'run'}",
    ]
    codes, output = run_ranks(2, options, tmp_path / "output")
    assert codes == [1, 1]
    assert output.count("error: ") == 1
    assert sentence in output


def test_a_run_directory_that_cannot_be_written_ends_the_run(recipe, run_ranks, tmp_path):
    """A full or wrong disk is one sentence that says how to go on."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trace").touch()
    codes, output = run_ranks(1, [*recipe, f"--out={tmp_path / 'run'}"], tmp_path / "output")
    assert codes == [1]
    *_, sentence = output.splitlines()
    assert output.count("error: ") == 1
    assert sentence.startswith(f"error: cannot write to the run directory {tmp_path / 'run'}: File exists; make room")


def test_weights_that_cannot_be_loaded_end_the_run(recipe, run_ranks, tmp_path, tiny_model):
    """What only loading finds: one sentence that names the folder."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "transformer" / "diffusion_pytorch_model.safetensors").write_text("damaged")
    codes, output = run_ranks(2, [*recipe, f"--model={model}", f"--out={tmp_path / 'run'}"], tmp_path / "output")
    assert codes == [1, 1]
    assert output.count("error: ") == 1
    assert f"could not start: The weights in {model / 'transformer'} cannot be loaded" in output
