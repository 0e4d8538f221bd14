"""A small Qwen-VL model in this process, through transformers; for machines without a server, and for tests.

Invariant: the model computes in one thread of this engine, so that the loop stays free for deadlines; conversations
that wait are taken together, in the order they came, and a batch of which nothing is wanted any more ends early. A
batch pads its prompts, which can change the last bits of what a conversation alone would give.
"""

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from asyncflow.errors import ConfigError, RewardError
from engines.rewards.chat.base import Ask, ChatEngine, Message, Reply

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Model types whose images become runs of one placeholder token."""
BATCH = 8


def check_folder(folder: Path) -> None:
    """Raises ConfigError unless `folder` looks like a Qwen-VL model."""
    try:
        kind = json.loads((folder / "config.json").read_bytes())["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"model: {folder} has no readable config.json; give the folder of a Qwen-VL model") from None
    if kind not in KINDS:
        raise ConfigError(f"model: {folder} is a {kind}, and only Qwen-VL models load here; serve it, and give its url")


class InProcess(ChatEngine):
    """See the module. It has no structured output."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, "asyncflow-judge")
        self._waiting: list[tuple[Ask, asyncio.Future[Reply]]] = []
        self._serving: asyncio.Task[None] | None = None

    async def start(self, device: torch.device, cache_bytes: int) -> None:
        """See `ChatEngine`: load the model."""
        try:
            self._model = await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: _Model(self._folder, device)
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise RewardError(f"{self._folder} holds no judge that can be loaded: {error}") from error

    async def complete(self, ask: Ask) -> Reply:
        """See `ChatEngine`."""
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.append((ask, answer))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await answer

    async def close(self) -> None:
        """See `ChatEngine`."""
        if self._serving:
            await asyncio.gather(self._serving, return_exceptions=True)
        self._thread.shutdown()

    async def _serve(self) -> None:
        """Answer all that wait, and then those who came meanwhile."""
        while self._waiting:
            batch = _alike([item for item in self._waiting if not item[1].done()])
            self._waiting = [item for item in self._waiting if item not in batch and not item[1].done()]
            if not batch:
                return
            asks, answers = zip(*batch, strict=True)
            made = asyncio.get_running_loop().run_in_executor(self._thread, self._model.complete, asks, answers)
            await asyncio.wait([made])
            error = made.exception()
            for place, answer in enumerate(answers):
                if answer.done():  # nobody waits any more
                    continue
                if error:
                    answer.set_exception(error)
                else:
                    answer.set_result(made.result()[place])


def _alike(waiting: list[tuple[Ask, "asyncio.Future[Reply]"]]) -> list[tuple[Ask, "asyncio.Future[Reply]"]]:
    """The first that wait and can be answered together: sampling has one seed, and is for one alone."""
    if not waiting or waiting[0][0].temperature:
        return waiting[:1]
    same = [item for item in waiting if _form(item[0]) == _form(waiting[0][0])]
    return same[:BATCH]


def _form(ask: Ask) -> tuple[Any, ...]:
    return ask.temperature, ask.max_tokens, ask.stop, ask.top_logprobs


class _Model:
    """Model, tokenizer and image processor; everything here runs in the engine's thread."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._images: Any = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, local_files_only=True)
        self._model = model.eval().requires_grad_(False).to(device)
        self._image_id: int = model.config.image_token_id
        ends = model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends]) | {self._tokenizer.eos_token_id}

    def complete(self, asks: Sequence[Ask], answers: Sequence["asyncio.Future[Reply]"]) -> list[Reply]:
        """A reply to each; the asks are alike but for their messages. Stops when all `answers` are done."""
        inputs = self._inputs(asks)
        (first, *_) = asks

        def unwanted(ids: Tensor, scores: Tensor) -> Tensor:
            return torch.full(ids.shape[:1], all(answer.done() for answer in answers), device=ids.device)

        with torch.inference_mode(), torch.random.fork_rng(enabled=first.temperature > 0):
            if first.temperature:
                torch.manual_seed(first.seed)
            made = self._model.generate(
                **inputs,
                max_new_tokens=first.max_tokens,
                do_sample=first.temperature > 0,
                temperature=first.temperature or None,
                top_p=None,
                top_k=None,
                stop_strings=list(first.stop) or None,
                tokenizer=self._tokenizer,
                stopping_criteria=[unwanted],
                return_dict_in_generate=True,
                output_logits=first.top_logprobs > 0,
                pad_token_id=self._tokenizer.pad_token_id,
                eos_token_id=sorted(self._ends - {None}),
            )
        written = made.sequences[:, inputs["input_ids"].shape[1] :].cpu()
        logits = torch.stack(made.logits, dim=1).float().log_softmax(-1).cpu() if first.top_logprobs else None
        return [self._reply(row, None if logits is None else logits[place], first) for place, row in enumerate(written)]

    def _reply(self, row: Tensor, logprobs: Tensor | None, ask: Ask) -> Reply:
        tokens = row.tolist()
        end = next((place for place, token in enumerate(tokens) if token in self._ends), None)
        text_tokens = tokens if end is None else tokens[:end]
        text = self._tokenizer.decode(text_tokens, skip_special_tokens=True)
        stopped = end is not None or any(stop in text for stop in ask.stop)
        alternatives = []
        for token, chances in zip(text_tokens, () if logprobs is None else logprobs, strict=False):
            best = chances.topk(min(ask.top_logprobs, len(chances)))
            named: dict[str, float] = {}
            for name, chance in zip(self._tokenizer.batch_decode(best.indices[:, None]), best.values, strict=True):
                named.setdefault(name, chance.item())  # of two that look alike the likelier
            alternatives.append((self._tokenizer.decode([token]), named))
        written = len(text_tokens) + (end is not None)
        return Reply(text, "stop" if stopped else "length", written, tuple(alternatives))

    def _inputs(self, asks: Sequence[Ask]) -> dict[str, Tensor]:
        """What the model is called with; each image takes as many placeholders as the model makes tokens of it."""
        pictures = [
            Image.fromarray(part.numpy())
            for ask in asks
            for message in ask.messages
            for part in message.parts
            if isinstance(part, Tensor)
        ]
        seen = dict(self._images(images=pictures, return_tensors="pt")) if pictures else {}
        sizes = seen["image_grid_thw"].prod(dim=1) // self._images.merge_size**2 if pictures else []
        placeholder = self._tokenizer.convert_ids_to_tokens(self._image_id)
        counts = iter(sizes)
        texts = []
        for ask in asks:
            chat = self._tokenizer.apply_chat_template(
                [_message(message) for message in ask.messages], tokenize=False, add_generation_prompt=True
            )
            before, *rest = chat.split(placeholder)
            texts.append(before + "".join(placeholder * int(next(counts)) + text for text in rest))
        written = self._tokenizer(
            texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt"
        )
        inputs = {**seen, "input_ids": written["input_ids"], "attention_mask": written["attention_mask"]}
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == self._image_id).int()
        return {name: tensor.to(self._model.device) for name, tensor in inputs.items()}


def _message(message: Message) -> dict[str, Any]:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in message.parts]
    return {"role": message.role, "content": parts}
