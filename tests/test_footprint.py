"""What a judge with a model takes of its device: each term against counted bytes, and the figures of real judges."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    DynamicCache,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
)

from asyncflow.errors import ConfigError
from engines.live_bytes import LiveBytes
from engines.rewards import footprint as footprints
from engines.rewards.base import Needs
from engines.rewards.build import make_judge
from engines.rewards.chat.base import Ask, Reply
from engines.rewards.chat.in_process import _Model
from engines.rewards.footprint import (
    BLOCK,
    WORDS,
    activation_bytes,
    cache_bytes,
    footprint,
    in_process_needs,
    vllm_needs,
    word_bytes,
)
from engines.rewards.protocols.base import Case, ChatProtocol
from engines.rewards.protocols.unified_flex import UnifiedRewardFlex
from engines.rewards.protocols.unified_score import UnifiedRewardScore
from engines.rewards.protocols.vr_thinker import CARD_2026, PAPER, VRThinker
from engines.rewards.testing import save_tiny_judge

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 2**30
FLEX = UnifiedRewardFlex("{prompt}", 8, 4096)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("judge")
    save_tiny_judge(made)
    return made


def counted(tensors: object) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def test_weights(folder: Path, tmp_path: Path) -> None:
    """As they are loaded, from one file or from several."""
    loaded = counted(_Model(folder, CPU)._model.parameters())
    assert footprint(folder, FLEX, 64, 64, torch.float32).weights == loaded
    assert footprint(folder, FLEX, 64, 64, torch.bfloat16).weights == loaded // 2
    AutoModelForImageTextToText.from_pretrained(folder).save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert 4 * footprints.elements(tmp_path) == loaded == counted(load_file(folder / "model.safetensors").values())


def test_cache(folder: Path) -> None:
    """Keys and values that a forward leaves for each token."""
    model, cache = _Model(folder, CPU)._model, DynamicCache()
    with torch.inference_mode():
        model(input_ids=torch.zeros(3, 7, dtype=torch.long), cache=cache, use_cache=True)
    held = counted(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert 3 * 7 * footprint(folder, FLEX, 64, 64, torch.float32).cache == held


@pytest.mark.parametrize("size", [(64, 64), (48, 80), (30, 200), (16, 16), (480, 832)])
def test_tokens_of_images(folder: Path, size: tuple[int, int]) -> None:
    """As many as the folder's own processor makes of them, small and large ones resized."""
    processor = AutoImageProcessor.from_pretrained(folder)
    grid = processor(images=[torch.zeros(*size, 3, dtype=torch.uint8).numpy()])["image_grid_thw"]
    made = footprint(folder, FLEX, *size, torch.float32)
    assert made.prompt == 16 * int(torch.as_tensor(grid).prod()) // processor.merge_size**2 + WORDS
    assert made.largest_image == 4096 // 16**2


SELECTS = '<tool_call>{{"arguments": {{"target_frames": {}}}}}</tool_call>'


@pytest.mark.parametrize("size", [(48, 80), (480, 832), (1000, 1100)])
@pytest.mark.parametrize(
    ("protocol", "replies"),
    [
        (FLEX, []),
        (UnifiedRewardScore("{prompt}", 16, 512), []),
        (VRThinker("{prompt}", PAPER, 4096), [SELECTS.format(list(range(1, 9)))] * 3),
        (VRThinker("{prompt}", CARD_2026, 4096), [SELECTS.format(list(range(9, 21)))] * 5),
    ],
)
def test_what_a_protocol_shows(protocol: ChatProtocol, replies: list[str], size: tuple[int, int]) -> None:
    """Its last ask has as many images as it says, none larger than it says, and is its last turn."""
    case = Case((torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(130, *size, 3),) * protocol.videos, "p")
    ask = protocol.proceed(case, [Reply(text) for text in replies])
    assert isinstance(ask, Ask)
    images = [part for message in ask.messages for part in message.parts if isinstance(part, Tensor)]
    assert len(images) == protocol.images and len(replies) == protocol.turns - 1
    assert max(tuple(image.shape[:2]) for image in images) == protocol.shown(*size)
    assert (ask.max_tokens, ask.top_logprobs) == (protocol.max_tokens, protocol.top_logprobs)


