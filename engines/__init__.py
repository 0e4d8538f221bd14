"""The engines: what each task of a step computes, knowing nothing of ranks, placement or messages."""
