"""Prompt embeddings are WanPipeline's."""

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from asyncflow.errors import ModelError
from engines.testing import tiny_transformer, tiny_vae
from engines.text import load_text_encoder

PROMPTS = ["a red square", "  a   blue &amp; red\nsquare moving left ", "square " * 20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole tiny pipeline on disk."""
    words = ["<pad>", "</s>", "<unk>", "a", "red", "blue", "square", "moving", "left", "&"]
    raw = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64
    )
    config = UMT5Config(vocab_size=10, d_model=12, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = UMT5EncoderModel(config)
    vae: AutoencoderKLWan = tiny_vae(residual=False)
    pipeline = WanPipeline(tokenizer, encoder, vae, FlowMatchEulerDiscreteScheduler(), transformer=tiny_transformer())
    path = tmp_path_factory.mktemp("pipeline")
    pipeline.save_pretrained(path)
    return path


def test_equals_the_pipeline(folder: Path) -> None:
    """Cleaning, padding and zeros beyond a prompt's tokens are those of encode_prompt at the same length."""
    pipeline = WanPipeline.from_pretrained(folder, local_files_only=True)
    expected, _ = pipeline.encode_prompt(PROMPTS, do_classifier_free_guidance=False, max_sequence_length=8)
    found = load_text_encoder(folder, 8).encode(PROMPTS)
    assert found.shape == (3, 8, 12)
    torch.testing.assert_close(found, expected)
    assert not found[0, 3:].any()
    assert found[2].any(dim=-1).all()


def test_prompts_do_not_disturb_each_other(folder: Path) -> None:
    """A prompt's embedding has the same bits in whatever company."""
    encoder = load_text_encoder(folder, 8)
    assert torch.equal(encoder.encode(PROMPTS)[1], encoder.encode([PROMPTS[1]])[0])


def test_missing_encoder(tmp_path: Path) -> None:
    """A folder without an encoder is refused."""
    with pytest.raises(ModelError, match="no readable tokenizer/ and text_encoder/"):
        load_text_encoder(tmp_path, 8)
