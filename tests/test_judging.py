"""Judges that write, over a scripted engine on a virtual clock: deadlines, waits, second attempts, and their ends."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from asyncflow.core.graph import Kind, Task
from asyncflow.engine import Invalid, Work
from asyncflow.errors import ConfigError, RewardError
from asyncflow.testing import VirtualLoop
from engines.judge import JudgeEngine
from engines.orders import JudgeOrder
from engines.rewards.base import Effort, Outcome
from engines.rewards.chat.base import Ask, Busy, ChatEngine, Died, Refused, Reply, Unreachable
from engines.rewards.judges import ChatJudge, ComparingJudge, ScoringJudge
from engines.rewards.judging import ATTEMPTS, Judging
from engines.rewards.pairs import pairs_of, scheme
from engines.rewards.protocols.base import Case
from engines.rewards.protocols.unified_flex import UnifiedRewardFlex
from engines.rewards.protocols.unified_think import UnifiedRewardThink
from engines.rewards.testing import BrightnessDuel

ONE = Reply("<answer>Video 1 is better</answer>", tokens=7)
TWO = Reply("<answer>Video 2 is better</answer>", tokens=9)
FRAMES = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)


@dataclass
class Script(ChatEngine):
    """Answers each prompt with what is written for it, one after the other and the last again, after `seconds`."""

    answers: dict[str, list[Reply | Exception]]
    seconds: float = 1.0
    asks: list[Ask] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    aborted: int = 0
    now: int = 0
    most: int = 0
    is_open: bool = False

    async def start(self, device: torch.device, cache_bytes: int) -> None:
        self.is_open = True
        if "start" in self.answers:
            raise self.answers["start"][0]

    async def complete(self, ask: Ask) -> Reply:
        self.asks.append(ask)
        self.times.append(asyncio.get_running_loop().time())
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.now -= 1
        prompt = ask.messages[0].parts[-1]
        left = self.answers[prompt]
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        self.is_open = False


def judge(engine: Script, prompts: str, deadline: float = 300, concurrency: int = 16) -> list[tuple[Outcome, Effort]]:
    """The outcome of a comparison for each letter of `prompts`."""
    judging = Judging(engine, UnifiedRewardThink("{prompt}", 2, 64), concurrency, deadline)
    return VirtualLoop.run(judging.judge([Case((FRAMES, FRAMES), prompt) for prompt in prompts], lambda: None))


def test_cases_are_judged_at_once_and_keep_their_order():
    """At most so many conversations at a time, begun in order; what each took is its own."""
    engine = Script({"a": [ONE], "b": [TWO], "c": [ONE]})
    assert judge(engine, "abc", concurrency=2) == [
        (1.0, Effort(1.0, 7, 1)), (0.0, Effort(1.0, 9, 1)), (1.0, Effort(1.0, 7, 1)),
    ]  # fmt: skip
    assert engine.most == 2 and engine.times == [0, 0, 1]
    assert [ask.messages[0].parts[-1] for ask in engine.asks] == ["a", "b", "c"]


def test_a_reply_that_cannot_be_read_is_asked_for_once_more():
    """Not greedily, since the same would come again; the tokens of both count."""
    engine = Script({"a": [Reply("hm", tokens=3), ONE]})
    assert judge(engine, "a") == [(1.0, Effort(2.0, 10, 2))]
    assert [(ask.temperature, ask.seed) for ask in engine.asks] == [(0.0, 0), (0.3, 1)]


@pytest.mark.parametrize(
    ("replies", "reason"),
    [
        ([Reply("hm")], "parse: there is no <answer>"),
        ([Reply("<answer>", "length", 64)], "length: the answer was cut off after 64 tokens"),
        ([Reply("no no no", "repetition")], "repetition: the answer repeats itself"),
    ],
)
def test_a_reply_that_stays_bad_is_invalid_with_its_class(replies, reason):
    engine = Script({"a": replies, "b": [ONE]})
    (bad, effort), (good, _) = judge(engine, "ab")
    assert bad == Invalid(reason) and effort.turns == 2 and good == 1.0


def died(restarts: list[float]) -> Died:
    """The engine's end; to start it again takes 50 seconds, noted in `restarts`."""

    async def restart() -> None:
        await asyncio.sleep(50)
        restarts.append(asyncio.get_running_loop().time())

    return Died("the engine ended", restart)


