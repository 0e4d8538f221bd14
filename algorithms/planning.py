"""Which plan the next step follows: the schedule's own, or, for `stagebreaker`, the best that the search finds.

Invariant: a plan changes between steps only, and never what is trained. The training loop tells it the costs after
every step; a search runs in a thread beside the next step, off the critical path.
"""

import asyncio

from asyncflow.core.cost import CostTable, Estimates
from asyncflow.core.graph import Graph
from asyncflow.core.plan import Cluster, Plan
from asyncflow.core.search import search

DRIFT = 0.1
"""Medians that lie off what the last search was told of them by more than this share call for another one."""
SLIGHT = 0.01
"""What changes by less than this share of the longest task matters to no plan."""


class Planner:
    """The plans of a run: at first `plan`, and, if it `searches`, then the best for the costs so far.

    `fixed` keeps the first plan that was found, or was `found` by the run that is resumed, as exact mode wants it.
    """

    def __init__(
        self, graph: Graph, plan: Plan, cluster: Cluster, *, searches: bool, fixed: bool, found: Plan | None = None
    ) -> None:
        self.found = found if searches and found and found.fits(graph, cluster) else None
        self.plan = self.found or plan
        self._improved = plan
        self._graph, self._cluster = graph, cluster
        self._searches, self._fixed = searches, fixed
        self._searched_with: Estimates | None = None
        self._search: asyncio.Task[tuple[Plan, float]] | None = None

    async def reconsider(self, costs: CostTable) -> None:
        """Take up the plan that was found meanwhile; begin a search if there was none, or if costs drifted."""
        if self._search and self._search.done():
            self.found, _ = await self._search
            self.plan, self._search = self.found, None
        if not self._searches or self._search or (self._fixed and self.found):
            return
        estimates = costs.estimates()
        if self._searched_with and not _drifted(self._searched_with, estimates):
            return
        self._searched_with = estimates
        searching = asyncio.to_thread(search, self._graph, self._improved, self._cluster, estimates)
        self._search = asyncio.create_task(searching)

    async def close(self) -> None:
        """Wait for a search under way, whose plan nobody will follow."""
        if self._search:
            await self._search


def _drifted(before: Estimates, now: Estimates) -> bool:
    """Whether something takes another time than was thought, be it that it was never measured before."""
    slight = SLIGHT * max(now.medians.values())
    thought = ((before.row(key), took) for key, took in now.medians.items())
    return any(seconds is not None and abs(took - seconds) > max(DRIFT * seconds, slight) for seconds, took in thought)
