"""The benches: every claim about speed, memory or learning is printed by one of them. `python -m bench NAME`."""
