"""HPSv2.1 and PickScore, tiny, in their on-disk forms: HPSv2's numbers are those of its authors' code."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn.functional import interpolate
from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from asyncflow.errors import ConfigError, RewardError
from engines.rewards.base import Needs
from engines.rewards.clip import HPSv2, PickScore, from_open_clip, letterbox
from engines.rewards.registry import parse_rewards

CPU = torch.device("cpu")
SIDE = 28


@pytest.fixture(scope="module")
def golden() -> dict[str, object]:
    return torch.load(Path(__file__).parent / "golden" / "hps_tiny.pt", weights_only=True)


def save_clip(folder: Path) -> None:
    """Configuration and tokenizer of a tiny CLIP whose word `wN` is token N, between tokens 62 and 63."""
    common = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_act": "gelu"}
    text = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 64, "max_position_embeddings": 77,
            "eos_token_id": 2, **common}  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 128, "image_size": SIDE, "patch_size": 14, **common}
    CLIPConfig(text_config=text, vision_config=vision, projection_dim=16).save_pretrained(folder)
    made = Tokenizer(models.WordLevel({**{f"w{n}": n for n in range(62)}, "[": 62, "]": 63}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="[ $A ]", special_tokens=[("[", 62), ("]", 63)])
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="[", eos_token="]").save_pretrained(folder)


@pytest.fixture
def hps(golden, tmp_path) -> Path:
    save_clip(tmp_path)
    torch.save({"state_dict": golden["state_dict"]}, tmp_path / "HPS_v2.1_compressed.pt")
    return tmp_path


@pytest.fixture(scope="module")
def pick(golden, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pickscore")
    save_clip(folder)
    model = CLIPModel(CLIPConfig.from_pretrained(folder))
    model.load_state_dict(from_open_clip(golden["state_dict"]))
    model.save_pretrained(folder)
    sizes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    images = {"image_processor_type": "CLIPImageProcessor", **sizes}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    return folder


def test_hpsv2_gives_the_numbers_of_its_authors(golden, hps):
    """From frames and prompt to the cosines of each frame, and a video's is their mean."""
    (made,) = parse_rewards([f"hpsv2@{hps}=2"])
    assert (made.name, made.weight) == ("hpsv2", 2.0)
    made.reward.load(CPU)
    frames, prompt = golden["frames"], "w5 w9 w40"
    single = made.reward.score([frame[None] for frame in frames], [prompt] * 3)
    torch.testing.assert_close(torch.tensor(single), golden["cosines"], atol=1e-5, rtol=0)
    assert made.reward.score([frames], [prompt]) == [pytest.approx(golden["cosines"].mean().item(), abs=1e-5)]
    assert len(set(made.reward.score([frames] * 2, ["w5", "w6"]))) == 2


def test_frames_are_fitted_into_a_square_as_the_authors_do(golden):
    for frame, expected in zip(golden["frames"], golden["pixels"], strict=True):
        torch.testing.assert_close(letterbox(frame, SIDE), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(letterbox(frame.transpose(0, 1), SIDE).shape, expected.shape)


def test_a_long_prompt_is_cut(hps):
    reward = HPSv2(hps)
    reward.load(CPU)
    (score,) = reward.score([torch.zeros(9, SIDE, SIDE, 3, dtype=torch.uint8)], ["w1 " * 200])
    assert -1 <= score <= 1


def test_pickscore_is_a_scaled_cosine(golden, pick):
    """By the model's own temperature, over 26; frames go through the folder's own processor."""
    (made,) = parse_rewards([f"pickscore@{pick}"])
    assert isinstance(made.reward, PickScore)
    made.reward.load(CPU)
    square = golden["frames"][:1, :, 16:56]
    (score,) = made.reward.score([square], ["w5 w9 w40"])
    mean, std = (torch.tensor(values)[:, None, None] for values in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
    smaller = interpolate(square.permute(0, 3, 1, 2).float(), (SIDE, SIDE), mode="bicubic", antialias=True)
    pixels = (smaller.round().clamp(0, 255) / 255 - mean) / std
    model = CLIPModel.from_pretrained(pick).eval()
    seen = model(input_ids=torch.tensor([[62, 5, 9, 40, 63]]), pixel_values=pixels)
    assert score == pytest.approx(seen.logits_per_image.item() / 26, abs=1e-3)


@pytest.mark.parametrize(
    ("reward", "missing"),
    [("hpsv2", "config.json, HPS_v2.1_compressed.pt, vocab"), ("pickscore", "config.json, preprocessor_config.json")],
)
def test_a_folder_without_what_it_needs(reward, missing, tmp_path):
    """One sentence says what is missing and what to give."""
    sentence = f"^--reward {reward}@{tmp_path}: {tmp_path} has no {missing}.*; give the folder"
    with pytest.raises(ConfigError, match=sentence):
        parse_rewards([f"{reward}@{tmp_path}"])


def test_weights_of_another_model(hps, golden):
    """The missing weight is named, and nothing is loaded in part."""
    state = dict(golden["state_dict"])
    del state["visual.proj"]
    torch.save({"state_dict": state}, hps / "HPS_v2.1_compressed.pt")
    with pytest.raises(RewardError, match=f"^{hps} holds no hpsv2 that can be loaded: (.|\n)*visual_projection.weight"):
        HPSv2(hps).load(CPU)


def test_what_they_take_of_memory(hps, pick):
    """Their weights, in the float32 that they are loaded in; a folder that describes no model is named."""
    for reward in (HPSv2(hps), PickScore(pick)):
        reward.load(CPU)
        held = sum(parameter.numel() * parameter.itemsize for parameter in reward._model.parameters())
        assert reward.needs(480, 832, CPU) == Needs({"judge weights": held})
    (hps / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=f"^{hps / 'config.json'} describes no CLIP model"):
        HPSv2(hps).needs(480, 832, CPU)
