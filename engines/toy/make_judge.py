"""Train the toy's judge from nothing: `python -m engines.toy.make_judge --out DIR`.

Invariant: the result is a stock Qwen2.5-VL folder, asked as `engines/toy/judge.toml` says; only the weights are ours.
It learns to write the answers of `judge_words` about videos of `judge_videos`. The judge that ships in
`engines/toy/judge` was made so, with the defaults.
"""

import copy
import logging
import math
from collections.abc import Callable
from pathlib import Path

import click
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import logging as transformers_logging

from engines.rewards.pixels import LAG, colours, places
from engines.rewards.protocols.base import fill, read_template
from engines.toy import MODEL
from engines.toy.judge_videos import draw_prompt, generate_videos, paint_faulty, vary
from engines.toy.judge_words import PLACES, SHOWN, Seen, look, new_tokenizer
from engines.toy.videos import COLOURS, SIZE, split_prompts

log = logging.getLogger(__name__)

TEMPLATE = Path(__file__).parent / "judge.txt"
VIDEOS = 6144
STEPS = 2000
BATCH = 16
LEARNING_RATE = 2e-3
HIDDEN = 128
PATCH = 16  # pixels; 2x2 patches become one token, so a frame is one
TELLING = 5.0  # weight of what frames are to tell, beside the answers


def new_images() -> Qwen2VLImageProcessorPil:
    """The image processor: a frame of any size becomes one of about 32x32 pixels."""
    pixels = {"shortest_edge": SIZE * SIZE, "longest_edge": SIZE * SIZE}
    return Qwen2VLImageProcessorPil(patch_size=PATCH, temporal_patch_size=2, merge_size=2, size=pixels)


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """The untrained judge, 1.6 M parameters: 2 layers that see and 3 that write, heads of 32."""
    text = {
        "vocab_size": len(tokenizer), "hidden_size": HIDDEN, "intermediate_size": 3 * HIDDEN, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    vision = {
        "depth": 2, "fullatt_block_indexes": [0, 1], "hidden_size": HIDDEN, "intermediate_size": 3 * HIDDEN,
        "num_heads": 4, "out_hidden_size": HIDDEN, "patch_size": PATCH, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "window_size": SIZE,
    }  # fmt: skip
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(tokens), strict=True))
    torch.manual_seed(seed)
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))