def test_a_dead_engine_is_started_again_once_for_all_that_it_left():
    """Who had an outcome keeps it; the others begin anew, each with its whole deadline, which no restart eats up."""
    restarts: list[float] = []
    engine = Script({"a": [ONE], "b": [died(restarts), TWO], "c": [died(restarts), ONE], "d": [TWO]})
    judged = judge(engine, "abcd", concurrency=2, deadline=10)
    assert [outcome for outcome, _ in judged] == [1.0, 0.0, 1.0, 0.0]
    assert restarts == [52] and engine.times == [0, 0, 1, 1, 52, 52]
    assert [effort.seconds for _, effort in judged] == [1.0] * 4


def test_an_engine_that_dies_again_ends_the_run():
    restarts: list[float] = []
    with pytest.raises(RewardError, match="^the engine ended, and once more after it was started again"):
        judge(Script({"a": [ONE], "b": [died(restarts)]}), "ab")
    assert len(restarts) == 1


def test_the_second_attempt_has_the_protocols_schema():
    engine = Script({"a": [Reply("hm")]})
    judging = Judging(engine, UnifiedRewardFlex("{prompt}", 2, 64), 1, 10)
    VirtualLoop.run(judging.judge([Case((FRAMES, FRAMES), "a")], lambda: None))
    assert [ask.schema for ask in engine.asks] == [None, UnifiedRewardFlex.schema]


def test_a_deadline_aborts_and_says_so():
    """Of the whole conversation; others go on."""
    engine = Script({"a": [Reply("hm")], "b": [ONE]}, seconds=2)
    (late, effort), (good, _) = judge(engine, "ab", deadline=3)
    assert late == Invalid("timeout: no verdict within 3 seconds") and effort.seconds == 3
    assert good == 1.0 and engine.aborted == 1


def test_waits_for_a_busy_engine_double_and_last_as_long_as_it_says():
    engine = Script({"a": [Busy("full"), Busy("full"), Busy("full", after=9), Busy("full"), ONE]})
    assert judge(engine, "a")[0][0] == 1.0
    assert engine.times == [0, 2, 5, 15, 24]  # each after the second that an answer takes


def test_an_engine_that_stays_busy_is_invalid():
    """After so many attempts; the others' verdicts stand."""
    engine = Script({"a": [Busy("503")], "b": [ONE]})
    (bad, _), (good, _) = judge(engine, "ab")
    assert bad == Invalid(f"engine: 503, {ATTEMPTS} times") and good == 1.0
    assert len(engine.asks) == ATTEMPTS + 1


def test_a_refused_ask_is_invalid_at_once():
    engine = Script({"a": [Refused("too long")], "b": [TWO]})
    assert [outcome for outcome, _ in judge(engine, "ab")] == [Invalid("client: too long"), 0.0]
    assert len(engine.asks) == 2


@pytest.mark.parametrize("deadline", [300, 20])
def test_a_dead_engine_ends_the_run(deadline):
    """After its attempts, or at the deadline, with one sentence; conversations under way are aborted."""
    engine = Script({"a": [Unreachable("nobody answers")], "b": [Reply("hm"), ONE]}, seconds=0)
    with pytest.raises(RewardError, match="^nobody answers, and went on so; start it again, and go on with --resume$"):
        judge(engine, "ab", deadline)


def test_an_engine_that_will_never_answer_ends_the_run_at_once():
    """Without another attempt, and the other conversations are aborted."""
    engine = Script({"a": [RewardError("no such model")], "b": [ONE]})
    with pytest.raises(RewardError, match="^no such model$"):
        judge(engine, "ab")
    assert engine.times == [0, 0] and engine.aborted == 1


def test_an_engine_that_comes_back_in_time_is_forgiven():
    engine = Script({"a": [*[Unreachable("gone")] * (ATTEMPTS - 1), ONE]}, seconds=0)
    assert judge(engine, "a")[0][0] == 1.0
    assert engine.times == [0, 1, 3, 7, 15, 31, 61, 91]


