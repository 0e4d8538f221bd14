"""When a judge fails too often: its invalid judgements over the last steps, against the share that its reward allows.

Pure; the training loop keeps one `Failures` a run. A window holds a few steps and some dozens of judgements, so that
neither one bad step nor one bad answer of four ends a run.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from asyncflow.core.graph import Graph
from asyncflow.engine import Invalid
from asyncflow.errors import JudgeUnfit
from engines.rewards.metrics import OTHER, outcomes_of, reason_class
from engines.rewards.registry import WeightedReward

STEPS, JUDGEMENTS = 3, 50
"""The least that a window holds."""

ADVICE = {
    "timeout": "raise its deadline, or lower its concurrency",
    "parse": "correct its template, or the model that it names",
    "length": "raise its max-tokens",
    "repetition": "give another template or model",
    "client": "correct its model, or its frames and template, which the engine refused",
    "engine": "give its engine more time or memory, or lower its concurrency",
    OTHER: "see to what it says",
}


class Failures:
    """The outcomes of each reward's judgements in the last steps."""

    def __init__(self, rewards: Sequence[WeightedReward]) -> None:
        self._rewards = [weighted.reward for weighted in rewards]
        self._steps: dict[str, deque[list[Any]]] = {weighted.name: deque() for weighted in rewards}

    def add(self, values: Mapping[str, Any], graph: Graph) -> None:
        """Take in a step's judgements, and forget the oldest that the window need not hold."""
        for name, steps in self._steps.items():
            steps.append(outcomes_of(values, graph, name))
            while len(steps) > STEPS and sum(map(len, steps)) - len(steps[0]) >= JUDGEMENTS:
                steps.popleft()

    def check(self) -> None:
        """Raises JudgeUnfit for a reward whose window is full and has more invalid judgements than `max_invalid`."""
        for reward in self._rewards:
            steps = self._steps[reward.name]
            outcomes = [outcome for step in steps for outcome in step]
            reasons = [outcome.reason for outcome in outcomes if isinstance(outcome, Invalid)]
            full = len(steps) >= STEPS and len(outcomes) >= JUDGEMENTS
            if full and len(reasons) > reward.max_invalid * len(outcomes):
                (kind, times), *_ = Counter(map(reason_class, reasons)).most_common(1)
                example = next(reason for reason in reasons if reason_class(reason) == kind)
                raise JudgeUnfit(
                    f"reward {reward.name}: {len(reasons)} of the {len(outcomes)} judgements of the last {len(steps)} "
                    f"steps were invalid, more than its max-invalid of {reward.max_invalid:g}; {times} are like this "
                    f"one: {example}; {ADVICE[kind]}, or raise max-invalid, and go on with --resume"
                )
