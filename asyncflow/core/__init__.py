"""The pure core: one graph of tasks, and the state machine that orders it.

Nothing here imports torch or asyncio, reads a clock or does I/O, so that the simulator and the controller, which drive
the same `Dispatcher`, cannot differ in what they decide.
"""
