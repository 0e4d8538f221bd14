"""Traces as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process row for each rank and one for the controller, one thread row for each of its lanes; a transfer is an arrow
from the sender's lane to the receiver's. The training loop writes one file for each step.
"""

from pathlib import Path
from typing import Any

import msgspec

from asyncflow.core.graph import DEVICE
from asyncflow.core.plan import CONTROLLER
from asyncflow.core.trace import SUM, TRANSFER, Span, Trace


def write(trace: Trace, path: Path) -> None:
    """Write `trace` to `path` as JSON, times in microseconds since the step began."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode({"traceEvents": events(trace), "displayTimeUnit": "ms"}))


def events(trace: Trace) -> list[dict[str, Any]]:
    """The trace events: names of rows, one complete event for each span, one arrow for each transfer."""
    made: list[dict[str, Any]] = []
    rows = _rows(trace)
    for rank in sorted({span.rank for span in trace.spans}):
        name = "controller" if rank == CONTROLLER else f"rank {rank}"
        made.append(_meta("process_name", rank, 0, name=name))
        made.append(_meta("process_sort_index", rank, 0, sort_index=rank))
        lanes = {span.lane for span in trace.spans if span.rank == rank}
        made += [_meta("thread_name", rank, rows[lane], name=lane) for lane in sorted(lanes)]
    ends: dict[int, list[Span]] = {}
    for span in trace.spans:
        arguments: dict[str, Any] = {"tasks": list(span.tasks), "number": span.number}
        invalid = {name: trace.invalid[name] for name in span.tasks if name in trace.invalid and span.lane != TRANSFER}
        if invalid:
            arguments["invalid"] = invalid
        if span.cancelled:
            arguments["cancelled"] = True
        made.append(_event("X", span, rows, span.start, dur=(span.end - span.start) * 1e6, args=arguments))
        if span.lane == TRANSFER and span.name != SUM:
            ends.setdefault(span.number, []).append(span)
    maker = {name: span.rank for span in trace.spans if span.lane == DEVICE for name in span.tasks}
    for number, pair in ends.items():
        for span in pair:
            sends = span.rank == maker[span.tasks[0]]
            at = span.start if sends else span.end
            made.append(_event("s" if sends else "f", span, rows, at, id=number, bp="e"))
    return made


def _rows(trace: Trace) -> dict[str, int]:
    """The number of each lane's row, the same on all ranks."""
    judges = sorted({span.lane for span in trace.spans} - {DEVICE, TRANSFER})
    return {lane: number for number, lane in enumerate([DEVICE, TRANSFER, *judges])}


def _event(phase: str, span: Span, rows: dict[str, int], at: float, **more: Any) -> dict[str, Any]:
    lane = {"pid": span.rank, "tid": rows[span.lane], "cat": span.lane}
    return {"ph": phase, "name": span.name, "ts": at * 1e6, **lane, **more}


def _meta(what: str, rank: int, lane: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": arguments}