def wide_config(kind: type, tower: int) -> object:
    """Of a model wide enough that what is counted a token, whatever the width, weighs little, but for its tower."""
    text = {
        "vocab_size": 300, "hidden_size": 256, "intermediate_size": 700, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]},
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    vision = {"depth": 2, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
    vision |= {
        Qwen2VLConfig: {"embed_dim": tower, "hidden_size": 256},
        Qwen2_5_VLConfig: {"hidden_size": tower, "intermediate_size": 3 * tower, "out_hidden_size": 256,
                           "fullatt_block_indexes": [1], "window_size": 32},
        Qwen3VLConfig: {"hidden_size": tower, "intermediate_size": 4 * tower, "out_hidden_size": 256,
                        "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
    }[kind]  # fmt: skip
    ids = dict(zip(("image", "video", "vision_start", "vision_end"), range(290, 294), strict=True))
    return kind(text_config=text, vision_config=vision, **{f"{name}_token_id": value for name, value in ids.items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Qwen2VLConfig, Qwen2_5_VLConfig, Qwen3VLConfig])
@pytest.mark.parametrize("tower", [16, 128])
def test_activations(kind: type, dtype: torch.dtype, tower: int) -> None:
    """Reading two prompts takes at most what is estimated, and most of it, in the tower or the language model."""
    config, side, images = wide_config(kind, tower), 16, 4
    model = AutoModelForImageTextToText.from_config(config, dtype=dtype).eval()
    ids = torch.tensor([[5, 5, *images * [292, *[290] * (side**2 // 4), 293]]] * 2)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with LiveBytes() as live, torch.inference_mode():
        model.generate(
            input_ids=ids.clone(),
            attention_mask=mask.clone(),
            mm_token_type_ids=(ids == 290).int(),
            pixel_values=torch.zeros(2 * images * side**2, 3 * 2 * 8**2),
            image_grid_thw=torch.tensor([[1, side, side]] * 2 * images),
            max_new_tokens=1,
            do_sample=False,
            eos_token_id=299,
        )
    cache = ids.numel() * cache_bytes(config.text_config, dtype)
    estimated = ids.numel() * (activation_bytes(config.text_config, config.vision_config, dtype) + ids.shape[1])
    assert 0.65 < (live.peak - cache) / estimated < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Qwen2VLConfig, Qwen2_5_VLConfig, Qwen3VLConfig])
def test_activations_of_words(kind: type, dtype: torch.dtype) -> None:
    """The same of a prompt without images."""
    config = wide_config(kind, 16)
    model = AutoModelForImageTextToText.from_config(config, dtype=dtype).eval()
    ids = torch.full((2, 300), 5)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with LiveBytes() as live, torch.inference_mode():
        model.generate(
            input_ids=ids.clone(), attention_mask=mask.clone(), max_new_tokens=1, do_sample=False, eos_token_id=299
        )
    cache = ids.numel() * cache_bytes(config.text_config, dtype)
    estimated = ids.numel() * (word_bytes(config.text_config, dtype) + ids.shape[1])
    assert 0.65 < (live.peak - cache) / estimated < 1


def save_config(folder: Path, config: Mapping[str, object], images: Mapping[str, object]) -> Path:
    """A folder of configurations without weights."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    return folder


@pytest.fixture
def qwen25_7b(tmp_path: Path) -> Path:
    """Qwen2.5-VL-7B, the base of VR-Thinker, as it was published: with a flat configuration."""
    vision = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
        "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    }  # fmt: skip
    config = {
        "model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 128000,
        "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": False, "vision_config": vision,
    }  # fmt: skip
    images = {
        "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14,
        "merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    return save_config(tmp_path, config, images)


@pytest.fixture
def qwen3_8b(tmp_path: Path) -> Path:
    """Qwen3-VL-8B, the base of UnifiedReward-Flex."""
    text = {
        "model_type": "qwen3_vl_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rope_theta": 5e6,
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
    }  # fmt: skip
    vision = {
        "model_type": "qwen3_vl", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
        "out_hidden_size": 4096, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
    }  # fmt: skip
    config = {
        "model_type": "qwen3_vl", "text_config": text, "vision_config": vision, "tie_word_embeddings": False,
    }  # fmt: skip
    images = {
        "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "merge_size": 2,
        "temporal_patch_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    }  # fmt: skip
    return save_config(tmp_path, config, images)


@pytest.mark.parametrize(
    ("name", "numbers", "cache", "image", "held", "conversation"),
    [
        ("qwen25_7b", 8_292_166_656, 57_344, 17 * 30, (15.4, 3.9), 0.766),
        ("qwen3_8b", 8_767_123_696, 147_456, 15 * 26, (16.3, 4.5), 1.705),
    ],
)
def test_real_judges_at_480p(
    name: str,
    numbers: int,
    cache: int,
    image: int,
    held: tuple[float, float],
    conversation: float,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """UnifiedReward-Flex's conversation of 16 frames: 0.8 or 1.7 GiB of cache beside 16 GiB of weights."""
    folder = request.getfixturevalue(name)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    assert sum(parameter.numel() for parameter in model.parameters()) == numbers
    monkeypatch.setattr(footprints, "elements", lambda _: numbers)
    made = footprint(folder, FLEX, 480, 832, torch.bfloat16)
    assert (made.cache, made.prompt) == (cache, 16 * image + WORDS)
    needs = vllm_needs(folder, FLEX, 16, 8192, 480, 832, GPU)
    assert [size / GIB for size in needs.held.values()] == pytest.approx(held, abs=0.1)
    assert needs.least_cache / GIB == pytest.approx(conversation, abs=0.001)
    assert needs.most_cache == 16 * needs.least_cache


def test_needs_of_each_engine(folder: Path) -> None:
    """In process a batch is read whole; vLLM reads a few tokens at once, and loads 16 bits on a CPU too."""
    made = footprint(folder, FLEX, 48, 80, torch.float32)
    conversation = -(-(made.prompt + 4096) // BLOCK) * BLOCK * made.cache
    own = in_process_needs(folder, FLEX, 3, 48, 80, CPU)
    assert (own.least_cache, own.most_cache) == (3 * conversation, 3 * conversation)
    reading = made.seen * made.activations + WORDS * made.of_word + made.prompt**2
    assert own.held["judge activations"] == 3 * reading and made.of_word < made.activations
    half = in_process_needs(folder, FLEX, 3, 48, 80, GPU)
    assert (2 * half.held["judge weights"], 2 * half.most_cache) == (own.held["judge weights"], own.most_cache)
    served = vllm_needs(folder, FLEX, 5, 8192, 48, 80, CPU)
    assert (2 * served.least_cache, 2 * served.most_cache) == (conversation, 5 * conversation)
    assert served.held["judge activations"] == 8192 * footprint(folder, FLEX, 48, 80, torch.bfloat16).activations
    assert (
        vllm_needs(folder, FLEX, 5, 1, 48, 80, CPU).held["judge activations"]
        == 16 * served.held["judge activations"] // 8192
    )


def test_log_probabilities(folder: Path) -> None:
    """Those of a long reply outweigh the prompt: three times float32 for each token of the vocabulary."""
    judge = UnifiedRewardScore("{prompt}", 1, 10**6, expectation=True)
    (held,) = {in_process_needs(folder, judge, 2, 48, 80, device).held["judge activations"] for device in (CPU, GPU)}
    vocabulary = AutoConfig.from_pretrained(folder).text_config.vocab_size
    assert held == 3 * 2 * 10**6 * vocabulary * 4
    plain = UnifiedRewardScore("{prompt}", 1, 10**6)
    assert in_process_needs(folder, plain, 2, 48, 80, CPU).held["judge activations"] < held


@pytest.mark.parametrize(
    ("file", "content"),
    [("model.safetensors", ""), ("model.safetensors", "{"), ("config.json", "{}"), ("preprocessor_config.json", "")],
)
def test_a_folder_that_does_not_tell(folder: Path, tmp_path: Path, file: str, content: str) -> None:
    """A missing or damaged file is one sentence, before anything is loaded."""
    broken = shutil.copytree(folder, tmp_path / "judge")
    (broken / file).write_text(content) if content else (broken / file).unlink()
    with pytest.raises(ConfigError, match=f"^model: {broken} does not tell what memory it needs .*; give the whole"):
        footprint(broken, FLEX, 64, 64, torch.float32)


def test_where_a_judge_needs_memory(folder: Path, tmp_path: Path) -> None:
    """A folder's does, by its settings; an endpoint's and a rule's are somewhere else, or nowhere."""
    (tmp_path / "judge.toml").write_text(
        f'protocol = "unified-reward-think"\nmodel = "{folder}"\nengine = "transformers"\nframes = 2\n'
        "max-tokens = 64\nconcurrency = 3\n"
    )
    made = make_judge(str(tmp_path / "judge.toml"))
    expected = in_process_needs(folder, UnifiedRewardFlex("{prompt}", 2, 64), 3, 48, 80, CPU)
    assert made.needs(48, 80, CPU) == expected
    assert make_judge("unified-reward-think@http://localhost:1/v1").needs(48, 80, CPU) == Needs()
