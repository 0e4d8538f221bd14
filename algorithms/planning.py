"""Which graph and plan the next step follows: the schedule's own, or, for `stagebreaker`, what the search finds.

Invariant: they change between steps only, and never what is trained. The training loop tells it the costs after
every step; a search runs in a thread beside the next step, off the critical path.
"""

import asyncio

from asyncflow.core.catch_up import variants
from asyncflow.core.cost import CostTable, Estimates
from asyncflow.core.graph import Graph
from asyncflow.core.plan import Cluster, Plan
from asyncflow.core.search import Found, search

DRIFT = 0.1
"""Medians that lie off what the last search was told of them by more than this share call for another one."""
SLIGHT = 0.01
"""What changes by less than this share of the longest task matters to no plan."""


class Planner:
    """The plans of a run: at first `plan`, and, if it `searches`, then the best for the costs so far.

    `graph` is the variant that the plan is of. `fixed` keeps the first plan that was found, or was `found` by the run
    that is resumed, as exact mode wants it.
    """

    def __init__(
        self, graph: Graph, plan: Plan, cluster: Cluster, *, searches: bool, fixed: bool, found: Plan | None = None
    ) -> None:
        self.graph, self.plan = graph, plan
        self.found: Plan | None = None
        for variant in variants(graph, cluster) if searches else ():
            if found and found.fits(variant, cluster):
                self.graph, self.plan, self.found = variant, found, found
        self._own = graph, plan, cluster
        self._searches, self._fixed = searches, fixed
        self._searched_with: Estimates | None = None
        self._search: asyncio.Task[Found] | None = None

    async def reconsider(self, costs: CostTable) -> None:
        """Take up the plan that was found meanwhile; begin a search if there was none, or if costs drifted."""
        if self._search and self._search.done():
            self.graph, self.plan, _ = await self._search
            self.found, self._search = self.plan, None
        if not self._searches or self._search or (self._fixed and self.found):
            return
        estimates = costs.estimates()
        if self._searched_with and not _drifted(self._searched_with, estimates):
            return
        self._searched_with = estimates
        self._search = asyncio.create_task(asyncio.to_thread(search, *self._own, estimates))

    async def close(self) -> None:
        """Wait for a search under way, whose plan nobody will follow."""
        if self._search:
            await self._search


def _drifted(before: Estimates, now: Estimates) -> bool:
    """Whether something takes another time than was thought, be it that it was never measured before."""
    slight = SLIGHT * max(now.medians.values())
    thought = ((before.row(key), took) for key, took in now.medians.items())
    return any(seconds is not None and abs(took - seconds) > max(DRIFT * seconds, slight) for seconds, took in thought)
