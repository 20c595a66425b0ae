"""Texts without questions in a report: who stays nearer to dense over all of them, and KL over the measured budget."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..eval import statistics
from ..eval.spec import Spec, title
from ..eval.statistics import Estimate
from ..eval.summary import Variant
from ..spine.figure import frame, label, plain
from ..spine.numbers import p_text, plural, size
from ..spine.table import Column, Table
from .figures import styled
from .gather import Texts, blocks, budget_text
from .rivals import NEAREST, text_pairs, unbudgeted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def nearer(found: Sequence[Texts]) -> Table | None:
    """A row for each model, policy, budget and rival, over all kinds and lengths of text."""
    together: dict[tuple[str, Variant], dict[str, list[tuple[Texts, Variant]]]] = {}
    for texts in found:
        for policy, rival in text_pairs({v: blocks(texts.lines[v]) for v in texts.kl}):
            together.setdefault((texts.model, policy), {}).setdefault(title(rival[0]), []).append((texts, rival))
    rows = [_row(*who, name, met) for who, rivals in together.items() for name, met in rivals.items()]
    corrected = statistics.holm([row["p"] for row in rows])
    columns = (
        Column("model", left=True),
        Column("policy", left=True),
        Column("budget (tile budget)", "budget", left=True),
        Column("against", left=True),
        Column("blocks", spec=".1f"),
        Column("KL", "kl", ".4f"),
        Column("its blocks", "its_blocks", ".1f"),
        Column("its KL", "its_kl", ".4f"),
        Column("nearer", "better"),
        Column("farther", "worse"),
        Column("p", lambda r: p_text(r["p"])),
        Column("Holm", lambda r: p_text(r["holm"])),
    )
    notes = [
        "KL: KL(dense || policy) in nats, means over texts of every kind and length that both have read; blocks: kept "
        "a tile, measured, of 64 keys. nearer, farther: texts on which the policy has less or more KL than its rival.",
        "p: two-sided, by exchanging whole texts. Holm: over the table.",
        *([NEAREST] if any(unbudgeted(policy) for _, policy in together) else []),
    ]
    listed = [row | {"holm": p} for row, p in zip(rows, corrected, strict=True)]
    return Table("Who is nearer to dense, over all texts", columns, listed, notes, keys=4) if rows else None


def _row(model: str, policy: Variant, rival: str, met: Sequence[tuple[Texts, Variant]]) -> dict[str, Any]:
    """One policy against one rival, which may have another budget on other kinds of text."""
    read = [(texts, policy) for texts, _ in met]
    mine, theirs = _over_all(read), _over_all(met)
    gaps = [mine[text] - theirs[text] for text in mine]
    name, budget = policy
    return {
        "model": model, "policy": title(name), "against": rival,
        "budget": budget_text(Spec.parse(name), budget),
        "blocks": _blocks(read), "its_blocks": _blocks(met),
        "kl": fmean(mine.values()), "its_kl": fmean(theirs.values()),
        "better": sum(g < 0 for g in gaps), "worse": sum(g > 0 for g in gaps), "p": statistics.sign_flips(gaps),
    }  # fmt: skip


def _over_all(read: Sequence[tuple[Texts, Variant]]) -> dict[str, float]:
    return {text: kl for texts, variant in read for text, kl in texts.kl[variant].items()}


def _blocks(read: Sequence[tuple[Texts, Variant]]) -> float:
    return fmean(blocks(texts.lines[variant]) for texts, variant in read for _ in texts.kl[variant])


def curve(model: str, found: Sequence[Texts]) -> Figure | None:
    """Mean KL over what a tile really kept, a panel for each length; a line for each policy, its budgets, or the
    multiples of a tuned one, along it."""
    from matplotlib.ticker import LogLocator, NullLocator

    sparse = [(texts, v) for texts in found for v in texts.kl if v[1] or unbudgeted(v)]
    if not sparse:
        return None
    styles, legend = styled(v for _, v in sparse)
    contexts = sorted({texts.context for texts, _ in sparse})
    figure, grid = frame(
        f"KL to dense over budget: {model}",
        "KL(dense || policy) in nats, lower is better: means over texts, bars 95% over texts; points: single texts\n"
        "horizontally the effective budget as measured, blocks kept a tile",
        1, len(contexts), legend, share_y=True,
    )  # fmt: skip
    for axes, context in zip(grid[0], contexts, strict=True):
        here = [texts for texts in found if texts.context == context]
        count = len({text for texts in here for kl in texts.kl.values() for text in kl})
        plain(axes, f"{size(context)} ({plural(count, 'text')})")
        for spec, look in styles.items():
            _draw(axes, here, {v for texts in here for v in texts.kl if Spec.parse(v[0]).family == spec}, look)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.margins(x=0.25)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda x, _: f"{x:g}")
            axis.set_minor_locator(NullLocator())
        label(axes, "effective budget (blocks of 64 keys a tile)", "KL to dense" if axes is grid[0][0] else "")
    return figure


def _draw(axes: Axes, found: Sequence[Texts], variants: Collection[Variant], look: Any) -> None:
    points = []
    for variant in variants:
        read = [(texts, variant) for texts in found if variant in texts.kl]
        single = [kl for kl in _over_all(read).values() if kl > 0]  # nothing was cut where it is 0
        if not single:
            continue
        blocks, value = _blocks(read), _interval(single)
        axes.plot([blocks] * len(single), single, ".", color=look.colour, alpha=0.35, markersize=4, zorder=2)
        axes.plot([blocks] * 2, [value.low, value.high], color=look.colour, linewidth=1, alpha=0.55)
        points.append((blocks, value.value))
    if points:
        axes.plot(
            *zip(*sorted(points), strict=True), look.line, color=look.colour, marker=look.marker,
            markerfacecolor=look.fill, markersize=5.5, linewidth=1 if look.control else 1.8, zorder=3, clip_on=False,
        )  # fmt: skip


def _interval(values: Sequence[float]) -> Estimate:
    return statistics.clustered(values, range(len(values)))
