"""Which plan the next step follows: the schedule's own, or, for `stagebreaker`, the best that the search finds.

Invariant: a plan changes between steps only, and never what is trained. The training loop tells it the costs after
every step; a search runs in a thread beside the next step, off the critical path.
"""

import asyncio
from collections.abc import Mapping

from asyncflow.core.cost import CostTable
from asyncflow.core.graph import Graph
from asyncflow.core.plan import Cluster, Plan
from asyncflow.core.search import search

DRIFT = 0.1
"""Medians that moved by more than this share since the last search call for another one."""


class Planner:
    """The plans of a run: at first `plan`, and, if it `searches`, then the best for the costs so far.

    `fixed` keeps the first plan that was found, or was `found` by the run that is resumed, as exact mode wants it.
    """

    def __init__(
        self, graph: Graph, plan: Plan, cluster: Cluster, *, searches: bool, fixed: bool, found: Plan | None = None
    ) -> None:
        self.found = found if searches and found and found.fits(graph, cluster) else None
        self.plan = self.found or plan
        self._graph, self._cluster = graph, cluster
        self._searches, self._fixed = searches, fixed
        self._searched_with: Mapping[str, float] = {}
        self._search: asyncio.Task[tuple[Plan, float]] | None = None

    async def reconsider(self, costs: CostTable) -> None:
        """Take up the plan that was found meanwhile; begin a search if there was none, or if costs drifted."""
        if self._search and self._search.done():
            self.found, _ = await self._search
            self.plan, self._search = self.found, None
        if not self._searches or self._search or (self._fixed and self.found):
            return
        estimates = costs.estimates()
        before, now = self._searched_with, estimates.medians
        if before and all(abs(now[key] / seconds - 1) <= DRIFT for key, seconds in before.items() if seconds):
            return
        self._searched_with = now
        self._search = asyncio.create_task(asyncio.to_thread(search, self._graph, self.plan, self._cluster, estimates))

    async def close(self) -> None:
        """Wait for a search under way, whose plan nobody will follow."""
        if self._search:
            await self._search
