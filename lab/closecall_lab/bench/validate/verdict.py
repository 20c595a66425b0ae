"""What a validation comes to, in sentences: whether it is right, and from where on and how much faster than dense.

Dense is the fastest that was timed at a context, torch's or ours. Speed-ups are medians over interleaved rounds; the
interval is the one that holds the true median with 95% confidence, whatever the distribution of times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from ...spine import numbers
from ...spine.results import Facts

Measured = Sequence[tuple[Facts, Facts]]
CONFIDENCE = 0.95


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The order statistics that hold the median with 95% confidence; the ends where there are too few values."""
    ordered, n = sorted(values), len(values)
    outside = 0  # how many may be cut off at each end
    tail = 0.0
    while outside < (n - 1) // 2:
        tail += math.comb(n, outside) / 2**n
        if 2 * tail > 1 - CONFIDENCE:
            break
        outside += 1
    cut = max(outside - 1, 0)
    return ordered[cut], ordered[n - 1 - cut]


def speedup(dense: dict[str, list[float]], ours: list[float]) -> Facts:
    """How many times faster than the fastest dense, round by round; `dense` and `ours` are seconds."""
    best = min(dense, key=lambda name: statistics.median(dense[name]))
    ratios = [d / o for d, o in zip(dense[best], ours, strict=True)]
    low, high = interval(ratios)
    return {"over": best, "times": statistics.median(ratios), "low": low, "high": high}


def _found(name: str, timed: Measured, kind: str, field: str) -> dict[int, Facts]:
    """One contender's speed-ups by context, on one kind of keys; `field` tells plain calls from replays."""
    return {
        cell["context"]: row[field]
        for cell, result in timed
        for row in result.get("rows", [])
        if cell["inputs"] == kind and row["name"] == name and row.get(field)
    }


def _words(found: dict[int, Facts]) -> str:
    last = max(found)
    at = found[last]
    return f"{at['times']:.2f}x at {numbers.size(last)} ({at['low']:.2f} to {at['high']:.2f})"


def _faster(name: str, timed: Measured) -> str | None:
    """One contender's sentence; None if it was not timed."""
    kinds = list(dict.fromkeys(cell["inputs"] for cell, _ in timed))
    speedups = {kind: there for kind in kinds if (there := _found(name, timed, kind, "speedup"))}
    if not speedups:
        return None
    first, *others = speedups
    contexts = sorted(speedups[first])
    words = _words(speedups[first])
    if replayed := _found(name, timed, first, "graph_speedup"):
        words += f"; both from a CUDA graph {_words(replayed)}"
    words += "".join(f"; on {kind} keys {_words(speedups[kind])}" for kind in others)
    # From the first context on from which all longer ones are faster, beyond doubt, whatever the keys.
    every = {n: min(there[n]["low"] for there in speedups.values() if n in there) for n in contexts}
    sure = next((n for n in contexts if all(every[m] > 1 for m in contexts if m >= n)), None)
    if sure is None:
        return f"{name} is not faster than the best dense at any context timed for certain: {words}."
    return f"{name} is faster than the best dense from {numbers.size(sure)} tokens on: {words}."


def _label(cell: Facts) -> str:
    return cell.get("case") or f"timing at {numbers.size(cell['context'])}, {cell['inputs']} keys"


def sentences(checked: Measured, timed: Measured, complete: bool, file: Path) -> list[str]:
    """The verdict. Nothing is said of speed where something is wrong: a wrong answer is not fast."""
    tried = [(_label(cell), result) for cell, result in (*checked, *timed)]
    failed = [(name, result["problem"]) for name, result in tried if result.get("problem")]
    if failed:
        first, problem = failed[0]
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        return [
            f"WRONG: {len(failed)} of {len(tried)} failed. {first}: {problem}{more}.",
            f"Please send {file} with an issue to the project: it holds all that is needed to find out why.",
        ]
    if not complete:
        return [f"NOT FINISHED: {len(tried)} were tried and right; the same command goes on with the rest ({file})."]
    skipped = sum(bool(result.get("skipped")) for _, result in tried)
    starved = [(name, result["no_memory"]) for name, result in tried if result.get("no_memory")]
    left_out = f", {skipped} left out for want of memory" if skipped else ""
    said = [f"RIGHT: {len(tried) - skipped - len(starved)} of {len(tried)} checks and timings passed{left_out}."]
    if starved:
        first, problem = starved[0]
        said.append(
            f"OUT OF MEMORY: {len(starved)} of {len(tried)} could not be finished. {first}: {problem}. The rest is "
            f"kept in {file}. Free memory, or leave them out with --contexts or --case: the same command tries again."
        )
    names = dict.fromkeys(row["name"] for _, result in timed for row in result.get("rows", []))
    said += [sentence for name in names if (sentence := _faster(name, timed)) is not None]
    return [*said, f"Please send {file} to the project if you can: nobody has timed these kernels on every device."]