def test_a_judge_that_waits_gives_signs_of_progress():
    """Every second, until its last conversation has ended."""
    signs: list[float] = []
    judging = Judging(Script({"a": [ONE]}, seconds=3.5), UnifiedRewardThink("{prompt}", 2, 64), 1, 60)

    async def main() -> None:
        await judging.judge([Case((FRAMES, FRAMES), "a")], lambda: signs.append(asyncio.get_running_loop().time()))
        await asyncio.sleep(5)

    VirtualLoop.run(main())
    assert signs == [0, 1, 2, 3]


# -------------------------------------------------------------------------------------------------------- as a reward


def chat(engine: Script) -> ChatJudge:
    engine.seconds = 0
    return ChatJudge(lambda: engine, UnifiedRewardThink("{prompt}", 2, 64), concurrency=4, deadline=60)


def comparing(engine: Script, opponents: str | int = "all", both_orders: bool = False) -> ComparingJudge:
    return ComparingJudge(
        "duel", chat(engine), on_invalid="drop-candidate", opponents=opponents, both_orders=both_orders
    )


def test_a_judge_lives_from_load_to_close():
    """The engine starts and ends in one loop, which outlasts its batches; a second close does nothing."""
    engine = Script({"a": [ONE], "b": [Reply("hm")]})
    reward = comparing(engine)
    reward.load(torch.device("cpu"))
    assert engine.is_open
    assert reward.compare([(FRAMES, FRAMES)] * 2, ["a", "b"]) == [1.0, Invalid("parse: there is no <answer>")]
    assert [effort.turns for effort in reward.efforts] == [1, 2]
    assert reward.compare([(FRAMES, FRAMES)], ["a"]) == [1.0] and len(reward.efforts) == 1
    reward.close()
    reward.close()
    assert not engine.is_open


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (Unreachable("nobody answers at X"), "nobody answers at X; start it, or correct the reward's address"),
        (RewardError("no such model"), "no such model"),
    ],
)
def test_an_engine_that_does_not_start_is_closed_and_named(error, sentence):
    engine = Script({"start": [error]})
    with pytest.raises(RewardError, match=f"^{sentence}$"):
        comparing(engine).load(torch.device("cpu"))
    assert not engine.is_open


def test_the_rank_engine_notes_what_a_judgement_took():
    """As a value of its own beside the outcome, for valid and invalid ones; and it closes its rewards."""
    engine = Script({"a": [ONE], "b": [Reply("hm", tokens=2)]})
    judges = JudgeEngine([comparing(engine)], "cpu")
    tasks = tuple(
        Task(f"compare/duel/0/{first}-{second}", Kind.COMPARE, inputs=("d.frames",), candidates=(first, second),
             judge="duel")
        for first, second in ((0, 1), (0, 2))
    )  # fmt: skip
    asked = []
    order = JudgeOrder(("a", "b"), ((0, 1), (0, 2)))
    frames = {"d.frames": torch.stack([FRAMES] * 3)}
    made = judges.judge(Work(tasks, frames, order, is_unneeded=lambda: bool(asked.append(1))))
    assert asked, "a judge asks the runtime, which takes it for a sign of progress"
    assert made.values["compare/duel/0/0-1"] == 1.0
    assert made.invalid == {"compare/duel/0/0-2": "parse: there is no <answer>"}
    efforts = [made.values[f"effort/{task.id}"] for task in tasks]
    assert [(effort.tokens, effort.turns) for effort in efforts] == [(7, 1), (4, 2)]
    judges.close()
    assert not engine.is_open


def test_a_scoring_judge_sees_one_video():
    engine = Script({"a": [ONE]})
    reward = ScoringJudge("s", chat(engine), on_invalid="abort")
    reward.load(torch.device("cpu"))
    reward.score([FRAMES], ["a"])
    reward.close()
    assert sum(isinstance(part, torch.Tensor) for part in engine.asks[0].messages[0].parts) == 2


# -------------------------------------------------------------------------------------------------------------- pairs


ROUND_ROBINS = [(size, number) for size in range(2, 9) for number in range(1, size) if number * size % 2 == 0]


