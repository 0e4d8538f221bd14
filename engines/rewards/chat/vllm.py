"""vLLM in processes of its own beside the rank: a judge at the speed of a server, without one.

Invariant: one engine for each judge, which takes as much KV cache as it was granted and no share of the device besides;
its requests are aborted when nobody awaits them any more. If its processes die the conversations are told so, and may
start new ones. vLLM is imported when it starts, and not before. `build` makes it, `judging` and `judges` use it.
"""

import asyncio
import gc
import multiprocessing
from collections.abc import Awaitable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from PIL import Image

from asyncflow.errors import RewardError
from engines.rewards.chat.base import Ask, Busy, ChatEngine, Died, Message, Refused, Reply
from engines.rewards.chat.vllm_processes import own_environment

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

BATCHED_TOKENS = 8192
"""Tokens that it computes at once, which bounds its activations."""
PROCESSOR_CACHE_GIB = 1.0
"""Host memory for frames that were prepared before: a candidate's are shown in each of its comparisons."""
STRICT_JSON = {"backend": "xgrammar", "disable_any_whitespace": True}
"""Without blanks between values, of which some models never write an end."""
REPEATS, LONGEST_REPEAT = 16, 64
"""A text that ends in so many repetitions of at most so many tokens will not end by itself."""


class Vllm(ChatEngine):
    """See the module. It shows at most `images` in one conversation and holds `concurrency` at once."""

    apart = True

    def __init__(self, folder: Path, *, images: int, concurrency: int) -> None:
        self._folder = folder
        self._images = images
        self._concurrency = concurrency
        # Starts and ends vLLM's processes. The kernel ends them with the thread that started them.
        self._thread = ThreadPoolExecutor(1, "asyncflow-vllm")
        self._llm: AsyncLLM | None = None
        self._waking = asyncio.Lock()
        self._rests = False

    async def start(self, device: torch.device, cache_bytes: int) -> None:
        """See `ChatEngine`. Without a grant vLLM takes what it likes."""
        self._device = device
        self._cache_bytes = cache_bytes
        try:
            await self._in_thread(partial(self._launch, device, cache_bytes))
        except (ImportError, OSError, ValueError, RuntimeError) as error:
            raise RewardError(f"vLLM cannot serve the judge in {self._folder}: {error}") from error

    async def complete(self, ask: Ask) -> Reply:
        """See `ChatEngine`."""
        from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMServerError
        from vllm.renderers.params import ChatParams
        from vllm.v1.engine.exceptions import EngineDeadError

        assert self._llm, "vLLM has not started"
        chat = [{"role": message.role, "content": _parts(message)} for message in ask.messages]
        parameters = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
        try:
            await self._wake()
            _, (prompt,) = await self._llm.renderer.render_chat_async([chat], parameters)
            async with aclosing(self._llm.generate(prompt, _sampling(ask), str(uuid4()))) as outputs:
                (output,) = [output.outputs[0] async for output in outputs]
        except EngineDeadError:
            raise Died("vLLM died", self._restart) from None
        except (VLLMClientError, ValueError) as error:
            raise Refused(f"vLLM refuses it: {error}") from error
        except (GracefulHTTPError, VLLMServerError) as error:
            raise Busy(f"vLLM failed: {error or error.__cause__!r}") from error
        if output.finish_reason in ("abort", "error"):
            raise Busy(f"vLLM ended it with {output.finish_reason}")
        return _reply(output)

    async def rest(self) -> None:
        """See `ChatEngine`: weights go to the host, the KV cache goes altogether. On a CPU nothing would be gained."""
        from vllm.v1.engine.exceptions import EngineDeadError

        assert self._llm, "vLLM has not started"
        with suppress(EngineDeadError):  # the next conversation will find out
            await self._llm.sleep(level=1 if self._device.type == "cuda" else 0, mode="wait")
            self._rests = True

    async def close(self) -> None:
        """See `ChatEngine`."""
        await self._end()
        self._thread.shutdown()

    async def _wake(self) -> None:
        async with self._waking:
            if self._rests and self._llm:
                await self._llm.wake_up(None if self._device.type == "cuda" else ["scheduling"])
                self._rests = False

    async def _restart(self) -> None:
        await self._end()
        self._rests = False
        await self.start(self._device, self._cache_bytes)

    async def _end(self) -> None:
        if self._llm:
            if handler := self._llm.output_handler:
                handler.cancel()  # else it takes the end for a failure, and says so
                await asyncio.wait([handler])
            await self._in_thread(self._llm.shutdown)
            multiprocessing.active_children()  # which waits for one that was killed
            self._llm = None
            gc.collect()  # its cycles, which would complain at this process's end

    def _in_thread(self, call: Any) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _launch(self, device: torch.device, cache_bytes: int) -> None:
        """Sets what others would return: libraries keep an error, and with it the frames of those who called them."""
        with own_environment(device):
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            arguments = AsyncEngineArgs(
                model=str(self._folder),
                max_model_len=-1,  # what fits into the cache
                max_num_seqs=self._concurrency,
                max_num_batched_tokens=BATCHED_TOKENS,
                limit_mm_per_prompt={"image": self._images, "video": 0},
                kv_cache_memory_bytes=cache_bytes or None,
                mm_processor_cache_gb=PROCESSOR_CACHE_GIB,
                structured_outputs_config=STRICT_JSON,
                enable_sleep_mode=device.type == "cuda",
                enforce_eager=device.type == "cpu",
                disable_log_stats=True,
                use_tqdm_on_load=False,
            )
            self._llm = AsyncLLM.from_engine_args(arguments)


def _parts(message: Message) -> list[Mapping[str, Any]]:
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_pil", "image_pil": Image.fromarray(part.numpy())}
        for part in message.parts
    ]


def _sampling(ask: Ask) -> "SamplingParams":
    from vllm import SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

    return SamplingParams(
        temperature=ask.temperature,
        seed=ask.seed,
        max_tokens=ask.max_tokens,
        stop=list(ask.stop),
        include_stop_str_in_output=True,
        logprobs=ask.top_logprobs or None,
        structured_outputs=StructuredOutputsParams(json=dict(ask.schema)) if ask.schema else None,
        repetition_detection=RepetitionDetectionParams(max_pattern_size=LONGEST_REPEAT, min_count=REPEATS),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _reply(output: "CompletionOutput") -> Reply:
    return Reply(
        text=output.text,
        finish=output.finish_reason if output.finish_reason in ("length", "repetition") else "stop",  # type: ignore
        tokens=len(output.token_ids),
        logprobs=tuple(_alternatives(*pair) for pair in zip(output.token_ids, output.logprobs or (), strict=False)),
    )


def _alternatives(token: int, likely: Mapping[int, Any]) -> tuple[str, Mapping[str, float]]:
    """A token's text, and log-probabilities by text; of two that look alike the likelier's."""
    named: dict[str, float] = {}
    for chance in sorted(likely.values(), key=lambda chance: -chance.logprob):
        named.setdefault(chance.decoded_token or "", chance.logprob)
    return likely[token].decoded_token or "", named
