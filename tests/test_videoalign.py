"""VideoAlign's VideoReward, tiny, in its released layout: its scores are those of its authors' code."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import CLIPConfig

from algorithms.dancegrpo import DanceGRPO, DanceGRPOConfig
from algorithms.prepare import prepare
from asyncflow.engine import Invalid
from asyncflow.errors import ConfigError
from engines.rewards.registry import parse_rewards
from engines.rewards.videoalign import VideoAlign, patches, sampled

CPU = torch.device("cpu")
FOLDER = Path(__file__).parent / "golden" / "videoalign_tiny"
CASES = json.loads((FOLDER / "scores.json").read_text())
WEIGHTS = "checkpoint-7/model.pth"
HEAD = "base_model.model.rm_head.weight"
LORA = "base_model.model.model.layers.1.mlp.up_proj.lora_B.default.weight"


def video(frames: int, height: int, width: int, salt: int = 0) -> torch.Tensor:
    t, y, x, c = (torch.arange(n).view([-1 if i == d else 1 for i in range(4)])
                  for d, n in enumerate((frames, height, width, 3)))  # fmt: skip
    return ((t * 11 + (y * 3 + salt) * (x + t) + 40 * c) % 256).to(torch.uint8)


def loaded(folder: Path, name: str = "videoalign") -> VideoAlign:
    reward = VideoAlign(folder, name)
    reward.load(CPU)
    return reward


@pytest.fixture(scope="module")
def reward() -> VideoAlign:
    return loaded(FOLDER)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(FOLDER, tmp_path / "reward")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['shape']}-{case['fps']}-{case['prompt']}")
def test_it_gives_the_numbers_of_its_authors(reward, case):
    """From frames, frame rate and prompt to the sum of the three; videos are long, short, large, small, odd."""
    reward.fps = case["fps"]
    (score,) = reward.score([video(*case["shape"], case["salt"])], [case["prompt"]])
    assert score == pytest.approx(case["scores"]["Overall"], abs=5e-4)


def test_the_cases_tell_frames_prompts_and_frame_rates_apart():
    """Of the first four, which differ in one thing each, every score is another."""
    assert len({round(case["scores"]["Overall"], 2) for case in CASES[:4]}) == 4


@pytest.mark.parametrize("dimension", ["VQ", "MQ", "TA"])
def test_a_dimension_by_itself(dimension):
    """By its name in the specification, with a weight as any other reward."""
    (made,) = parse_rewards([f"videoalign-{dimension.lower()}@{FOLDER}=0.5"])
    assert (made.name, made.weight) == (f"videoalign-{dimension.lower()}", 0.5)
    made.reward.load(CPU)
    case = CASES[1]
    made.reward.fps = case["fps"]
    assert made.reward.score([video(*case["shape"])], [case["prompt"]]) == [
        pytest.approx(case["scores"][dimension], abs=5e-4)
    ]


def test_a_score_does_not_depend_on_who_is_judged_beside(reward):
    """To the bit; and each video judged is a sign of progress."""
    reward.fps, signs = 16.0, []
    reward.progress = lambda: signs.append(1)
    videos, prompts = [video(9, 12, 20), video(4, 12, 20, 3)], ["a red square", "b"]
    both = reward.score(videos, prompts)
    assert both == [*reward.score(videos[:1], prompts[:1]), *reward.score(videos[1:], prompts[1:])]
    assert len(signs) == 4


def test_a_head_with_a_row_for_each_dimension(folder, reward):
    """Each token is read by its own row, as where VideoAlign is trained with `output_dim` 3."""
    state = torch.load(folder / WEIGHTS, weights_only=True)
    state[HEAD] = torch.cat([state[HEAD], 2 * state[HEAD], -state[HEAD]])
    torch.save(state, folder / WEIGHTS)
    clip = video(4, 12, 20)
    expected = reward._forward(clip, "b") * torch.tensor([1, 2, -1])
    torch.testing.assert_close(loaded(folder)._forward(clip, "b"), expected)


@pytest.mark.parametrize(
    ("frames", "fps", "places"),
    [
        (21, 4.0, [0, 2, 4, 7, 9, 11, 13, 16, 18, 20]),
        (81, 16.0, [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]),
        (21, 16.0, [0, 7, 13, 20]),
        (3, 16.0, [0, 2]),
        (6, 1.0, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_frames_are_sampled_as_in_training(frames, fps, places):
    """Two a second, an even number of them from first to last, and four if the video has so many."""
    assert sampled(torch.arange(frames), fps, 2.0).tolist() == places


def test_two_frames_make_a_patch():
    """Tokens go row by row, patches within a token too; in a patch, both frames' red stands before their green."""
    frames = torch.zeros(2, 448, 448, 3, dtype=torch.uint8)
    frames[1, :14, 14:28, 2] = 255
    flat, grid = patches(frames, 448 * 448, 14, 2)
    assert grid.tolist() == [1, 32, 32] and flat.shape == (32 * 32, 3 * 2 * 14 * 14)
    bright = flat.view(-1, 3, 2, 14 * 14)[..., 0] > 2
    assert bright.nonzero().tolist() == [[1, 2, 1]]


