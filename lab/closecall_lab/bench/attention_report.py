"""The table and the plots of the attention benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from closecall.policy import Policy

from ..spine.numbers import threads, three_digits
from ..spine.results import Facts, Measured
from ..spine.table import Column, Table
from . import over_context
from .base import cell_columns, medians_note, where

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    *cell_columns(),
    Column("policy", left=True),
    Column("SDPA ms", lambda r: r["sdpa_ms"] and three_digits(r["sdpa_ms"])),
    Column("ours ms", lambda r: three_digits(r["ms"])),
    Column("vs SDPA", "vs_sdpa", ".2f"),
    Column("vs our dense", "vs_dense", ".2f"),
    Column("vs Flex", "attend_vs_flex", ".2f"),
    Column("selection", "select_share", ".1%"),
    Column("kept", spec=".1%"),
    Column("GFLOP/s", "gflops", ".0f"),
    Column("of peak", "share_of_peak", ".0%"),
    Column("best round", lambda r: r.get("best_share_of_peak"), ".0%"),
    Column("extra MiB", "extra_mib", ".1f"),
    Column("scaling", "one_thread_over_all", ".2f"),
)


def _rows(measured: Measured) -> list[dict[str, Any]]:
    return [
        cell
        | row
        | {
            "policy": name,
            "ms": result["ms"][name],
            "sdpa_ms": result["ms"].get("sdpa"),
            "extra_mib": result["extra_mib"][name],
        }
        for cell, result in measured
        for name, row in result["ours"].items()
    ]


def table(machine: Facts, measured: Measured, policies: Sequence[tuple[str, Policy]], warnings: Sequence[str]) -> Table:
    cell, _ = measured[0]
    peaks = sorted({f"{c['dtype']} {r['peak_gflops']:.0f}" for c, r in measured if r["peak_gflops"]})
    forms = sorted({r["sdpa_form"] for _, r in measured if "sdpa_form" in r})
    problems = sorted({r["flex_problem"] for _, r in measured if "flex_problem" in r})
    notes = [
        *(f"Warning: {w}" for w in warnings),
        *(str(policy) for _, policy in policies),
        "vs SDPA, vs our dense: their time over ours (selection + attention); above 1 we are faster.",
        "vs Flex: compiled FlexAttention's time over our attention's on the same kept blocks, selection in neither.",
        "GFLOP/s: of the attention kernel, over the kept blocks. scaling: one thread's time over this row's.",
        "best round: the fastest round's GFLOP/s over the highest register peak seen; the median has the noise in it.",
        medians_note(measured),
        *([f"Register peak of one core, measured between the rounds: {', '.join(peaks)} GFLOP/s."] if peaks else []),
        *([f"SDPA is torch's flash kernel, in its faster form: {' or '.join(forms)}."] if forms else []),
        *(f"No FlexAttention: {problem}" for problem in problems),
    ]
    return Table(f"Selection + attention: {where(machine, cell)}", COLUMNS, _rows(measured), notes, keys=5)


SERIES = (
    over_context.Series("vs_sdpa", "torch SDPA", "#c2410c", "o"),
    over_context.Series("vs_dense", "our kernel, dense", "#1d4ed8", "s"),
    over_context.Series("attend_vs_flex", "FlexAttention,\nsame blocks", "#6b7280", "^"),
)


def figures(machine: Facts, measured: Measured, policies: Sequence[tuple[str, Policy]]) -> dict[str, Figure]:
    """One figure per policy and thread count; the first policy on the fewest threads is `attention`."""
    rows = _rows(measured)
    counts = sorted({r["threads"] for r in rows})
    drawn = {}
    for name, p in policies:
        for n in counts:
            of_policy = [r for r in rows if r["policy"] == name and r["threads"] == n]
            more = [
                *([name.replace(":", "-")] if name != policies[0][0] else []),
                *([f"{n}t"] if n != counts[0] else []),
            ]
            drawn["-".join(["attention", *more])] = over_context.speedups(
                title=f"How much faster is {name} on {threads(n)}?",
                subtitle=f"selection + attention over a whole prompt; {where(machine, of_policy[0])}\n{p}",
                rows=of_policy,
                series=SERIES,
                panels=("dtype", "dim"),
            )
    return drawn
