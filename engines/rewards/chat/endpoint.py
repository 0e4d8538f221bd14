"""An OpenAI-compatible endpoint, such as `vllm serve`, through the `openai` client.

Invariant: the client itself neither waits nor retries; each failure is told by what is to be done about it. Frames
travel as JPEG of quality 95, which is what the published judges were shown. The key is in OPENAI_API_KEY, if any.
"""

import asyncio
import base64
import io
import os
from collections.abc import Awaitable
from typing import Any, TypeVar

import openai
import torch
from openai import AsyncOpenAI
from PIL import Image
from torch import Tensor

from asyncflow.errors import RewardError
from engines.rewards.chat.base import Ask, Busy, ChatEngine, Message, Refused, Reply, Unreachable

LATER = {408, 409, 425, 429}
"""Status codes, besides 5xx, that say to try again."""
NEVER = {401, 403, 404}
"""Status codes that no ask will ever be spared: a wrong key, model or address."""
LONGEST_REASON = 200
START_S = 60.0
"""How long an endpoint may take to list its models."""

T = TypeVar("T")


class Endpoint(ChatEngine):
    """See the module. Without a `model` the endpoint must serve exactly one."""

    apart = True

    def __init__(self, url: str, model: str = "") -> None:
        self._url = url
        self.model = model
        self._client = AsyncOpenAI(
            base_url=url, api_key=os.environ.get("OPENAI_API_KEY") or "none", max_retries=0, timeout=None
        )

    async def start(self, device: torch.device, cache_bytes: int) -> None:
        """See `ChatEngine`: find the model."""
        try:
            async with asyncio.timeout(START_S):
                served = await self._told(self._client.models.list())
        except TimeoutError:
            raise Unreachable(f"{self._url} does not answer") from None
        names = [model.id for model in served.data]
        if not self.model and len(names) == 1:
            (self.model,) = names
        if self.model not in names:
            wanted = f"does not serve {self.model}" if self.model else "serves not exactly one model"
            raise RewardError(f"{self._url} {wanted}; give as model one of {', '.join(names) or 'none'}")

    async def complete(self, ask: Ask) -> Reply:
        """See `ChatEngine`."""
        return _reply(await self._told(self._client.chat.completions.create(**self._request(ask))), self._url)

    async def close(self) -> None:
        """See `ChatEngine`."""
        await self._client.close()

    def _request(self, ask: Ask) -> dict[str, Any]:
        request: dict[str, Any] = {
            "model": self.model,
            "messages": [_message(message) for message in ask.messages],
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
        }
        if ask.stop:
            request["stop"] = list(ask.stop)
        if ask.top_logprobs:
            request |= {"logprobs": True, "top_logprobs": ask.top_logprobs}
        if ask.schema:
            schema = {"name": "verdict", "schema": ask.schema, "strict": True}
            request["response_format"] = {"type": "json_schema", "json_schema": schema}
        return request

    async def _told(self, answer: Awaitable[T]) -> T:
        """What the endpoint answers, or its failure by class."""
        try:
            return await answer
        except openai.APIStatusError as error:
            reason = f"{self._url} answered {error.status_code}: {' '.join(error.message.split())[:LONGEST_REASON]}"
            if error.status_code in LATER or error.status_code >= 500:
                raise Busy(reason, _seconds(error.response.headers.get("retry-after", ""))) from None
            if error.status_code in NEVER:
                raise RewardError(f"{reason}; correct the reward's url and model, or OPENAI_API_KEY") from None
            raise Refused(reason) from None
        except openai.APIConnectionError as error:
            raise Unreachable(f"nobody answers at {self._url} ({error.__cause__ or error})") from None
        except openai.APIError as error:
            raise Refused(f"{self._url} gave what is no completion: {error.message[:LONGEST_REASON]}") from None


def _message(message: Message) -> dict[str, Any]:
    if len(message.parts) == 1 and isinstance(message.parts[0], str):  # what every chat template takes
        return {"role": message.role, "content": message.parts[0]}
    return {"role": message.role, "content": [_part(part) for part in message.parts]}


def _part(part: str | Tensor) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    buffer = io.BytesIO()
    Image.fromarray(part.numpy()).save(buffer, format="JPEG", quality=95)
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}


def _reply(completion: Any, url: str) -> Reply:
    """Raises Refused for an answer that is none."""
    if not getattr(completion, "choices", None):
        raise Refused(f"{url} answered without a completion")
    choice = completion.choices[0]
    if choice.finish_reason == "content_filter":
        raise Refused(f"{url} filtered its answer")
    # where a server's reasoning parser took all for thought, the text is there
    text = choice.message.content or getattr(choice.message, "reasoning_content", None) or ""
    tokens = choice.logprobs.content if choice.logprobs and choice.logprobs.content else []
    return Reply(
        text=text,
        finish=choice.finish_reason if choice.finish_reason in ("length", "repetition") else "stop",
        tokens=completion.usage.completion_tokens if completion.usage else 0,
        logprobs=tuple((token.token, {top.token: top.logprob for top in token.top_logprobs}) for token in tokens),
    )


def _seconds(header: str) -> float:
    """A Retry-After in seconds; 0 where it is a date, or missing."""
    return float(header) if header.isdecimal() else 0.0