@pytest.mark.parametrize(
    ("frames", "prompt", "reason"),
    [
        (1, "a dog", "the video has one frame"),
        (2, "a dog <|TA_reward|>", "the prompt holds a token"),
        (2, "<|video_pad|>", "the prompt holds a token"),
    ],
)
def test_what_cannot_be_judged_is_invalid(reward, frames, prompt, reason):
    (outcome,) = reward.score([video(frames, 12, 20)], [prompt])
    assert isinstance(outcome, Invalid) and outcome.reason.startswith(reason)


def test_it_needs_what_its_weights_take(reward):
    """In float32 on the CPU, in half of that on a GPU."""
    counted = sum(parameter.nbytes for parameter in reward._model.parameters())
    assert dict(reward.needs(32, 32, CPU).held) == {"judge weights": counted}
    assert dict(reward.needs(32, 32, torch.device("cuda")).held) == {"judge weights": counted // 2}


def test_the_last_checkpoint_is_taken(folder, reward):
    """By its number: the 12th is later than the 7th."""
    shutil.copytree(folder / "checkpoint-7", folder / "checkpoint-12")
    state = torch.load(folder / WEIGHTS, weights_only=True)
    torch.save(state | {HEAD: -state[HEAD]}, folder / "checkpoint-12/model.pth")
    clip = video(2, 12, 20)
    assert torch.equal(loaded(folder)._forward(clip, "b"), -reward._forward(clip, "b"))


def test_the_run_says_how_fast_its_videos_are(tmp_path):
    """The toy's have 8 frames a second, where Wan's have 16."""
    config = DanceGRPOConfig(reward=(f"videoalign@{FOLDER}",), out=str(tmp_path / "run"))
    (made,) = prepare("dancegrpo", config, DanceGRPO, 1).run.rewards
    assert made.reward.fps == 8


def edited(file: str, edit: Callable[[str], str]) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(edit((folder / file).read_text()))


def saved(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        state = torch.load(folder / WEIGHTS, weights_only=True)
        change(state)
        torch.save(state, folder / WEIGHTS)

    return damage


def without(file: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).unlink()


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-5000])


BASE = "give the folder of KwaiVGI/VideoReward with config.json of Qwen/Qwen2-VL-2B-Instruct in it"


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (without("model_config.json"), f"model_config.json does not describe a VideoReward: .*; {BASE}"),
        (edited("model_config.json", lambda text: text[:-9]), "model_config.json does not describe a VideoReward: "),
        (
            edited("model_config.json", lambda text: text.replace("detailed_special", "simple")),
            "Invalid enum value 'simple' - at `.*prompt_template_type`",
        ),
        (edited("model_config.json", lambda text: text.replace("VQ_std", "std")), "missing required field `VQ_std`"),
        (without("config.json"), f"has no config.json; {BASE}"),
        (edited("config.json", lambda text: "{}"), f"config.json cannot be read: .*; {BASE}"),
        (lambda folder: CLIPConfig().save_pretrained(folder), f"config.json describes a clip; {BASE}"),
        (
            edited("config.json", lambda text: text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')),
            r"by its tensors: 26 missing .*\.layers\.2\..*; download it again, or give the files of one model",
        ),
        (
            edited("config.json", lambda text: text.replace('"intermediate_size": 64', '"intermediate_size": 96')),
            rf"mlp.\w+_proj.base_layer.weight is .*, and by the .* should be .*; {BASE}",
        ),
        (without(WEIGHTS), f"has no checkpoint-.*/model.pth; {BASE}"),
        (cut, "model.pth cannot be read as a PyTorch checkpoint: "),
        (lambda folder: (folder / WEIGHTS).write_bytes(b""), "model.pth cannot be read as a PyTorch checkpoint: "),
        (lambda folder: torch.save(Path("x"), folder / WEIGHTS), "model.pth cannot be read as a PyTorch checkpoint: "),
        (saved(dict.clear), r"is not a VideoReward, by its tensors: \d+ missing"),
        (saved(lambda state: state.pop(LORA)), rf"by its tensors: 1 missing \({LORA}\)"),
        (saved(lambda state: state.update(more=state[HEAD])), r"by its tensors: 1 unexpected \(more\)"),
        (saved(lambda state: state.update({LORA: state[LORA][:, :2]})), rf"{LORA} is \[64, 2\].* should be \[64, 4\]"),
        (saved(lambda state: state.update({HEAD: state[HEAD][:, :7]})), rf"{HEAD} is \[1, 7\].* should be \[1, 32\]"),
        (
            lambda folder: shutil.rmtree(folder / "checkpoint-7/tokenizer"),
            f"tokenizer holds no tokenizer that can be loaded: .*; {BASE}",
        ),
    ],
)
def test_a_folder_that_is_not_whole(damage, sentence, folder):
    """One sentence says what is wrong before anything is loaded, and none of a file's code is run."""
    damage(folder)
    with pytest.raises(ConfigError, match=f"^--reward videoalign@{folder}: {folder}.*{sentence}"):
        parse_rewards([f"videoalign@{folder}"])


def test_a_tokenizer_without_the_rewards_tokens(folder):
    """The base's, for one."""
    tokenizer = folder / "checkpoint-7" / "tokenizer"
    for file in tokenizer.iterdir():
        file.write_text(file.read_text().replace("_reward|>", "_other|>"))
    with pytest.raises(ConfigError, match=r"has no <\|MQ_reward\|>, .*; give VideoReward's own tokenizer$"):
        VideoAlign(folder)