def make_pool(videos: int, generator: torch.Generator) -> tuple[Tensor, list[Seen]]:
    """The frames shown of each video, uint8 [videos, 9, 32, 32, 3], and what is to be seen. Half are the toy's own."""
    training, _ = split_prompts()
    prompts = (training * videos)[: videos // 2]
    frames: list[Tensor] = []
    seen: list[Seen] = []
    for start in range(0, len(prompts), 256):
        asked = prompts[start : start + 256]
        for kind in (vary(generate_videos(MODEL, asked, generator), generator), paint_faulty(asked, generator)):
            frames.append(kind[:, PLACES])
            seen += [look(video) for video in kind]
    return torch.cat(frames), seen


class Lessons:
    """Conversations as the model takes them: frames shown, the judge asked, and the answer that it should give."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._images = new_images()
        self._template = read_template(TEMPLATE)
        self._image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def batch(self, frames: Tensor, prompts: list[str], answers: list[str]) -> dict[str, Tensor]:
        """Inputs and labels for n videos' frames, uint8 [n, 9, 32, 32, 3]; only answers have labels."""
        asked = [self._question(prompt) for prompt in prompts]
        told = [self._ids(f"{answer}<|im_end|>") for answer in answers]
        pairs = list(zip(asked, told, strict=True))
        ids = [torch.tensor(question + answer) for question, answer in pairs]
        labels = [torch.tensor([-100] * len(question) + answer) for question, answer in pairs]
        padded = pad_sequence(ids, batch_first=True, padding_value=self._tokenizer.pad_token_id)
        seen = self._images(list(frames.flatten(0, 1).permute(0, 3, 1, 2)), return_tensors="pt")
        return {
            **seen,
            "input_ids": padded,
            "attention_mask": (padded != self._tokenizer.pad_token_id).int(),
            "mm_token_type_ids": (padded == self._image_id).int(),
            "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        }

    def _question(self, prompt: str) -> list[int]:
        asked = {"type": "text", "text": fill(self._template, prompt=prompt)}
        messages = [{"role": "user", "content": [{"type": "image"}] * SHOWN + [asked]}]
        return self._ids(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def to_tell(frames: Tensor) -> tuple[Tensor, Tensor]:
    """What a frame's token should tell by itself, [n, 9, 11], and with those before it, [n, 8, 2].

    That is closeness to each colour, visibility, and the place as a phase; and of all but the first frame the way from
    the one before, (x, y) in pixels a frame. `frames` are uint8 [n, 9, 32, 32, 3].
    """
    closeness, visible = colours(frames.flatten(0, 1))
    phase, followed = places(frames.flatten(0, 1))
    phase = phase / phase.abs().clamp(min=1e-6)
    alone = [closeness * visible[:, None], visible[:, None], torch.view_as_real(phase * followed[:, None]).flatten(1)]
    phase, followed = phase.unflatten(0, frames.shape[:2]), followed.unflatten(0, frames.shape[:2])
    moved = -(phase[:, 1:] * phase[:, :-1].conj()).angle() * SIZE / (2 * math.pi * LAG)
    return (
        torch.cat(alone, dim=1).unflatten(0, frames.shape[:2]),
        moved * torch.minimum(followed[:, 1:], followed[:, :-1])[..., None],
    )


def train_judge(
    model: Qwen2_5_VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    frames: Tensor,
    seen: list[Seen],
    steps: int = STEPS,
    seed: int = 0,
    checkpoint: Callable[[], None] | None = None,
) -> None:
    """Predict the answers' tokens, and, by linear maps that are no part of the judge, what frames are `to_tell`.

    The tower's tokens tell what a frame shows by itself, and those before the last layer what has moved: an answer is
    too far from an untrained tower to teach it that. Videos come back with other prompts and, being tori, shifted.
    `checkpoint`, if given, is called every 200 steps.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    lessons = Lessons(tokenizer)
    to_alone, to_moved = nn.Linear(HIDDEN, len(COLOURS) + 5), nn.Linear(HIDDEN, 2)
    weights = [*model.parameters(), *to_alone.parameters(), *to_moved.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    recent = torch.zeros(3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((step + 1) / 100, 1.0, 0.02 + 1.6 * (1 - step / steps))
        chosen = torch.randint(len(frames), (BATCH,), generator=generator).tolist()
        shift = torch.randint(SIZE, (2,), generator=generator).tolist()
        shown = frames[chosen].roll(shift, (2, 3))
        prompts = [draw_prompt(seen[i].colours, seen[i].steps, generator) for i in chosen]
        answers = [seen[i].answer(prompt) for i, prompt in zip(chosen, prompts, strict=True)]
        batch = lessons.batch(shown, prompts, answers)
        made = model(**batch, output_hidden_states=True)
        tower, _, before_last, _ = (
            layer[batch["mm_token_type_ids"].bool()].unflatten(0, (BATCH, SHOWN)) for layer in made.hidden_states
        )
        alone, moved = to_tell(shown)
        looking = (to_alone(tower) - alone).square().mean()
        following = (to_moved(before_last[:, 1:]) - moved).square().mean()
        optimizer.zero_grad()
        (made.loss + TELLING * (looking + following)).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()

        recent += torch.stack([made.loss, looking, following]).detach() / 50
        if step % 50 == 49:
            log.info("judge step %d: loss %.4f, of looking %.4f, of following %.4f", step + 1, *recent.tolist())
            recent.zero_()
        if step % 200 == 199 and checkpoint is not None:
            checkpoint()


def save(model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the folder, its weights in half precision; the model itself stays as it is."""
    half = copy.deepcopy(model).half()
    half.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    half.config.text_config.dtype = half.config.vision_config.dtype = half.dtype
    half.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    new_images().save_pretrained(folder)


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder to write.")
@click.option("--steps", default=STEPS, show_default=True, help="Training steps.")
@click.option("--videos", default=VIDEOS, show_default=True, help="Videos it is trained on.")
@click.option("--seed", default=0, show_default=True, help="Seed of weights, videos and prompts.")
def main(out: Path, steps: int, videos: int, seed: int) -> None:
    """Train the judge on videos with faults and write it as a Qwen2.5-VL folder; takes 15 minutes of one CPU core."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    tokenizer = new_tokenizer(read_template(TEMPLATE))
    model = new_model(tokenizer, seed)
    frames, seen = make_pool(videos, torch.Generator().manual_seed(seed))
    log.info("made %d videos", len(frames))
    train_judge(model, tokenizer, frames, seen, steps, seed, checkpoint=lambda: save(model, tokenizer, out))
    save(model, tokenizer, out)


if __name__ == "__main__":
    main()
