"""The algorithms: what an RL step computes, and the commands that run it."""
