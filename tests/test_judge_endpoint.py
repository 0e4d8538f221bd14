"""Judges behind an OpenAI-compatible endpoint: what is sent, what is read, and which failure means what.

The endpoint is a real HTTP server in this process, which answers what a test gives it.
"""

import asyncio
import base64
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from asyncflow.engine import Invalid
from asyncflow.errors import RewardError
from engines.rewards.chat.base import Ask, Busy, Message, Refused, Reply, Unreachable
from engines.rewards.chat.endpoint import Endpoint
from engines.rewards.registry import parse_rewards

FRAME = torch.arange(16 * 16 * 3, dtype=torch.uint8).view(16, 16, 3)
HELLO = Ask((Message("user", ("hello",)),), max_tokens=5)


class Server(ThreadingHTTPServer):
    """Answers each POST with the next of `answers`, the last one again and again: a status, headers and a body."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, dict[str, str], Any]] = []
        self.models = ["judge-7b"]
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        known = self.path == "/v1/models"
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "me"} for name in self.server.models]
        self._answer(200 if known else 404, {}, {"object": "list", "data": models} if known else {})

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.requests.append(json.loads(self.rfile.read(length)))
        self.server.keys.append(self.headers["Authorization"])
        answers = self.server.answers
        self._answer(*(answers.pop(0) if len(answers) > 1 else answers[0]))

    def _answer(self, status: int, headers: dict[str, str], body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def completion(text: str | None, finish: str = "stop", **more: Any) -> tuple[int, dict[str, str], Any]:
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text}} | more
    usage = {"completion_tokens": 11, "prompt_tokens": 5, "total_tokens": 16}
    return 200, {}, {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice],
                     "usage": usage}  # fmt: skip


def complete(url: str, ask: Ask = HELLO) -> Reply:
    async def main() -> Reply:
        endpoint = Endpoint(url, "judge-7b")
        try:
            return await endpoint.complete(ask)
        finally:
            await endpoint.close()

    return asyncio.run(main())


def test_a_conversation_as_it_is_sent(server, monkeypatch):
    """Texts as they are, frames as JPEG data in their place; greedy means temperature 0, said outright."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server.answers = [completion("yes")]
    messages = Message("system", ("be just",)), Message("user", (FRAME, "which?")), Message("assistant", ("hm",))
    assert complete(server.url, Ask(messages, max_tokens=9, stop=("</t>",))) == Reply("yes", tokens=11)
    (request,) = server.requests
    system, user, assistant = request.pop("messages")
    assert system == {"role": "system", "content": "be just"} and assistant == {"role": "assistant", "content": "hm"}
    image, text = user["content"]
    assert text == {"type": "text", "text": "which?"}
    head, data = image["image_url"]["url"].split(",")
    assert head == "data:image/jpeg;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (16, 16)
    assert request == {"model": "judge-7b", "max_tokens": 9, "temperature": 0.0, "seed": 0, "stop": ["</t>"]}
    assert server.keys == ["Bearer secret"]


def test_a_schema_and_log_probabilities(server):
    """Asked for as the API has them; alternatives come by token."""
    top = [{"token": "4", "logprob": -0.5, "bytes": None}, {"token": "5", "logprob": -1.0, "bytes": None}]
    tokens = {"content": [{"token": "4", "logprob": -0.5, "bytes": None, "top_logprobs": top}], "refusal": None}
    server.answers = [completion("4", logprobs=tokens)]
    ask = Ask(HELLO.messages, 5, temperature=0.3, seed=1, schema={"type": "object"}, top_logprobs=20)
    assert complete(server.url, ask).logprobs == (("4", {"4": -0.5, "5": -1.0}),)
    (request,) = server.requests
    assert (request["logprobs"], request["top_logprobs"], request["temperature"]) == (True, 20, 0.3)
    assert request["response_format"]["json_schema"]["schema"] == {"type": "object"}


@pytest.mark.parametrize(
    ("answer", "reply"),
    [
        (completion("so", "length"), Reply("so", "length", 11)),
        (completion("so so", "repetition"), Reply("so so", "repetition", 11)),
        (completion("call", "tool_calls"), Reply("call", "stop", 11)),
        (completion(None), Reply("", "stop", 11)),
        (completion(None, message={"role": "assistant", "reasoning_content": "1"}), Reply("1", "stop", 11)),
    ],
)
def test_how_an_answer_ended(answer, reply, server):
    server.answers = [answer]
    assert complete(server.url) == reply


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ((400, {}, {"error": {"message": "the prompt is  too\nlong"}}), Refused, "answered 400: .*the prompt is too"),
        ((422, {}, {}), Refused, "answered 422"),
        (completion("", "content_filter"), Refused, "filtered its answer"),
        ((200, {}, {"choices": []}), Refused, "answered without a completion"),
        ((200, {}, ["hello"]), Refused, "answered without a completion"),
        ((429, {"Retry-After": "7"}, {}), Busy, "answered 429"),
        ((408, {}, {}), Busy, "answered 408"),
        ((500, {}, {}), Busy, "answered 500"),
        ((503, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, {}), Busy, "answered 503"),
        ((401, {}, {}), RewardError, "answered 401: .*; correct the reward's url and model, or OPENAI_API_KEY"),
        ((404, {}, {}), RewardError, "answered 404"),
    ],
)
def test_failures_by_class(answer, error, words, server):
    """Never again for this ask, later, or never for any; each with the address. The client itself tries once."""
    server.answers = [answer]
    with pytest.raises(error, match=f"^{server.url} {words}") as raised:
        complete(server.url)
    assert len(server.requests) == 1
    if isinstance(raised.value, Busy):
        assert type(raised.value) is Busy and raised.value.after == (7 if answer[0] == 429 else 0)


