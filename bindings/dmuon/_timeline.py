"""``dmuon.plot_timeline``: a step as torch.profiler saw it, what overlaps what."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

ROWS = ("forward", "backward", "step", "unshard", "reduce", "publish", "waits")
_COLLECTIVE = re.compile(r"dmuon::\w+_owners .*:(unshard|reduce|publish)")

Range = tuple[float, float]


def timeline_rows(trace: str | Path) -> dict[str, list[Range]]:
    """What an exported Chrome trace holds, by row: (start, end) in ms since the first of them.

    "forward" are torch's operations outside the others on threads that run a backward or a step,
    "backward" autograd's, "step" the optimizer's; "unshard", "reduce" and "publish" the dedicated
    units' operations from their start to their end; "waits" what the host waited for of them.

    Args:
        trace: of ``profiler.export_chrome_trace``, .json or .json.gz.

    Raises:
        ValueError: no such ranges in it.
    """
    path = Path(trace)
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = [e for e in json.loads(text)["traceEvents"] if e.get("ph") == "X"]
    rows: dict[str, list[Range]] = {row: [] for row in ROWS}
    operations: list[tuple[Any, Range]] = []
    threads = set()
    for event in events:
        span = (event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)
        name = event["name"]
        if match := _COLLECTIVE.match(name):
            rows[match[1]].append(span)
        elif name.startswith("dmuon::wait"):
            rows["waits"].append(span)
        elif name.startswith("Optimizer.step#"):
            rows["step"].append(span)
            threads.add(event["tid"])
        elif name.startswith("autograd::engine::evaluate_function"):
            rows["backward"].append(span)
            threads.add(event["tid"])
        elif name.startswith("aten::"):
            operations.append((event["tid"], span))
    others = _merge(rows["backward"] + rows["step"] + rows["waits"])
    rows["forward"] = [
        span for tid, span in operations if tid in threads and not _inside(span, others)
    ]
    if not any(rows.values()):
        raise ValueError(f"dmuon: {path} holds no ranges of a step ({len(events)} events)")
    first = min(start for spans in rows.values() for start, _ in spans)
    return {
        row: [(start - first, end - first) for start, end in _merge(spans)]
        for row, spans in rows.items()
    }


def plot_timeline(trace: str | Path, file: str | Path) -> None:
    """Draws the rows of ``timeline_rows`` over time in ms into ``file`` (.png, .svg, .pdf).

    Needs matplotlib (``pip install matplotlib``). To make a trace:

    >>> with torch.profiler.profile() as profiler:
    ...     train_step()
    ...     dmuon.stats(model)  # waits for what is still being published
    >>> profiler.export_chrome_trace("trace.json.gz")
    >>> dmuon.plot_timeline("trace.json.gz", "step.png")

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: as ``timeline_rows``.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "dmuon: plot_timeline draws with matplotlib: pip install matplotlib"
        ) from error
    rows = timeline_rows(trace)
    figure = Figure(figsize=(12, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for place, spans in enumerate(rows.values()):
        bars = [(start, end - start) for start, end in spans]
        axes.broken_barh(bars, (place - 0.4, 0.8), color=f"C{place}")
    axes.set_yticks(range(len(rows)), labels=list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    figure.savefig(file)


def _merge(spans: list[Range]) -> list[Range]:
    """The union of ranges, in order."""
    merged: list[Range] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _inside(span: Range, others: list[Range]) -> bool:
    return any(start <= span[0] and span[1] <= end for start, end in others)