@pytest.mark.parametrize(("size", "opponents"), [*ROUND_ROBINS, (2, "all"), (5, "all"), (8, "all")])
def test_a_round_robin_is_fair(size, opponents):
    """Everyone meets equally many others, none twice, and is shown first as often as second, but for one where odd."""
    pairs = scheme(opponents, size, both_orders=False)
    met = [sum(candidate in pair for pair in pairs) for candidate in range(size)]
    first = [sum(candidate == pair[0] for pair in pairs) for candidate in range(size)]
    assert set(met) == {size - 1 if opponents == "all" else opponents}
    assert len({frozenset(pair) for pair in pairs}) == len(pairs) and all(a != b for a, b in pairs)
    assert max(first) - min(first) <= 1
    assert pairs == sorted(pairs), "those with the same first video stand together"


def test_anchor_and_both_orders():
    assert scheme("anchor", 4, both_orders=False) == [(0, 1), (0, 2), (0, 3)]
    assert scheme("anchor", 3, both_orders=True) == [(0, 1), (0, 2), (1, 0), (2, 0)]
    assert len(set(scheme("all", 5, both_orders=True))) == 20


def test_against_the_base_model():
    """Its video is at the group's size, and second for all unless both are."""
    assert scheme("reference", 3, both_orders=False) == [(0, 3), (1, 3), (2, 3)]
    assert scheme("reference", 2, both_orders=True) == [(0, 2), (1, 2), (2, 0), (2, 1)]
    reward = comparing(Script({}), opponents="reference", both_orders=True)
    points = {(0, 2): 1.0, (2, 0): 0.5, (1, 2): Invalid("parse: hm"), (2, 1): 1.0}
    assert pairs_of(reward, 2) == sorted(points)
    assert reward.rewards(points, 2) == [0.75, 0.0], "a reward for each candidate, and none for the base model"


@pytest.mark.parametrize(
    "wrong", [[], [(0, 1)], [(0, 1), (1, 2), (1, 1)], [(0, 1), (1, 2), (0, 1)], [(0, 1), (1, 2), (2, 4)], [(-1, 2)]]
)
def test_pairs_of_ones_own_that_cannot_be(wrong):
    """Somebody meets nobody, himself, or one who is not there, or somebody twice: a sentence says what may be."""

    class Own(BrightnessDuel):
        def pairs(self, group_size: int) -> list[tuple[int, int]]:
            return wrong

    with pytest.raises(ConfigError, match=r"^--reward: pairs\(3\) of brightness-duel must have each candidate from 0 "):
        pairs_of(Own(), 3)


@pytest.mark.parametrize(("size", "opponents"), [(4, 4), (5, 3), (2, 2), (3, 1)])
def test_a_number_of_opponents_that_cannot_be(size, opponents):
    with pytest.raises(ConfigError, match=f"^--reward: pairs = {opponents}: in a group of {size} not every"):
        scheme(opponents, size, both_orders=False)


def outcomes(pairs: Sequence[tuple[int, int]], bad: int) -> dict[tuple[int, ...], Outcome]:
    """The lower candidate wins, whoever is shown first; those with `bad` cannot be judged."""
    return {pair: Invalid("parse: hm") if bad in pair else float(pair[0] < pair[1]) for pair in pairs}


def test_rewards_of_both_orders():
    """Each meeting counts twice, with the points of whoever was shown first; the invalid ones for neither."""
    reward = comparing(Script({}), both_orders=True)
    pairs = reward.pairs(4)
    assert reward.rewards(outcomes(pairs, bad=4), 4) == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0])
    *rates, last = reward.rewards(outcomes(pairs, bad=3), 4)
    assert rates == pytest.approx([1.0, 0.5, 0.0]) and isinstance(last, Invalid)


def test_rewards_against_an_anchor():
    """Each candidate's is its points against the anchor, whose own is its mean against all."""
    reward = comparing(Script({}), opponents="anchor")
    assert reward.rewards({(0, 1): 1.0, (0, 2): 0.0, (0, 3): 0.5}, 4) == [0.5, 0.0, 1.0, 0.5]