def test_nobody_there(server):
    url = server.url
    server.server_close()
    with pytest.raises(Unreachable, match=f"^nobody answers at {url} \\("):
        complete(url)


def start(url: str, model: str = "") -> str:
    async def main() -> str:
        endpoint = Endpoint(url, model)
        try:
            await endpoint.start(torch.device("cpu"), 0)
        finally:
            await endpoint.close()
        return endpoint.model

    return asyncio.run(main())


def test_the_only_model_needs_no_name(server):
    assert start(server.url) == start(server.url, "judge-7b") == "judge-7b"


def test_a_model_that_is_not_served(server):
    """The sentence lists those that are."""
    with pytest.raises(RewardError, match=f"^{server.url} does not serve judge; give as model one of judge-7b$"):
        start(server.url, "judge")
    server.models = ["a", "b"]
    with pytest.raises(RewardError, match="serves not exactly one model; give as model one of a, b$"):
        start(server.url)
    with pytest.raises(RewardError, match="answered 404: .*; correct the reward's url"):
        start(server.url.removesuffix("/v1"))


def test_a_judge_from_its_specification_to_a_win_rate(server):
    """The whole way: a busy moment, an answer that cannot be read, a refused pair, and a verdict for the others."""
    (made,) = parse_rewards([f"unified-reward-think@{server.url}=0.5"])
    assert (made.name, made.weight) == ("unified-reward-think", 0.5)
    reward, video = made.reward, torch.zeros(9, 8, 8, 3, dtype=torch.uint8)
    reward.load(torch.device("cpu"))
    verdict = completion("<think>t</think><answer>Video 1 is better</answer>")
    server.answers = [verdict]
    pairs = reward.pairs(3)
    points = dict(zip(pairs, reward.compare([(video, video)] * 3, ["a dog"] * 3), strict=True))
    assert reward.rewards(points, 3) == [0.5, 0.5, 0.5], "whoever is shown first wins"
    assert [effort.tokens for effort in reward.efforts] == [11, 11, 11]
    server.answers = [completion("hm"), (400, {}, {})]
    (outcome,) = reward.compare([(video, video)], ["a dog"])
    assert isinstance(outcome, Invalid) and outcome.reason.startswith(f"client: {server.url} answered 400")
    reward.close()


def test_a_judge_whose_endpoint_is_not_there(server):
    """Loading says so in one sentence."""
    (made,) = parse_rewards([f"unified-reward-flex@{server.url}"])
    server.server_close()
    with pytest.raises(RewardError, match=r"^nobody answers at .*; start it, or correct the reward's address$"):
        made.reward.load(torch.device("cpu"))


def train(run_ranks, recipe: list[str], server: Server, folder: Path, *options: str) -> tuple[list[int | None], str]:
    """Two steps on an actor and a judge, whose first reward compares by the endpoint."""
    rewards = [f"--reward=unified-reward-think@{server.url}", "--reward=engines.rewards.testing:Brightness=0.5"]
    rest = [option for option in recipe if not option.startswith("--reward")]
    place = ["--schedule=async-train", "--steps=2", f"--out={folder / 'run'}", "--save-every=1"]
    return run_ranks(2, [*rest, *rewards, *place, *options], folder / "output")


def test_a_run_with_a_judge_that_writes(run_ranks, recipe, server, tmp_path):
    """Its verdicts train, and the metrics of a step say how it did."""
    server.answers = [completion("<answer>Video 1 is better</answer>")]
    codes, output = train(run_ranks, recipe, server, tmp_path)
    assert codes == [0, 0], output
    first, second = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert first["weights/sha256"] != second["weights/sha256"]
    for line in (first, second):
        judged = {name.removeprefix("judge/unified-reward-think/"): value for name, value in line.items()
                  if name.startswith("judge/unified-reward-think/")}  # fmt: skip
        assert judged.pop("seconds/p95") >= judged.pop("seconds/median") > 0
        assert judged == {
            "valid": 24, "tie_rate": 0.0, "first_shown_wins_rate": 1.0, "tokens/mean": 11.0, "turns/mean": 1.0,
        }  # fmt: skip
        assert line["critic/reward/unified-reward-think/mean"] == pytest.approx(0.5)
    assert len(server.requests) == 48


def test_a_judge_that_will_not_answer_ends_a_run_with_its_checkpoint(run_ranks, recipe, server, tmp_path):
    """One sentence with the address and what to do; the step before is saved."""
    server.answers = [completion("<answer>Video 1 is better</answer>")] * 24 + [(401, {}, {})]
    codes, output = train(run_ranks, recipe, server, tmp_path)
    assert codes == [1, 1]
    assert f"{server.url} answered 401" in output and "correct the reward's url and model" in output
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
